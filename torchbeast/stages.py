"""Where a run's time went, by the stages that a step goes through."""

from torchbeast.machine import num_cores

STAGES = {
    "streams": ("environment_wait", "inference_queue", "inference", "rollout_queue"),
    "learner": ("learner_wait", "vote", "update", "reduction"),
}
REMEDIES = {
    "environment_wait": "environments: more of them together (--envs_per_server), more "
    "servers (--num_servers), or other machines' (--server_addresses)",
    "inference_queue": "inference: --num_inference_threads",
    "inference": "inference: a GPU (--actor_device cuda), or a smaller network",
    "rollout_queue": "learning: a GPU (--learner_device cuda), or a smaller network",
    "cores": "the cores of this machine: --server_addresses moves the environments to "
    "other machines, --learner_device and --actor_device the network to a GPU",
}


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


def report(run):
    """Yields lines: where the time of a run with streams went, and what to do about the
    longest stage. To be called after the servers have ended."""
    result = shares(run.stage_seconds())
    if "update" not in result or "inference" not in result:
        return  # Nothing was learned, or there are no streams.
    for who, names in STAGES.items():
        times = [f"{x} {100 * result[x]:.0f} %" for x in names if x in result]
        yield f"where the time of {who} went: {', '.join(times)}"
    # Learning is not what streams wait for if the learner waits for them.
    names = [
        x for x in STAGES["streams"] if x != "rollout_queue" or result["update"] > 0.6
    ]
    slowest = max(names, key=lambda name: result[name])
    busy, cores = run.busy_cores(), num_cores()
    if busy > 0.8 * cores:
        slowest = "cores"
    yield f"{busy:.1f} of {cores} cores were busy; bottleneck: {REMEDIES[slowest]}"
