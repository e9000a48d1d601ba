"""A program for tests of torchbeast.launch and torchbeast.tune: starts at once, and
does what --do says."""

import argparse
import os
import pathlib
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
    if flags.do in ("learn", "lag"):  # To a return of 10 * rate; or of -1, for ever.
        path = pathlib.Path(flags.savedir, flags.xpid, "logs.csv")
        with open(path, "a", buffering=1) as f:
            print("step,episodes,episode_return", file=f)
            lags = flags.do == "lag" and flags.xpid.endswith("=6")
            for i in range(1, 11 if lags else 21):
                x = -1 if lags else 10 * flags.rate - (20 - i)
                print(i * flags.total_steps // 20, 1, x, sep=",", file=f)
        flags.do = "wait" if lags else "end"
    if flags.do in ("wait", "ignore"):
        for s in SIGNALS:
            signal.signal(s, end)
        print("waits", flush=True)
        while True:
            time.sleep(300)
