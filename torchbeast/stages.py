"""Where a run's time went, by the stages that a step goes through."""

import time
from collections import Counter
from contextlib import contextmanager

from torch import nn

from torchbeast.encoders import large_images
from torchbeast.flags import synchronous
from torchbeast.images import RESIZED
from torchbeast.machine import num_cores

# Streams are PolyBeast's; the stages of MonoBeast's actors have the same names.
STAGES = {
    "streams": ("environment_wait", "inference_queue", "inference", "rollout_queue"),
    "learner": ("learner_wait", "vote", "update", "reduction"),
}
REMEDIES = {
    "polybeast": {
        "environment_wait": "environments: more of them together (--envs_per_server), "
        "more servers (--num_servers), or other machines' (--server_addresses)",
        "inference": "inference: a GPU (--actor_device cuda), or a smaller network",
        "learning": "learning: a GPU (--learner_device cuda), or a smaller network",
        "cores": "the cores of this machine: --server_addresses moves the environments "
        "to other machines, --learner_device and --actor_device the network to a GPU",
    },
    "monobeast": {
        "environment_wait": "environments: more actors (--num_actors), or other "
        "machines' (polybeast --server_addresses)",
        "inference": "inference: a GPU (polybeast --actor_device cuda), or a smaller "
        "network",
        "learning": "learning: a GPU (--learner_device cuda), or a smaller network",
        "cores": "the cores of this machine: polybeast --server_addresses has the "
        "environments on other machines, --learner_device cuda learns on a GPU",
    },
}
SMALL = 1_000_000  # Parameters of a network whose arithmetic is nothing.
TOGETHER = {"polybeast": "envs_per_server", "monobeast": "envs_per_actor"}


class Stopwatch:
    """Adds up the seconds that are spent in each stage."""

    def __init__(self):
        self.seconds = Counter()

    @contextmanager
    def __call__(self, stage):
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[stage] += time.monotonic() - start

    def take(self):
        """Returns the seconds {stage: s} since the last call."""
        seconds, self.seconds = self.seconds, Counter()
        return dict(seconds)


def shares(seconds, before=None):
    """Returns each stage's share of the time between two calls of
    Run.stage_seconds()."""
    result = {}
    for group in STAGES.values():
        spent = {
            name: seconds[name] - (before or {}).get(name, 0)
            for name in group
            if name in seconds
        }
        total = sum(spent.values())
        if total > 0:
            result.update({name: round(s / total, 3) for name, s in spent.items()})
    return result


def report(run, net):
    """Yields lines: where the time of a run with streams or actors went, and what to do
    about the longest stage. To be called after the servers, or actors, have ended."""
    seconds = run.stage_seconds()
    result = shares(seconds)
    if "update" not in result or "inference" not in result:
        return  # Nothing was learned, or nobody acts but the learner.
    program = "monobeast" if hasattr(run.flags, "num_actors") else "polybeast"
    for who, names in STAGES.items():
        times = [f"{x} {100 * result[x]:.0f} %" for x in names if x in result]
        who = "actors" if (who, program) == ("streams", "monobeast") else who
        yield f"where the time of {who} went: {', '.join(times)}"
    busy, cores = run.busy_cores(), num_cores()
    stage = "cores"
    if busy <= 0.8 * cores or getattr(run.flags, "num_actors", None) == 0:
        stage = slowest(run, seconds, result)
    text = remedy(stage, program, run.flags, net)
    devices = (getattr(run.flags, f"{x}_device", "cpu") for x in ("learner", "actor"))
    own = stage != "environment_wait" and "reduction" not in result
    if busy < 0.5 and own and {*devices} == {"cpu"}:
        text = "other programs have the cores"
    yield f"{busy:.1f} of {cores} cores were busy; bottleneck: {text}"


def slowest(run, seconds, result):
    """Returns the stage that takes longest, "learning" where that is the learner's."""
    if getattr(run.flags, "num_actors", None) == 0:  # All in one thread.
        result = seconds
        learning = seconds["update"]
    else:
        learning = result.get("rollout_queue", 0)
        if synchronous(run.flags):  # The slowest row is waited for there, too.
            learning = min(learning, result["update"])
        else:
            # It is not what streams wait for if the learner waits for them, and it is,
            # however long they take, if that never waits.
            learning *= result["update"] > 0.6
            learning = max(learning, result["update"] > 0.9)
    inference = result["inference"] + result.get("inference_queue", 0)
    times = {"inference": inference, "learning": learning}
    times["environment_wait"] = result.get("environment_wait", 0)
    return max(times, key=times.get)


def remedy(stage, program, flags, net):
    """Returns what makes a stage of a program faster."""
    text = REMEDIES[program][stage]
    what, _, others = text.partition(": ")
    large = large_images(net)
    if large:  # They also are in messages.
        name, height, width = large[0]
        return f"{what}: --resize {RESIZED}, as {name} is {height} x {width}; {others}"
    small = not any(isinstance(module, nn.Conv2d) for module in net.modules())
    small = small and sum(x.numel() for x in net.parameters()) < SMALL
    if stage == "learning" and hasattr(flags, "replay_ratio"):
        fewer = f"{what}: fewer gradient steps (--replay_ratio)"
        return fewer if small else f"{fewer}; {others}"
    if small and stage != "environment_wait":
        # Its arithmetic is nothing beside what each call of it costs. In PolyBeast
        # those for inference and those for learning wait for each other's GIL.
        if stage == "learning" and program == "monobeast":
            return f"{what}: the network is small: larger batches (--batch_size) help"
        flag = TOGETHER[program]
        return (
            f"{what}: the network is small: more environments together "
            f"(--{flag} {4 * getattr(flags, flag)}, {getattr(flags, flag)} now) cost "
            "little"
        )
    return text
