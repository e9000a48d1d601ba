"""Optimizers: RMSProp's flags, and what a checkpoint says of any optimizer."""

import torch

from torchbeast.flags import number


def add_rmsprop_flags(group):
    """Adds --num_epochs and the options of RMSProp. num_epochs and learning_rate are
    None by default: see Agent.defaults()."""
    # fmt: off
    group.add_argument("--num_epochs", type=number(int, 1), metavar="N",
                       help="gradient steps on each batch")
    group.add_argument("--learning_rate", type=number(float, above=0), metavar="X",
                       help="learning rate, which falls linearly to 0 at --total_steps")
    group.add_argument("--alpha", type=number(float, 0, 0.9999), default=0.99,
                       metavar="X", help="smoothing constant (default: %(default)s)")
    group.add_argument("--momentum", type=number(float, 0), default=0.0, metavar="X",
                       help="momentum (default: %(default)s)")
    group.add_argument("--epsilon", type=number(float, above=0), default=1e-5,
                       metavar="X", help="term added to the denominator "
                       "(default: %(default)s)")
    group.add_argument("--grad_norm_clipping", type=number(float, above=0),
                       default=40.0, metavar="X", help="largest gradient norm "
                       "(default: %(default)s)")
    # fmt: on


def load_optimizer(optimizer, state):
    """Loads an optimizer's state, but not its options: this command's flags count, not
    those that the checkpoint was made with."""
    options = [
        {name: x for name, x in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    groups = zip(state["param_groups"], options, strict=True)
    groups = [{**saved, **own} for saved, own in groups]
    optimizer.load_state_dict({**state, "param_groups": groups})
    if optimizer.defaults.get("momentum", 0) > 0:
        for parameter, state_of in optimizer.state.items():  # It may be new.
            state_of.setdefault("momentum_buffer", torch.zeros_like(parameter))
