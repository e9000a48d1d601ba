"""Where PolyBeast's streams come from: its flags, the addresses in them, and how much
memory and how many files streams may take.
"""

import argparse
import os

from torchbeast import devices, machine, ranks, rollouts
from torchbeast.flags import is_given, number, synchronous, text_or_path
from torchbeast.messages import BadInput, log
from torchbeast.nests import leaves
from torchbeast.process import allow_open_files
from torchbeast.remote import (
    MAX_BESIDE_STEP_BYTES,
    MAX_ENVS,
    MAX_MESSAGE_BYTES,
    MAX_STEP_BYTES,
    tls,
)
from torchbeast.remote.addresses import count_up, of_flag, why_not_free

FILES_PER_STREAM = 8
MIN_SHARE_BYTES = 2**22  # Each stream's, however little memory there is.


def load_core():
    """Returns the module libtorchbeast. Raises BadInput if it was not built."""
    # gRPC would log each attempt to connect; torchbeast/remote/streams.py logs what
    # matters. gRPC reads the variable when the import below loads it.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        import libtorchbeast
    except ImportError as e:
        raise BadInput(str(e)) from e
    return libtorchbeast


def server_parser() -> argparse.ArgumentParser:
    """PolyBeast's flags of servers and inference, for argparse's parents=."""
    p = argparse.ArgumentParser(add_help=False)
    # fmt: off
    g = p.add_argument_group("environment servers")
    g.add_argument("--server_addresses", metavar="HOST:PORT,...", type=text_or_path,
                   help="running servers (python -m polybeast_env), or unix:PATH; one "
                   "stream each; @FILE: one a line, read again when it changes "
                   "(default: starts servers of its own)")
    g.add_argument("--listen", metavar="HOST:PORT",
                   help="lets hosts dial in (python -m polybeast_env --learner); the "
                   "second learner of a host takes the next port, and so on")
    g.add_argument("--max_streams", type=number(int, 1, 100_000), default=1024,
                   metavar="N", help="streams of hosts that dial in, at most "
                   "(default: %(default)s)")
    g.add_argument("--num_servers", type=number(int, 1), metavar="N",
                   help="servers of its own, without --server_addresses (default: one "
                   "per core)")
    g.add_argument("--envs_per_server", type=number(int, 1, MAX_ENVS), metavar="E",
                   help="environments of each (default: those of 32 agents in all; "
                   "if a GPU learns, of eight batches', and of IMPALA's images 256)")
    g.add_argument("--connect_timeout_seconds", type=number(float, above=0),
                   default=60, metavar="S",
                   help="time until a first server, after which the run ends; with "
                   "--listen there is none (default: %(default)s)")

    g = p.add_argument_group("inference")
    g.add_argument("--actor_device", metavar="DEVICE",
                   help="device that evaluates the network for actors "
                   "(default: the learner's)")
    # fmt: on
    return p


def set_defaults(flags, num_agents=1, observation_space=None):
    """Fills in PolyBeast's flags whose defaults depend on the machine, on the number of
    an environment's agents, and on what they see."""
    if flags.server_addresses is not None and is_given(flags, "num_servers"):
        raise BadInput(
            "--num_servers is of servers of this program's own: expected it without "
            "--server_addresses"
        )
    if flags.num_servers is None and flags.listen is not None:
        flags.num_servers = 0
    devices.set_defaults(flags)
    if flags.actor_device is None:
        flags.actor_device = flags.learner_device
    flags.num_servers, flags.envs_per_server = rollouts.spread(
        flags, flags.num_servers, flags.envs_per_server, num_agents, observation_space
    )


