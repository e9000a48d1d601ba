"""Trains PolyBeast for a given time while things go wrong at random, and counts.

    python benchmarks/soak.py --minutes 20 --out soak.json

Two learners of one run have servers on two hosts, and a third host dials them.
Environments raise and hang (tests/faulty_envs.py: Flaky). Every few seconds one more of
FAULTS happens to the servers, to the network, to the learners or to all at once. At the
end every rollout must be accounted for, memory and open files must not have grown, and
nothing may be left behind. Exit code 1 if that is not so, or if training stops.
"""

import argparse
import collections
import json
import math
import os
import pathlib
import random
import re
import signal
import statistics
import sys
import tempfile
import time

import psutil

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.programs import Program, hosts, rollouts, step  # noqa: E402
from torchbeast import machine  # noqa: E402

ENV = "tests.faulty_envs:Flaky-v0"
T = 20
CHECKPOINT_S = 5
PORTS = 50051, 50053  # Each server host's first; it has two.
LEARNERS = 50060, 50061
DIALS = 2  # The last host.
RANKS = 2


class Soak:
    def __init__(self, directory, hosts, rng):
        self.directory = pathlib.Path(directory)
        self.hosts = hosts
        self.rng = rng
        self.addresses = self.directory / "servers.txt"
        self.servers = [None] * len(hosts)
        self.learner = None
        self.resumed_at = 0
        self.log_begin = 0  # Of rank 1's log: that of the session.
        self.sessions = []
        self.lost_steps = []  # By each learner that was killed.
        self.samples = []

    def start(self):
        for i in range(len(self.hosts)):
            self.start_servers(i)
        self.write(range(DIALS))
        self.start_learner()

    # The programs.

    def start_servers(self, i):
        here = self.hosts[i].our_ip
        where = ["--learner", ",".join(f"{here}:{port}" for port in LEARNERS)]
        if i != DIALS:
            where = ["--address", f"{self.hosts[i].ip}:{PORTS[i]}"]
        self.servers[i] = Program(
            "--env", ENV, *where, "--num_servers", 2, "--envs_per_server", 4,
            "--env_timeout_seconds", 5, "--insecure",
            module="polybeast_env", host=self.hosts[i],
        )  # fmt: skip
        self.servers[i].wait_for("environments for each stream")

    def end_servers(self, i):
        self.servers[i].signal(signal.SIGTERM)
        code = self.servers[i].end()  # Asserts that they leave nothing behind.
        if code != 128 + signal.SIGTERM:
            raise AssertionError(f"exit code {code}:\n{self.servers[i].output[-3000:]}")

    def write(self, some):
        lines = [f"{self.hosts[i].ip}:{PORTS[i] + k}\n" for i in some for k in range(2)]
        path = self.addresses.with_suffix(".new")
        path.write_text("".join(lines))
        path.rename(self.addresses)

    @property
    def rank_log(self):
        return self.directory / "x" / "out.rank1.log"

    def start_learner(self):
        if self.rank_log.exists():
            self.log_begin = self.rank_log.stat().st_size
        self.learner = Program(
            "--env", ENV, "--server_addresses", f"@{self.addresses}", "--insecure",
            "--savedir", self.directory, "--xpid", "x", "--unroll_length", T,
            "--log_interval_steps", 400, "--total_steps", 10**9,
            "--checkpoint_interval_seconds", CHECKPOINT_S,
            "--listen", f"0.0.0.0:{LEARNERS[0]}",
            module="polybeast", ranks=RANKS,
        )  # fmt: skip
        line = self.learner.wait_for("resuming" if self.sessions else "streams")
        self.resumed_at = int(m[1]) if (m := re.search(r"at step (\d+)", line)) else 0
        if self.lost_steps and self.lost_steps[-1] is None:
            self.lost_steps[-1] = self.killed_at - self.resumed_at

    def end_learner(self, why, accounts=True):
        """Waits for the end of the learners, who have got a signal or lost a rank.

        accounts: they can say what they did.
        """
        self.learner.end()  # Asserts that it leaves nothing behind.
        counts = collections.Counter()
        if accounts:
            log = self.rank_log.read_bytes()[self.log_begin :].decode()
            if why not in self.learner.output + log:
                raise AssertionError(f"not {why}:\n{self.learner.output[-3000:]}")
            for text in (self.learner.output, log):
                counts.update(rollouts(text))
        self.sessions.append({
            "ended by": why, "steps": self.step() - self.resumed_at, "rollouts": counts,
            "reconnects": self.learner.output.count(": connected (reconnects"),
        })  # fmt: skip

    def step(self):
        return step(self.directory)

    # What goes wrong.

    def server_is_killed(self):
        servers = self.rng.choice(self.servers)
        os.kill(self.rng.choice(servers.workers()), signal.SIGKILL)

    def server_stops_for_40_s(self):
        servers = self.rng.choice(self.servers)
        pid = self.rng.choice(servers.workers())
        os.kill(pid, signal.SIGSTOP)
        time.sleep(40)
        os.kill(pid, signal.SIGCONT)

    def host_fails_and_comes_back(self):
        i = self.rng.randrange(len(self.servers))
        self.servers[i].signal_all(signal.SIGKILL)
        self.servers[i].process.wait()
        time.sleep(self.rng.uniform(0, 10))
        self.start_servers(i)

    def servers_are_restarted_in_order(self):
        i = self.rng.randrange(len(self.servers))
        self.end_servers(i)
        self.start_servers(i)

    def network_is_cut(self):
        i = self.rng.randrange(len(self.servers))
        self.hosts[i].cut_off(self.servers[i])
        time.sleep(self.rng.uniform(5, 45))
        self.hosts[i].restore(self.servers[i])

    def host_leaves_and_joins(self):
        i = self.rng.randrange(DIALS)
        self.write({0, 1} - {i})
        time.sleep(self.rng.uniform(1, 10))
        self.write({0, 1})

    def learners_are_killed(self):
        self.killed_at = self.step()
        self.lost_steps.append(None)
        for pid in (self.learner.process.pid, *self.learner.ranks()):
            os.kill(pid, signal.SIGKILL)
        self.end_learner("SIGKILL", accounts=False)
        self.start_learner()

    def second_rank_is_killed(self):
        os.kill(self.learner.ranks()[1], signal.SIGKILL)
        self.end_learner("another rank is gone", accounts=False)
        self.start_learner()

    def learners_are_stopped_and_resumed(self):
        signum = self.rng.choice([signal.SIGTERM, signal.SIGINT])
        pids = self.learner.process.pid, *self.learner.ranks()
        os.kill(self.rng.choice(pids), signum)  # Torchrun, or one of them.
        self.end_learner(f"stopped by {signal.Signals(signum).name}")
        self.start_learner()

    def everything_is_suspended(self):
        for signum, seconds in ((signal.SIGSTOP, 30), (signal.SIGCONT, 0)):
            for program in self.servers:
                program.signal_all(signum)
            for pid in (self.learner.process.pid, *self.learner.ranks()):
                os.kill(pid, signum)
            time.sleep(seconds)

    FAULTS = (
        server_is_killed,
        server_stops_for_40_s,
        host_fails_and_comes_back,
        servers_are_restarted_in_order,
        network_is_cut,
        host_leaves_and_joins,
        learners_are_killed,
        second_rank_is_killed,
        learners_are_stopped_and_resumed,
        everything_is_suspended,
    )

    # What is measured.

    def sample(self, start):
        """Memory (MB, resident) and open files of every process."""
        pids = [("learner", pid) for pid in self.learner.ranks()]
        pids += [("server", pid) for s in self.servers for pid in s.workers()]
        for kind, pid in pids:
            try:
                process = psutil.Process(pid)
                rss = process.memory_info().rss / 2**20
                files = process.num_fds()
            except psutil.Error:
                continue
            self.samples.append((kind, pid, time.monotonic() - start, rss, files))

    def wait_for_progress(self, start, timeout_s=180):
        before = self.step()
        deadline = time.monotonic() + timeout_s
        while self.step() < before + 1000:
            if time.monotonic() > deadline or self.learner.process.poll() is not None:
                raise AssertionError(
                    f"no progress beyond step {before}:\n{self.learner.output[-3000:]}"
                )
            time.sleep(1)
        self.sample(start)

    def growth(self):
        """Of each process that lived for five minutes: how much more memory and how
        many more files it has at its end than after a minute."""
        result = []
        for pid in dict.fromkeys(pid for _, pid, *_ in self.samples):
            rows = [s for s in self.samples if s[1] == pid]
            rows = [s for s in rows if s[2] > rows[0][2] + 60]
            if len(rows) < 6 or rows[-1][2] - rows[0][2] < 240:
                continue
            n = len(rows) // 3
            (rss, files), (last_rss, last_files) = (
                [statistics.median(s[k] for s in part) for k in (3, 4)]
                for part in (rows[:n], rows[-n:])
            )
            result.append({
                "process": rows[0][0], "minutes": (rows[-1][2] - rows[0][2]) / 60,
                "MB": [round(rss), round(last_rss)], "files": [files, last_files],
            })  # fmt: skip
        return result

    def close(self):
        for program in (*self.servers, self.learner):
            if program is not None:
                program.__exit__()


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--minutes", type=float, default=20)
    p.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    p.add_argument("--out", type=pathlib.Path)
    options = p.parse_args()
    print(f"seed {options.seed}", flush=True)
    rng = random.Random(options.seed)
    counts = dict.fromkeys((f.__name__ for f in Soak.FAULTS), 0)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as directory, hosts(3) as three:
        soak = Soak(directory, three, rng)
        try:
            soak.start()
            soak.wait_for_progress(start)
            while time.monotonic() - start < 60 * options.minutes:
                time.sleep(rng.expovariate(1 / 5))
                fault = rng.choice(Soak.FAULTS)
                minutes = (time.monotonic() - start) / 60
                name = fault.__name__.replace("_", " ")
                print(f"{minutes:6.1f} min  step {soak.step():>9,}  {name}", flush=True)
                fault(soak)
                soak.wait_for_progress(start)
                counts[fault.__name__] += 1
            soak.learner.signal(signal.SIGTERM)
            soak.end_learner("stopped by SIGTERM")
            for i in range(len(three)):
                soak.end_servers(i)
        finally:
            soak.close()
    return report(soak, counts, options)


def report(soak, counts, options):
    totals = collections.Counter()
    wrong = []
    for session in soak.sessions:
        totals.update(session["rollouts"])
        if session["rollouts"].get("learned from", math.inf) * T < session["steps"]:
            wrong.append(f"more steps than were learned from: {session}")
    growth = soak.growth()
    for process in growth:
        (mb, last_mb), (files, last_files) = process["MB"], process["files"]
        # A host that dials has five more while it is connected.
        if last_mb > 1.1 * mb + 10 or last_files > files + 8:
            wrong.append(f"it grows: {process}")
    result = {
        "machine": machine.meta(options),
        "minutes": options.minutes,
        "steps": sum(s["steps"] for s in soak.sessions),
        "faults": counts,
        "sessions of the learner": len(soak.sessions),
        "killed": len(soak.lost_steps),
        "steps lost by each kill": soak.lost_steps,
        "rollouts of sessions that were not killed": totals,
        "streams that came back": sum(s["reconnects"] for s in soak.sessions),
        "growth": growth,
        "wrong": wrong,
    }
    text = json.dumps({k: v for k, v in result.items() if k != "machine"}, indent=1)
    print(text)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1, default=str) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
