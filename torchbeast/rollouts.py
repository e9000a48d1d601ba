"""What rollouts hold, in every program.

A rollout has T + 1 steps of an environment, of which step 0 repeats the last step of
the rollout before it; what the agent's act() returned on steps 0 to T - 1; and
core_state, the recurrent state before step 0. A batch of B rollouts is

    {**step, **outputs, "core_state": ...}

with [T + 1, B, ...] for the fields of a step, [T, B, ...] for outputs and [., B, ...]
for core_state.
"""

import torch

from torchbeast import machine
from torchbeast.environment import leaves, map_structure
from torchbeast.process import BadInput


def specs(agent, step, unroll_length):
    """Finds what one rollout holds by one call of act(): a nest of tensors without
    data. Their first dimension is time, except for core_state's.

    step: arrays [E, ...] of an environment. Raises BadInput if act() returns what no
    rollout can hold.
    """

    def spec(x, *shape):
        return torch.empty(shape, dtype=x.dtype, device="meta")

    step = map_structure(torch.as_tensor, step)
    T, E = unroll_length, len(step["reward"])
    initial = agent.initial_state(E)
    agent.net.eval()  # A BatchNorm is to count no batch that is not learned from.
    result = agent.act(map_structure(lambda x: x[None], step), initial)
    agent.net.train()
    if not isinstance(result, tuple) or not isinstance(result[0], dict):
        what = type(result).__name__
        raise BadInput(f"act() returned {what}, expected (dict of outputs, core_state)")
    outputs, core_state = result
    for path, x in leaves(outputs):
        if not torch.is_tensor(x) or x.requires_grad:
            what = (
                "a tensor with a gradient" if torch.is_tensor(x) else type(x).__name__
            )
            raise BadInput(
                f"act() returned {path} as {what}, expected a tensor without gradient "
                "(@torch.inference_mode())"
            )
        if x.shape[:2] != (1, E):
            raise BadInput(
                f"act() returned {path} of shape {list(x.shape)}, expected "
                f"[1, {E}, ...]"
            )
    check_outputs(outputs)
    for name in outputs:
        if name in (*step, "core_state", "version"):
            raise BadInput(f"act() returned {name!r}, which a rollout has of its own")
    if "action" not in outputs:
        raise BadInput(f"act() returned {sorted(outputs)}, expected 'action' in it")
    action, expected = outputs["action"][0], step["last_action"]
    if (action.dtype, action.shape) != (expected.dtype, expected.shape):
        raise BadInput(
            f"act() returned action as {action.dtype} {[1, *action.shape]}, expected "
            f"{expected.dtype} {[1, *expected.shape]}"
        )
    before, after = (
        [(path, list(x.shape)) for path, x in leaves(state)]
        for state in (initial, core_state)
    )
    if before != after:
        raise BadInput(f"act() returned core_state {after}, expected {before}")
    return {
        **map_structure(lambda x: spec(x, T + 1, *x.shape[1:]), step),
        **map_structure(lambda x: spec(x, T, *x.shape[2:]), outputs),
        "core_state": map_structure(
            lambda x: spec(x, x.shape[0], *x.shape[2:]), core_state
        ),
    }


def check_memory(specs, num_rollouts):
    """Raises BadInput if so many rollouts at a time need more memory than the machine
    has."""
    needed = num_rollouts * sum(x.nbytes for _, x in leaves(specs))
    total = machine.memory_bytes()
    if needed > total:
        raise BadInput(
            f"{num_rollouts:,} rollouts at a time need {needed:,} bytes of memory, the "
            f"machine has {total:,}: use a smaller --unroll_length or --batch_size, or "
            "fewer environments"
        )


class NotFinite(ValueError):
    """The network overflowed, which may be the environment's doing."""

    of_environment = True


def check_outputs(outputs):
    """Raises NotFinite that names the first of act()'s outputs that is not finite."""
    for path, x in leaves(outputs):
        if not torch.isfinite(x).all():
            raise NotFinite(
                f"{path} is not finite: the network was given numbers that are too "
                "large, or its weights are not finite"
            )


def ended_episodes(batch):
    """Returns the episodes that ended in a batch [T + 1, B, ...], as Run.update() takes
    them."""
    end = batch["episode_end"][1:]  # Step 0 was counted with the rollout before.
    training_end = (batch["terminated"] | batch["truncated"])[1:]
    return {
        "episode_return": batch["episode_return"][1:][end].tolist(),
        "episode_step": batch["episode_step"][1:][end].tolist(),
        "training_episode_return": batch["training_episode_return"][1:][
            training_end
        ].tolist(),
    }
