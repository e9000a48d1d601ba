"""What several learners cost: a vote, and a sum of gradients, in milliseconds.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.ranks
        [--parameters 678478] [--rounds 500]

Nothing else is done between them, so a vote is the time of its messages. Prints a line
of JSON. By default, as many parameters as the shallow network has on Pong.
"""

import argparse
import json
import statistics
import time

import torch

from torchbeast import ranks, torchrun
from torchbeast.process import Signals


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--parameters", type=int, default=678_478)
    p.add_argument("--rounds", type=int, default=500)
    options = p.parse_args()
    torch.set_num_threads(1)
    torchrun.join(argparse.Namespace(batch_size=8 * 3 * 5 * 7, seed=None, xpid="x"))
    group = ranks.current
    x = torch.ones(options.parameters)
    seconds = {"vote": [], "sum": []}
    with Signals() as signals, group.voting(signals):
        for _ in range(options.rounds):
            group.wait(lambda: False, None)  # So that all begin at the same time.
            start = time.perf_counter()
            group.wait(lambda: False, None)
            with group.update():
                voted = time.perf_counter()
                group.sum(x.fill_(1))
            seconds["vote"].append(voted - start)
            seconds["sum"].append(time.perf_counter() - voted)
        group.finish()
    if group.rank == 0:
        result = {"ranks": group.num, "parameters": options.parameters}
        for name, s in seconds.items():
            s = sorted(1000 * x for x in s[options.rounds // 10 :])
            result[f"{name}_ms"] = round(statistics.median(s), 3)
            result[f"{name}_ms_95"] = round(s[int(0.95 * len(s))], 3)
        print(json.dumps(result), flush=True)
    group.close(0)


if __name__ == "__main__":
    main()
