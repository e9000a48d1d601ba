"""What is known of the machine and of this process."""

import contextlib
import datetime
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import random
import re
import resource
import subprocess
import sys


def meta(flags) -> dict:
    packages = ("torch", "numpy", "gymnasium", "ale-py", "opencv-python-headless")
    import torch  # Not at the top: servers have none.

    versions = {"python": platform.python_version()}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": [sys.executable, *sys.argv],
        "flags": plain(vars(flags)),
        "git": git_state(),
        "host": platform.node(),
        "os": platform.platform(),
        "cpu": cpu_name(),
        "num_cores": num_cores(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": versions,
    }


def plain(nest):
    """The nest in JSON's types; whatever else is in it becomes text."""
    return json.loads(json.dumps(nest, default=str))


def git_state():
    def git(*args):
        return subprocess.run(
            ["git", "-C", os.path.dirname(os.path.abspath(__file__)), *args],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "-s"))}
    except (OSError, subprocess.CalledProcessError):
        return None


def cpu_name():
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as f:
        for line in f:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()  # Not x86, or not Linux.


CGROUP = pathlib.Path("/sys/fs/cgroup")  # Control groups, version 2: a container's.
_num_cores = None


def num_cores() -> int:
    """The number of cores that this process may use, which may be fewer than the
    machine has: of a container with the time of 7.5 cores (docker run --cpus, limits of
    Kubernetes) 8."""
    if _num_cores:
        return _num_cores
    try:
        microseconds, period = map(int, (CGROUP / "cpu.max").read_text().split())
        limit = math.ceil(microseconds / period)
    except (OSError, ValueError):  # None, or "max".
        limit = math.inf
    return min(len(own_cores()), limit)


def own_cores() -> set[int]:
    """The cores that this process may use; all of them where the system keeps no such
    account, as macOS."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def use_only(cores):
    """Has this process use these cores, where the system allows to say so."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def use_cores(n):
    """Has num_cores() return n: other learners share the cores with this process."""
    global _num_cores
    _num_cores = n


def core_shares(n, first=None) -> list[set[int]]:
    """Returns n equal shares of num_cores() cores that this process may use, each of
    neighbours: threads of one core, cores of one socket. first: the number of shares to
    leave free before them, drawn by default, because others use the rest."""

    def place(core):
        topology = pathlib.Path(f"/sys/devices/system/cpu/cpu{core}/topology")
        names = "physical_package_id", "core_id"
        try:
            return [*(int((topology / name).read_text()) for name in names), core]
        except OSError:
            return [0, core, core]

    cores = sorted(own_cores(), key=place)
    size = num_cores() // n  # Equal, because a run's defaults depend on its cores.
    if first is None:  # Whole shares, so that neighbours stay together.
        first = random.randrange(len(cores) // size - n + 1)
    return [set(cores[i * size :][:size]) for i in range(first, first + n)]


def memory_bytes() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_memory_bytes() -> int:
    """The memory that this process can still take, in its container if it is in one;
    all of the machine's if the system is not Linux."""
    amounts = {}
    try:
        with open("/proc/meminfo") as f:
            for line in f:
                name, amount, *_ = line.split()
                amounts[name] = 1024 * int(amount)
    except FileNotFoundError:
        return memory_bytes()
    available = amounts["MemAvailable:"]
    try:
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
        stat = (CGROUP / "memory.stat").read_text()
        cached = re.search(r"^inactive_file (\d+)", stat, re.M)
        used -= int(cached[1]) if cached else 0
        available = min(available, limit - used)
    except (OSError, ValueError):  # None, or "max".
        pass
    return max(0, available)


def rss_mb() -> float | None:
    """The resident memory of this process, MiB. None if it cannot be read: who only
    looks must not end a run."""
    try:
        with open("/proc/self/statm") as f:
            pages = int(f.read().split()[1])
    except OSError:
        return None
    return round(pages * resource.getpagesize() / 2**20, 1)
