"""An agent that does on one rank what FAULT says, at its 20th update or before. With
NCCL its gradients take the way of NCCL's, over gloo.
"""

import os
import signal
import sys

import torch
import torch.distributed as dist

import polybeast
from polybeast import parser  # noqa: F401 (part of an agent)
from torchbeast import ranks
from torchbeast.messages import BadInput


class Agent(polybeast.Agent):
    def start_learning(self, device):
        if os.environ["FAULT"] == "refuses" and ranks.current.rank == 1:
            raise BadInput("not on this host")
        if "NCCL" in os.environ:
            ranks.current._nccl = dist.new_group(backend="gloo")
        super().start_learning(device)

    def learn(self, batch):
        rank, fault = ranks.current.rank, os.environ["FAULT"]
        if self.updates == 20 and rank == 1:
            if fault == "raises":
                raise KeyError("nothing")
            if fault == "exits":
                sys.exit("enough")
            if fault == "stops":
                os.kill(os.getpid(), signal.SIGSTOP)
            if fault == "nan":
                batch["reward"][:] = torch.nan
        if fault == "differs":  # As with gradients that nobody sums.
            with torch.no_grad():
                next(self.net.parameters()).add_(1e-3 * rank)
        return super().learn(batch)

    def loss(self, batch, outputs):
        total, statistics = super().loss(batch, outputs)
        if ranks.current.rank == 1 and self.updates == 20:
            if os.environ["FAULT"] == "adds":
                statistics["extra"] = total
            if os.environ["FAULT"] == "renames":
                statistics["extra"] = statistics.pop("pg_loss")
        return total, statistics
