"""Hosts of environments on a Ray cluster, which dial a learner outside of it.

    python examples/ray/fleet.py --hosts 20 --learner hostB:50050 --env CartPole-v1

Each host is an actor that runs polybeast_env, with all flags that are not listed here.
Ray starts it again, on another node if need be, when its process or its node dies. All
of them end with this program.
"""

import argparse
import logging
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

try:
    import ray
except ImportError:
    sys.stderr.write("fleet: error: missing ray, expected pip install 'ray[default]'\n")
    sys.exit(2)

ROOT = pathlib.Path(__file__).parents[2]
BAD_INPUT = 2  # polybeast_env's exit code.
RESTART_S = 5
RAN_S = 60


def parser():
    p = argparse.ArgumentParser(
        prog="fleet", description=__doc__.partition("\n")[0], allow_abbrev=False
    )
    # fmt: off
    p.add_argument("--hosts", type=int, required=True, metavar="N", help="how many")
    p.add_argument("--cpus", type=int, default=1, metavar="C",
                   help="CPUs of each, and servers unless --num_servers says otherwise "
                   "(default: %(default)s)")
    p.add_argument("--learner", required=True, metavar="HOST:PORT,...",
                   help="learners to dial (polybeast --listen)")
    # fmt: on
    return p


class Host:
    """One polybeast_env. name: for Ray's dashboard and logs."""

    def __init__(self, name, args):
        self.name = name
        self.args = args

    def run(self):
        """Runs it for as long as this process lives, unless its input is bad. Returns
        its exit code then."""
        threading.Thread(target=end_with, args=[os.getppid()], daemon=True).start()
        # It gets SIGTERM when this process is gone, however that ends.
        command = ["setpriv", "--pdeathsig", "TERM", sys.executable, "-m"]
        ran_s = 0
        while True:
            start = time.monotonic()
            code = subprocess.call([*command, "polybeast_env", *self.args])
            ran_s = max(ran_s, time.monotonic() - start)
            if code == BAD_INPUT and ran_s < RAN_S:  # Else it was good before.
                return code
            print(f"{self.name} ended (exit code {code}), starts again", flush=True)
            time.sleep(RESTART_S)

    def __repr__(self):
        return self.name


def end_with(raylet):
    """Ends this process when its parent, the node's raylet, is gone. (Ray itself was
    seen to leave an actor that is busy.)"""
    while os.getppid() == raylet:
        time.sleep(1)
    os._exit(1)


def main(argv=None):
    """Returns the exit code."""
    flags, others = parser().parse_known_args(argv)
    if flags.hosts < 1 or flags.cpus < 1:
        parser().error("expected --hosts and --cpus of at least 1")
    # Nodes get a copy of the repository, as they do from ray job submit.
    is_job = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
    runtime_env = {} if is_job else {"working_dir": str(ROOT)}
    ray.init(runtime_env=runtime_env, logging_level=logging.WARNING)
    print(
        f"{flags.hosts} hosts, {flags.hosts * flags.cpus} CPUs; the cluster has "
        f"{ray.cluster_resources().get('CPU', 0):.0f} now",
        flush=True,
    )
    args = ["--learner", flags.learner, "--num_servers", str(flags.cpus), *others]
    actor = ray.remote(
        num_cpus=flags.cpus,
        scheduling_strategy="SPREAD",
        max_restarts=-1,
        max_task_retries=-1,
    )(Host)
    names = [f"host {i}" for i in range(flags.hosts)]
    hosts = [actor.options(name=name).remote(name, args) for name in names]
    [done], _ = ray.wait([host.run.remote() for host in hosts])
    return ray.get(done)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