def check_sizes(flags, step, specs, num_agents, num_streams):
    """Returns what of this machine's memory streams may take, as arguments of an
    ActorPool: max_message_bytes and max_envs. Whoever has a host's certificate can make
    --max_streams of them. Raises BadInput if servers of its own make steps that are too
    large for a message, if a host's cannot but do that, or if rollouts need more memory
    than there is.

    step: arrays [E, ...]; specs: of one rollout, see rollouts.specs(); num_agents: of
    one environment; num_streams: that the learner opens.
    """
    num_rows, own_bytes = 0, 0  # Those of servers of its own.
    row_bytes = sum(x.nbytes // len(x) for _, x in leaves(step))
    if flags.server_addresses is None and flags.num_servers > 0:
        num_rows = flags.envs_per_server * num_agents
        if num_rows > MAX_ENVS:
            raise BadInput(
                f"--envs_per_server {flags.envs_per_server}: a stream has at most "
                f"{MAX_ENVS:,} agents, these environments have {num_agents:,} each"
            )
        own_bytes = row_bytes * num_rows
        if own_bytes > MAX_STEP_BYTES:
            raise BadInput(
                f"a step of {flags.envs_per_server} environments has {own_bytes:,} "
                f"bytes, expected at most {MAX_STEP_BYTES:,}: use a smaller "
                "--envs_per_server"
            )
        num_rows *= flags.num_servers
    # Those that are filled, those in the queue, and those that are learned from.
    batch_size = ranks.current.share(flags.batch_size)
    rollouts.check_memory(specs, max(1, num_rows) + 3 * batch_size)

    # A message is there twice for a moment, as it came and parsed: half of the memory;
    # and a quarter for rollouts.
    quarter = machine.available_memory_bytes() // ranks.current.num_here // 4
    guests = 0 if flags.listen is None else flags.max_streams
    share = max(MIN_SHARE_BYTES, quarter // max(1, num_streams + guests))
    room = min(share, MAX_MESSAGE_BYTES) - MAX_BESIDE_STEP_BYTES
    if row_bytes * num_agents > room:
        own = flags.server_addresses is None
        dialed = "a smaller --num_servers" if own else "fewer --server_addresses"
        remedies = ["a smaller --max_streams"] * (guests > 0)
        remedies += [dialed] * (num_streams > 0)
        raise BadInput(
            f"a step of one environment has {row_bytes * num_agents:,} bytes, this "
            f"machine's memory is for {room:,} of each of {num_streams + guests:,} "
            f"streams: use {', or '.join(remedies)}"
        )
    step_bytes = max(own_bytes, min(room, row_bytes * MAX_ENVS))
    rollout_bytes = sum(x.nbytes for _, x in leaves(specs))
    return {
        "max_message_bytes": step_bytes + MAX_BESIDE_STEP_BYTES,
        "max_envs": max(batch_size * num_agents, quarter // rollout_bytes),
    }


def addresses(flags):
    """Returns the addresses of --server_addresses, or None without the flag. Raises
    BadInput if there are none, or if one may not be connected to."""
    text = flags.server_addresses
    if text is None:
        return None
    return of_flag("--server_addresses", text, lambda found: usable(found, flags))


def usable(found, flags):
    """Returns those of the addresses that are this rank's. Raises BadInput if one may
    not be connected to, or if there are too few or too many."""
    tls.check(flags, found)
    rank, num = ranks.current.rank, ranks.current.num
    if len(found) < num:
        raise BadInput(f"{len(found)} addresses for {num} learners")
    found = found[rank::num]
    allow_open_files(FILES_PER_STREAM * len(found))
    return found


def listen_address(flags):
    """Returns where hosts may dial in, "" without --listen. Raises BadInput if it is
    not free, or not an address, or may not be listened at."""
    if flags.listen is None:
        return ""
    if "," in flags.listen:
        raise BadInput(f"--listen {flags.listen}: expected one HOST:PORT")
    here = ranks.current.local_rank
    address = count_up(flags.listen, here + 1, "--listen")[here]
    tls.check(flags, [address])
    if why := why_not_free(address):
        raise BadInput(f"--listen {address}: {why}")
    return address


class Sources:
    """Where streams come from: servers at addresses, hosts that dial in, or servers of
    this program's own. Raises BadInput if the flags do not allow that.

    options: the arguments of ActorPool that follow from the flags.
    """

    def __init__(self, flags):
        self._flags = flags
        self._addresses = addresses(flags)  # None: servers of its own.
        listen = listen_address(flags)
        dials = self._addresses is not None or not listen
        pem = tls.load(flags, *["client"] * dials, *["server"] * bool(listen))
        own = self._addresses is None
        self._num_streams = flags.num_servers if own else len(self._addresses)
        files, remedy = FILES_PER_STREAM * self._num_streams, ""
        if listen:  # As many connections as csrc/listener.h lets in.
            files += 2 * flags.max_streams + 64
            remedy = ", or use a smaller --max_streams"
        allow_open_files(files, remedy)
        batch_size = ranks.current.share(flags.batch_size)
        self.options = dict(
            connect_timeout_s=flags.connect_timeout_seconds,
            listen=listen,
            max_streams=flags.max_streams,
            welcome_timeout_s=flags.env_timeout_seconds,
            allowed_rollouts=batch_size if synchronous(flags) else None,
            **pem,
        )

    def __str__(self):
        text = f"{self._num_streams} stream{'s' * (self._num_streams != 1)}"
        listen = self.options["listen"]
        return f"{text}, hosts may dial {listen}" if listen else text

    def check_sizes(self, step, specs, num_agents):
        """See check_sizes() of this module, and rollouts.check_share()."""
        num_streams = self._num_streams
        if self._addresses is None and num_streams > 0:
            rollouts.check_share(self._flags, "envs_per_server", num_agents)
        limits = check_sizes(self._flags, step, specs, num_agents, num_streams)
        self.options.update(limits)

    def start(self, servers):
        """Returns the addresses that the learner dials. Starts the program's own
        servers, if it has any."""
        if self._flags.insecure:
            log.warning(tls.INSECURE)
        if self._addresses is None:
            return servers.start_here(self._flags)
        return self._addresses
