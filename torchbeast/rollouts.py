"""What rollouts hold, in every program.

A rollout has T + 1 steps of an environment, of which step 0 repeats the last step of
the rollout before it; what the agent's act() returned on steps 0 to T - 1; and
core_state, the recurrent state before step 0. A batch of B rollouts is

    {**step, **outputs, "core_state": ...}

with [T + 1, B, ...] for the fields of a step, [T, B, ...] for outputs and [., B, ...]
for core_state.

An agent with a `burn_in` of K gets rollouts of K + T + 1 steps, of which the first
K + 1 repeat the last ones of the rollout before: a recurrent state can be brought up to
date on them (R2D2).

Where agents act by turns, a row's steps are those at which its agent has its turn, or
ends, and its rollouts fill at their own pace.

With --one_episode_rollouts, rollouts end with their episodes, and mask [T + 1, B] tells
which steps are real. The others repeat the last one, with reward 0 and `done`, so that
no transition leads to them. The transition to the next episode is in no rollout.
"""

import math

import numpy as np
import torch

from torchbeast import devices, machine, ranks
from torchbeast.flags import choose, is_given, load_agent, synchronous
from torchbeast.messages import BadInput
from torchbeast.nests import leaves, map_structure

CPU = torch.device("cpu")
EPISODE_FIELDS = (
    "terminated",
    "truncated",
    "episode_end",
    "episode_step",
    "episode_return",
    "training_episode_return",
)


