"""What is known of the machine and of this process. No torch is needed."""

import datetime
import importlib.metadata
import json
import os
import platform
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
    for line in open("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()  # Not x86.


_num_cores = None


def num_cores() -> int:
    """The number of cores that this process may use, which may be fewer than the
    machine has."""
    return _num_cores or len(os.sched_getaffinity(0))


def use_cores(n):
    """Has num_cores() return n: other learners share the cores with this process."""
    global _num_cores
    _num_cores = n


def processor_seconds() -> float:
    """The processor time of this process and of its children that have ended."""
    times = os.times()
    return sum(times[:4])


def memory_bytes() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def rss_mb() -> float:
    """The resident memory of this process, MiB."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * resource.getpagesize() / 2**20
