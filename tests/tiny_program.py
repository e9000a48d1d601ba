"""A program for tests of torchbeast.launch: starts at once, and does what --do says."""

import argparse
import os
import signal
import subprocess
import sys
import time

from torchbeast.flags import run_parser
from torchbeast.process import SIGNALS

if __name__ == "__main__":
    p = argparse.ArgumentParser(parents=[run_parser()])
    p.add_argument("--do", default="end")
    p.add_argument("--rate", type=float)
    p.add_argument("--fast", action="store_true")
    p.add_argument("--clip", action=argparse.BooleanOptionalAction)
    flags = p.parse_args()
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    print(f"cores {cores} GPU {os.environ.get('CUDA_VISIBLE_DEVICES')}", flush=True)

    def end(signum, frame):
        print(f"got {signal.Signals(signum).name}", flush=True)
        if flags.do == "wait":
            sys.exit(128 + signum)

    if flags.do == "fail":
        sys.exit("it does not work")
    if flags.do == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if flags.do == "leave":
        subprocess.Popen(["sleep", "300"])
    if flags.do in ("wait", "ignore"):
        for s in SIGNALS:
            signal.signal(s, end)
        print("waits", flush=True)
        while True:
            time.sleep(300)