def spread(flags, num, num_envs, num_agents=1, observation_space=None):
    """Returns (the number of actors or servers, the environments of each), by default
    one for each core, and environments of 32 agents in all, of eight batches' if that
    is more and a GPU learns, or of what the agent's sizes() say, as of --batch_size.
    Where acting waits for updates, a batch has the same number of rollouts of each
    agent if that can be: a --batch_size that the command line does not have is rounded
    up to that."""
    sync, sizes, unit = synchronous(flags), {}, ranks.current.num
    if observation_space is not None and vars(flags).get("preset") is None:
        sizes = load_agent(flags.agent).Agent.sizes(flags, observation_space)
    if not is_given(flags, "batch_size"):
        size = sizes.get("batch_size", flags.batch_size)
        if sync and num_agents > 1:
            unit *= num_agents
            unit *= 4 if size >= 4 * unit else 1  # For several actors.
        size += -size % unit
        if size != flags.batch_size:
            choose(flags, {"batch_size": size})
    in_batch = ranks.current.share(flags.batch_size) // num_agents  # Environments.

    def divisor(n, most):
        return max(d for d in range(1, most + 1) if n % d == 0 or not sync)

    if num is None:
        num = divisor(in_batch, machine.num_cores())
    if num_envs is None:
        on_gpu = flags.learner_device != "cpu" and not sync
        in_batches = 8 * ranks.current.share(flags.batch_size) if on_gpu else 0
        together = max(sizes.get("num_envs", 32), in_batches)
        of_each = in_batch // math.gcd(in_batch, max(1, num))
        num_envs = divisor(of_each, max(1, together // num_agents // max(1, num)))
    return num, num_envs


def check_share(flags, name, num_agents):
    """Raises BadInput if actors or servers that begin so many rollouts together do not
    fill a batch that acting waits for. name: of the flag that says how many."""
    num_envs, batch_size = vars(flags)[name], ranks.current.share(flags.batch_size)
    if synchronous(flags) and batch_size % (num_envs * num_agents):
        agents = f" of {num_agents} agents" if num_agents > 1 else ""
        raise BadInput(
            f"--batch_size: {batch_size} rollouts are no multiple of those that "
            f"{num_envs} environments{agents} begin together (--{name}): give both "
            "flags, or --async"
        )


def specs(agent, step, flags):
    """Finds what one rollout holds by one call of act(): a nest of tensors without
    data. Their first dimension is time, except for core_state's.

    step: arrays [E, ...] of an environment. Raises BadInput if act() returns what no
    rollout can hold.
    """

    def spec(x, *shape):
        return torch.empty(shape, dtype=x.dtype, device="meta")

    step = map_structure(torch.as_tensor, step)
    if flags.one_episode_rollouts and agent.burn_in > 0:
        raise BadInput(
            "--one_episode_rollouts leaves no steps to burn in on: expected --burn_in 0"
        )
    if flags.one_episode_rollouts and synchronous(flags):
        raise BadInput(
            "--one_episode_rollouts: rollouts that are not full hold up a batch that "
            "acting waits for: use --async"
        )
    T, E = agent.burn_in + flags.unroll_length, len(step["reward"])
    initial = agent.initial_state(E)
    agent.net.eval()  # A BatchNorm is to count no batch that is not learned from.
    result = agent.act(map_structure(lambda x: x[None], step), initial)
    agent.net.train()
    outputs, core_state = checked(result, step, initial)
    return {
        **map_structure(lambda x: spec(x, T + 1, *x.shape[1:]), step),
        **map_structure(lambda x: spec(x, T, *x.shape[2:]), outputs),
        "core_state": map_structure(
            lambda x: spec(x, x.shape[0], *x.shape[2:]), core_state
        ),
        **({"mask": spec(step["done"], T + 1)} if flags.one_episode_rollouts else {}),
    }


def checked(result, step, initial):
    """Returns what act() returned, (outputs, core_state). Raises BadInput if no rollout
    can hold that.

    step: tensors [E, ...], on which it was called; initial: the state before that.
    """
    if not isinstance(result, tuple) or not isinstance(result[0], dict):
        what = type(result).__name__
        raise BadInput(f"act() returned {what}, expected (dict of outputs, core_state)")
    E = len(step["reward"])
    outputs, core_state = result
    for what, first, found in (
        ("act()", 1, leaves(outputs)),
        ("initial_state()", ".", leaves(initial, "core_state")),
        ("act()", ".", leaves(core_state, "core_state")),
    ):
        for path, x in found:
            of_rows = torch.is_tensor(x) and x.shape[1:2] == (E,)
            if not of_rows or x.requires_grad or (first == 1 and len(x) != 1):
                raise BadInput(
                    f"{what} returned {path} as {kind(x)}, expected a tensor "
                    f"[{first}, {E}, ...] without gradient (@torch.inference_mode())"
                )
    check_outputs(outputs)
    for name in outputs:
        if name in (*step, "core_state", "version", "mask"):
            raise BadInput(f"act() returned {name!r}, which a rollout has of its own")
    if "action" not in outputs:
        raise BadInput(f"act() returned {sorted(outputs)}, expected 'action' in it")
    last_action = map_structure(lambda x: x[None], step["last_action"])
    action, expected = describe(outputs["action"]), describe(last_action)
    if action != expected:
        raise BadInput(f"act() returned {action}, expected {expected}")
    before, after = (  # In whatever order.
        describe(dict(sorted(leaves(state, "core_state"))), "")
        for state in (initial, core_state)
    )
    if before != after:
        raise BadInput(f"act() returned {after}, expected {before or '()'}")
    return result


def describe(nest, name="action"):
    """Returns a text: the paths, dtypes and shapes of its tensors."""
    return ", ".join(
        f"{path} as {x.dtype} {list(x.shape)}" for path, x in leaves(nest, name)
    )


def kind(x):
    """Returns a text: the type of what may be a tensor, and of one what it is like."""
    if not torch.is_tensor(x):
        return type(x).__name__
    with_gradient = " with a gradient" if x.requires_grad else ""
    return f"{x.dtype} {list(x.shape)}{with_gradient}"


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
        if x.is_floating_point() and not math.isfinite(x.abs().max()):
            raise NotFinite(
                f"act()'s {path} is not finite: the network was given numbers that "
                "are too large, or its weights are not finite"
            )


def new(batch, burn_in=0):
    """Returns which of the steps 0 to K + T are in no other rollout, and neither
    padding nor of an agent that has left (torchbeast/warp/autoreset.py), [K + T + 1, B]
    bool.
    """
    if "mask" in batch:  # Step 0 begins an episode, or is the last one of a rollout.
        return torch.cat([batch["done"][:1], batch["mask"][1:]])
    # An agent that has left is `done` at the next step, too, so the last step, which is
    # the next rollout's step K, is taken in with that.
    steps, done = torch.zeros_like(batch["done"]), batch["done"][burn_in:]
    steps[burn_in:-1] = ~(done[:-1] & done[1:])
    return steps


def pad(buffers, index, t):
    """Ends a rollout with step t: repeats it to the rollout's end, and writes the mask.
    The rollout is that of this index in a nest of arrays [T + 1, num_buffers, ...],
    and in outputs [T, num_buffers, ...]."""
    length = len(buffers["mask"])
    for name, nest in buffers.items():
        for _, x in leaves(nest) if name != "core_state" else ():
            end = t + 1 - (length - len(x))
            x[end:, index] = x[end - 1, index]
    for name in ("reward", "terminated", "truncated", "episode_end", "mask"):
        buffers[name][t + 1 :, index] = 0
    buffers["done"][t + 1 :, index] = True
    buffers["mask"][: t + 1, index] = True


def ended_episodes(batch, unroll_length):
    """Returns what is logged of the episodes that ended in a batch [T + 1, B, ...]:
    {name: tensor [2], a sum over them and their number}."""

    def total(x, counted):
        return torch.stack([torch.where(counted, x, 0).sum(), counted.sum()])

    # The steps before these T were counted with the rollout before, but for the first
    # K of a row's first one.
    new = {name: batch[name][-unroll_length:] for name in EPISODE_FIELDS}
    end = new["episode_end"]
    training_end = new["terminated"] | new["truncated"]
    result = {
        "episode_return": total(new["episode_return"], end),
        "episode_step": total(new["episode_step"], end),
        "training_episode_return": total(new["training_episode_return"], training_end),
    }
    if "mask" in batch:  # The share of steps that are none.
        padding = (~batch["mask"][1:]).float()
        result["padding"] = total(padding, torch.ones_like(end))
    return result


def write(nest, buffers, t, indices):
    """Writes the nest's arrays, [E, ...], into buffers [T, num_buffers, ...] that have
    entries of the same names."""

    def write_array(x, buffer):
        buffer[t, indices] = x

    map_structure(write_array, nest, buffers)


def write_rows(nest, buffers, t, indices, rows):
    """Writes the rows of the nest's arrays, [E, ...], where rows [E] bool is true, each
    at its own t [E] and index [E]."""
    nest = map_structure(lambda x: x[rows], nest)
    write(nest, buffers, t[rows], indices[rows])


def act(function, step, core_state, device=CPU):
    """Calls an agent's act(), the function, for the rows that do not wait for their
    turns: those get outputs of zeros, and their core_state stands still. device: that
    computes, for which they are in page-locked memory if it is a GPU."""
    if "waits" not in step:
        return function(step, core_state)
    rows = (~step["waits"][0]).nonzero()[:, 0]
    if len(rows) == 0:  # No environment of ours makes such a step, a server might.
        return function(step, core_state)[0], core_state

    def put(x, nest):
        return map_structure(lambda x, y: x.index_copy(1, rows, y), x, nest)

    nests = step, core_state
    part = map_structure(lambda x: devices.select(x, rows, device), nests)
    outputs, after = function(*part)
    E = len(step["waits"][0])
    zeros = map_structure(lambda x: x.new_zeros(1, E, *x.shape[2:]), outputs)
    return put(zeros, outputs), put(core_state, after)


def are_apart(flags, step):
    """Tells whether each row begins and ends its rollouts alone."""
    return flags.one_episode_rollouts or "waits" in step


def of_rows(actor, buffers, begin):
    """Fills rollouts of rows apart, as monobeast.Actor.whole_rollouts() does those of
    all rows: each row is at a step t of its own rollout, or fills none. A row that
    waits for its turn stays at its step.

    begin(n, least=n) returns the indices of `least` to n free buffers. Where acting
    waits for updates, a row begins when there is one: what it does until then, while
    other rows fill theirs, is in no rollout.
    """
    E, K, T = actor.env.num_envs, actor.burn_in, actor.flags.unroll_length
    t, indices, num = np.full(E, -1), np.zeros(E, int), np.zeros(E, int)
    # Each row's before each of its last K + 1 steps, of which it has made num.
    states = map_structure(lambda x: np.stack((K + 1) * [x]), actor.core_states[-1])

    def repeat(x, buffer):
        buffer[: len(x), indices[again]] = x[:, ends_again]

    def keep(x, states):
        states[num[moves] % (K + 1), :, moves] = x.numpy()[:, moves].swapaxes(0, 1)

    def write_state(x, buffer):
        first = num[rows] - 1 + ends[rows]  # The oldest, or the newest.
        buffer[:, indices[rows]] = x[first % (K + 1), :, rows].swapaxes(0, 1)

    while True:
        step = actor.step
        moves = ~step["waits"] if "waits" in step else np.ones(E, bool)
        map_structure(keep, actor.core_states[-1], states)
        num += moves
        fills = moves & (t >= 0)
        t += fills
        # One that had left: its rollout begins anew, until it has an episode.
        anew = fills & step["done"] & actor.flags.one_episode_rollouts
        t[anew] = 0
        write_rows(step, buffers, t, indices, fills)
        last = step["terminated"] | step["truncated"]
        last &= actor.flags.one_episode_rollouts
        ends = fills & (last | (t == K + T))
        if ends.any():
            full = indices[ends]
            for e in np.flatnonzero(ends) if "mask" in buffers else ():
                pad(buffers, indices[e], t[e])
            # A copy: the buffers may soon be another actor's.
            overlap = map_structure(lambda x: x[T:, full], buffers)  # noqa: B023
            t[ends] = -1
            yield full.tolist()
        rows = np.flatnonzero(moves & (t < 0) & ~last)
        if len(rows) > 0:
            least = [int((t < 0).all())] if synchronous(actor.flags) else []
            given = begin(len(rows), *least)
            rows = rows[: len(given)]
            t[rows], indices[rows] = 0, given
            write_rows(step, buffers, t, indices, np.isin(np.arange(E), rows))
            if K > 0 and len(again := rows[ends[rows]]):
                ends_again = np.isin(np.flatnonzero(ends), again)
                map_structure(repeat, overlap, buffers)
                t[again] = K
        if len(rows := np.union1d(rows, np.flatnonzero(anew))) > 0:
            map_structure(write_state, states, buffers["core_state"])
        outputs = actor.act()
        write_rows(outputs, buffers, t, indices, moves & (t >= 0))
        with actor.stage("environment_wait"):
            actor.step = actor.env.step(outputs["action"])
