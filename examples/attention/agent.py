"""IMPALA with causal self-attention in place of an LSTM (Vaswani et al. 2017, arXiv
1706.03762).

    python -m monobeast --agent examples.attention.agent \
        --env tests.envs:torchbeast/LongMemory-v0

Each step attends to the M steps before it, of its own episode. While acting, what was
computed of them is kept in core_state; in learn() that is what a rollout begins with. A
rollout has steps of one episode only (--one_episode_rollouts), so no mask has to keep
episodes apart, and what is padding comes last, where no real step looks.
"""

import torch
import torch.nn.functional as F
from torch import nn

import polybeast
from torchbeast.flags import number
from torchbeast.messages import BadInput


def parser():
    p = polybeast.parser()
    g = p.add_argument_group("attention")
    g.add_argument("--context", type=number(int, 1), default=20, metavar="M",
                   help="steps to look back at (default: %(default)s)")  # fmt: skip
    p.set_defaults(one_episode_rollouts=True, separate_value=False)
    return p


class Attention(nn.Module):
    """A layer of attention, and one of two linear layers, with the methods of
    networks.LSTM. The state: the last M embeddings [1, B, M, H], and which of them are
    of this episode [1, B, M]."""

    def __init__(self, in_features, context, hidden_size=128, num_heads=4):
        super().__init__()
        self.context, self.hidden_size, self.num_heads = context, hidden_size, num_heads
        self.embed = nn.Linear(in_features, hidden_size)
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.out = nn.Linear(hidden_size, hidden_size)
        # How much a head likes to look back so far.
        self.bias = nn.Parameter(torch.zeros(num_heads, context + 1))
        self.norms = nn.ModuleList(nn.LayerNorm(hidden_size) for _ in range(2))
        self.layers = nn.Sequential(
            nn.Linear(hidden_size, 2 * hidden_size),
            nn.ReLU(),
            nn.Linear(2 * hidden_size, hidden_size),
        )

    def initial_state(self, batch_size):
        M, H = self.context, self.hidden_size
        embeddings = torch.zeros(1, batch_size, M, H)
        return embeddings, torch.zeros(1, batch_size, M, dtype=torch.bool)

    def unroll(self, x, done, state):
        """Returns (outputs [T, B, H], the state) for features x [T, B, F]."""
        M, T, B = self.context, len(x), x.shape[1]
        before, known = (s[0] for s in state)
        known = known & ~done[0, :, None]  # An episode has nothing before it.
        x = self.embed(x).transpose(0, 1)  # [B, T, H]
        everything = torch.cat([before, x], 1)  # [B, M + T, H]
        known = torch.cat([known, known.new_ones(B, T)], 1)

        parts = self.query_key_value(self.norms[0](everything)).chunk(3, -1)
        heads = [y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in parts]
        query, key, value = heads  # [B, heads, M + T, H / heads]
        times = torch.arange(M + T, device=x.device)
        distance = times[M:, None] - times  # [T, M + T]
        allowed = (distance >= 0) & (distance <= M) & known[:, None]  # [B, T, M + T]
        bias = self.bias[:, distance.clamp(0, M)]  # [heads, T, M + T]
        bias = torch.where(allowed[:, None], bias, -torch.inf)
        y = F.scaled_dot_product_attention(query[:, :, M:], key, value, attn_mask=bias)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        x = x + self.layers(self.norms[1](x))
        state = everything[:, -M:], known[:, -M:]
        return x.transpose(0, 1), tuple(s[None] for s in state)


class Net(polybeast.Net):
    def __init__(self, encoder, action_space, context):
        super().__init__(encoder, action_space)
        self.core = Attention(self.num_features, context)
        self.make_heads(self.core.hidden_size)


class Agent(polybeast.Agent):
    def make_net(self, observation_space, action_space):
        if self.flags.use_lstm:
            raise BadInput("--use_lstm: this agent has attention in place of an LSTM")
        if not self.flags.one_episode_rollouts:
            raise BadInput(
                "--no-one_episode_rollouts: this agent would attend to other episodes"
            )
        encoder = self.make_encoder(observation_space)
        return Net(encoder, action_space, self.flags.context)
