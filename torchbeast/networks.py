"""What the networks of agents are made of: an encoder, memory, and heads."""

import torch
import torch.nn.functional as F
from torch import nn

from torchbeast import distributions
from torchbeast.encoders import initialize
from torchbeast.nests import map_structure

# Heads that read more numbers of the last action would be mostly that.
LARGE_ACTION = 256


class Network(nn.Module):
    """An encoder, an LSTM if one is wanted, and the heads that make_heads() makes, and
    heads() and, in training, value_heads() evaluate: a subclass has these.

    forward(step, core_state) takes a dict of tensors [T, B, ...] (torchbeast/
    environment.py lists the fields of a step) and returns ({name: tensor [T, B, ...]},
    core_state). core_state is a tuple of tensors [1, B, hidden], () without an LSTM.

    encoder:  a module, observations [N, ...] -> [N, encoder.out_features]; of two
              (encoders.TwoEncoders) the second one's features are value_heads()'s
    feedback: the heads, or the LSTM, read the last action, one-hot, and the last
              reward, clipped to +-1 (IMPALA, arXiv 1802.01561, figure 3); of an
              action of more than LARGE_ACTION numbers they read so many of a layer
    """

    def __init__(self, encoder, action_space, use_lstm=False, feedback=True):
        super().__init__()
        self.distribution = distributions.make(action_space)
        self.encoder = encoder
        self.feedback = feedback
        num_features, size = encoder.out_features, self.distribution.num_features
        self.last_action = None
        if feedback and size > LARGE_ACTION:
            self.last_action = nn.Linear(size, LARGE_ACTION, bias=False)
            nn.init.normal_(self.last_action.weight, std=LARGE_ACTION**-0.5)
        if feedback:
            num_features += min(size, LARGE_ACTION) + 1
        self.num_features = num_features  # Of what memory, or the heads, read.
        self.core = LSTM(num_features) if use_lstm else None
        self.make_heads(self.core.hidden_size if use_lstm else num_features)

    def make_heads(self, num_features):
        raise NotImplementedError

    def heads(self, x):
        """Returns the outputs {name: tensor [N, ...]} for features x [N, F]."""
        raise NotImplementedError

    def value_heads(self, x):
        """As heads(), the outputs that are learned, and not needed to act."""
        return {}

    def initial_state(self, batch_size):
        """Returns the core_state before a first step."""
        return () if self.core is None else self.core.initial_state(batch_size)

    def forward(self, step, core_state=()):
        T, B = step["reward"].shape
        observation = map_structure(lambda o: o.flatten(0, 1), step["observation"])
        x = self.encoder(observation)  # [T * B, F]
        x = x if isinstance(x, tuple) else (x,)
        if self.feedback:
            last_action = self.distribution.features(step["last_action"]).flatten(0, 1)
            if self.last_action is not None:
                last_action = self.last_action(last_action)
            last_reward = step["reward"].clamp(-1, 1).reshape(T * B, 1)
            x = [torch.cat([y, last_action, last_reward], dim=1) for y in x]
        x, x_of_values = x[0], x[-1]
        if self.core is not None:
            x = x.view(T, B, -1)
            x, core_state = self.core.unroll(x, step["done"], core_state)
            x = x_of_values = x.flatten(0, 1)
        outputs = self.heads(x)
        if self.training:
            outputs = {**outputs, **self.value_heads(x_of_values)}
        outputs = {name: y.unflatten(0, (T, B)) for name, y in outputs.items()}
        if "action_mask" in step:
            outputs = self.masked(outputs, step["action_mask"])
        return outputs, core_state

    def masked(self, outputs, mask):
        """Returns the outputs of steps with this mask of actions [T, B, C] bool."""
        logits = self.distribution.masked(outputs["policy_logits"], mask)
        return {**outputs, "policy_logits": logits}


class ActorCritic(Network):
    """A Network with two heads: "policy_logits" [T, B, P], the parameters of the
    distribution of actions, and, in training, "baseline" [T, B], the value."""

    def make_heads(self, num_features):
        self.policy = distributions.PolicyHead(num_features, self.distribution)
        self.baseline = nn.Linear(num_features, 1)
        initialize(self.policy, gain=0.01)  # Nearly uniform at first.
        initialize(self.baseline, gain=1)

    def heads(self, x):
        return {"policy_logits": self.policy(x)}

    def value_heads(self, x):
        return {"baseline": self.baseline(x).squeeze(-1)}


class LSTM(nn.LSTMCell):
    """An LSTM that is reset where an episode begins."""

    def __init__(self, in_features, out_features=256):
        super().__init__(in_features, out_features)
        # Remember from the start: the forget gate's bias (the second quarter).
        nn.init.ones_(self.bias_ih[out_features : 2 * out_features])

    def initial_state(self, batch_size):
        """Returns the state before a first step: two tensors [1, B, out_features]."""
        shape = (1, batch_size, self.hidden_size)
        return torch.zeros(shape), torch.zeros(shape)

    def unroll(self, x, done, state):
        """Returns (outputs [T, B, out_features], the state) for features x [T, B, F].

        done: [T, B] bool. (On a CPU, a cell step by step is five times faster than
        nn.LSTM, which the resets would cut up, and faster still if the products with
        the features are one.)
        """
        cell = self
        if x.device.type == "cpu" and len(x) > 1:
            x, cell = F.linear(x, self.weight_ih, self.bias_ih), self._cell
        outputs = []
        state = tuple(s[0] for s in state)  # [B, out_features]
        for x_t, keep_t in zip(x, (~done).unsqueeze(-1).to(x.dtype)):
            state = cell(x_t, tuple(keep_t * s for s in state))
            outputs.append(state[0])
        return torch.stack(outputs), tuple(s[None] for s in state)

    def _cell(self, x, state):
        """What LSTMCell does with x [B, 4 * out_features], its part of the gates."""
        h, c = state
        gates = x + F.linear(h, self.weight_hh, self.bias_hh)
        i, f, g, o = gates.chunk(4, dim=1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c
