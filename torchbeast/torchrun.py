"""Torchrun: how learners that it started find each other, and agree on a run."""

import datetime
import math
import os
import platform
import secrets
import socket
import time

import torch.distributed as dist

from torchbeast import machine, ranks, seeds
from torchbeast.flags import is_given
from torchbeast.messages import BadInput, Stop

JOIN_TIMEOUT_S = 600
OWN_FLAGS = {"command", "savedir", "tls_cert", "tls_key", "tls_ca"}  # May differ.


def join(flags):
    """Makes this process the rank that torchrun's variables say, if they are there.
    --seed and --xpid, if not given, become those of rank 0; others have to agree.

    Raises BadInput if only some of the variables are there, or if the ranks cannot
    learn together, and Stop if the others do not come."""
    names = "WORLD_SIZE", "RANK", "LOCAL_RANK"
    if os.environ.get("WORLD_SIZE", "1") == "1" or ranks.current.num > 1:
        return
    try:
        num, rank, local_rank = (int(os.environ[name]) for name in names)
    except (KeyError, ValueError) as e:
        raise BadInput(
            "WORLD_SIZE is set, as torchrun does it: expected numbers in WORLD_SIZE, "
            "RANK and LOCAL_RANK, or none of them"
        ) from e
    ranks.current = group = ranks.Ranks(rank, num, local_rank)
    name = "num_envs" if hasattr(flags, "num_envs") else "batch_size"
    size = getattr(flags, name)
    if not is_given(flags, name) and not getattr(flags, "preset", None):
        setattr(flags, name, math.ceil(size / num) * num)
    elif size % num:
        raise BadInput(
            f"--{name} {size} is of all ranks together: expected a multiple of {num}, "
            "their number"
        )
    if os.environ.get("LOCAL_WORLD_SIZE") == str(num):
        # All ranks are here: no other host is to reach them.
        names = [name for _, name in socket.if_nameindex()]
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if "lo" in names else "lo0")
    store, _, _ = next(dist.rendezvous("env://", rank, num))
    # Torchrun's store still has what ranks that were killed have left in it.
    group.connect(dist.PrefixStore(attempt(store, rank, num), store))
    given = {f"--{k}": x for k, x in vars(flags).items() if k not in OWN_FLAGS}
    if rank == 0:
        flags.seed = seeds.set_seed(flags.seed)
        flags.xpid = flags.xpid or new_xpid()
    group.agree(machine.plain(given))
    mine = platform.node(), list(machine.own_cores()), flags.seed, flags.xpid
    hosts, cores, all_seeds, xpids = zip(*group.all_gather(mine))
    flags.seed, flags.xpid = all_seeds[0], xpids[0]
    # A core is shared by the ranks that may use it.
    here = [c for h, c in zip(hosts, cores) if h == hosts[rank]]
    share = sum(1 / sum(core in c for c in here) for core in cores[rank])
    share *= machine.num_cores() / len(cores[rank])  # Of a container with less time.
    machine.use_cores(max(1, round(share)))
    group.hosts, group.num_here = list(hosts), len(here)


def attempt(store, rank, num):
    """Agrees with the other ranks on a text that no earlier ranks had. Raises Stop if
    they do not come."""
    keys = [f"hello/{r}" for r in range(num)]
    mine, seen = secrets.token_hex(8), "-"
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    while time.monotonic() < deadline:
        # Each says who it is and whom it sees. Ranks that are gone saw others.
        store.set(keys[rank], f"{mine} {seen}")
        if store.check(keys):
            hellos = [text.decode().split() for text in store.multi_get(keys)]
            there = ",".join(who for who, _ in hellos)
            if all(theirs == there for _, theirs in hellos):
                return hellos[0][0]
            seen = there
        time.sleep(0.05)
    raise Stop(f"ranks did not join within {JOIN_TIMEOUT_S} s")


def new_xpid():
    """Returns a name for a run: torchrun's, which is the same when torchrun starts the
    ranks again, or the time."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if run_id != "none":
        return f"torchbeast-{run_id}"
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        raise BadInput(
            "torchrun could not resume this run: expected --xpid, or torchrun's "
            "--rdzv-id or --standalone"
        )
    now = datetime.datetime.now()
    return f"torchbeast-{now:%Y%m%d-%H%M%S}-{os.getpid()}"
