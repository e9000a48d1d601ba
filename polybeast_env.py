"""The environments of all programs, and the command that serves them to PolyBeast.

    python -m polybeast_env --env PongNoFrameskip-v4 --address 127.0.0.1:50051
    python -m polybeast_env --env PongNoFrameskip-v4 --learner 127.0.0.1:50050

Each server is a process, at an address of its own (ports, or names of Unix sockets, are
counted up from the first), and makes new environments for each learner that connects.
With --learner, each process instead dials a learner (polybeast --listen), and dials
again whenever a connection ends. Hosts of environments need neither torch nor a
compiler, so this file imports no torch (unless --env is WarpBeast's).
"""

import argparse
import random
import time
from itertools import cycle, islice

import atari_wrappers
from torchbeast import environment, images, seats
from torchbeast.flags import Parser, number, run_command, text_or_path
from torchbeast.machine import num_cores
from torchbeast.messages import BadInput, log
from torchbeast.process import Signals, allow_open_files, leave
from torchbeast.remote import MAX_ENVS, tls


def environment_parser() -> argparse.ArgumentParser:
    """Returns the flags of environments, most of which create_env() reads, for
    argparse's parents=. Learners and servers have them. Flags of your own environments
    go here."""
    p = argparse.ArgumentParser(add_help=False)
    # fmt: off
    g = p.add_argument_group("environment")
    g.add_argument("--env", metavar="ID", default="PongNoFrameskip-v4",
                   help="environment, by Gymnasium's name; MODULE:ID imports MODULE "
                   "first; MODULE:NAME calls the function NAME of MODULE, which "
                   "returns a PettingZoo environment (default: %(default)s)")
    g.add_argument("--env_args", nargs="*", type=environment.argument, default=[],
                   metavar="NAME=VALUE", help="arguments of the environment's "
                   "constructor: Python's values, such as 3, True or [1, 2], or else "
                   "strings; \"n='3'\" is the string 3 (default: none)")
    g.add_argument("--sticky_actions", type=number(float, 0, 1), metavar="P",
                   help="Atari: probability that the last action is repeated "
                   "(default: as the environment is registered)")
    g.add_argument("--full_action_space", action="store_true",
                   help="Atari: all 18 actions in every game")
    g.add_argument("--terminal_on_life_loss", default=True,
                   action=argparse.BooleanOptionalAction,
                   help="Atari: a lost life ends a training episode (default: yes)")
    images.add_flags(g)
    seats.add_flags(g)
    g.add_argument("--env_timeout_seconds", type=number(float, above=0), default=300,
                   metavar="S", help="time after which the actor or server of an "
                   "environment that does not answer is restarted "
                   "(default: %(default)s)")
    # fmt: on
    return p


def create_env(flags, num_envs, render_mode=None, seed=None):
    """Makes num_envs environments that step together: a list of them, or one VectorEnv.
    To use another environment, edit this function.

    render_mode: "rgb_array" for videos, "human" for the screen, None in training.
    seed: the seed of these environments. reset() gets it later; EnvPool's need it when
        they are made.
    """
    if is_warp(flags.env):
        if render_mode == "human":
            raise BadInput(
                f"environment {flags.env} is not shown on a screen: use --mode test "
                "--video FILE.mp4"
            )
        from torchbeast.warp.host import HostEnvironment  # Imports torch.

        return HostEnvironment(create_warp_env(flags), num_envs)
    if atari_wrappers.is_atari(flags.env):
        env = atari_wrappers.make(flags, num_envs, render_mode)
    else:
        args = dict(flags.env_args)
        env = environment.make(flags.env, num_envs, render_mode, seed, **args)
    return environment.Environment(
        env, flags.resize, flags.observation_layout, flags.policies, flags.opponents
    )


def is_warp(env_id):
    """Tells whether an ID, such as warp/Tag or my_module:warp/MyEnv, names an
    environment on the device."""
    return env_id.rpartition(":")[2].startswith("warp/")


def create_warp_env(flags):
    """Makes the environment on the device that --env names. To use another
    environment, edit this function."""
    if not is_warp(flags.env):
        raise BadInput(
            f"--env {flags.env}: expected an environment on the device, such as "
            "warp/CartPole"
        )
    if flags.resize is not None or flags.observation_layout is not None:
        raise BadInput(
            "--resize, --observation_layout: environments on the device return "
            "observations as networks are to see them"
        )
    seats.refuse(flags.policies, flags.opponents, flags.env)
    from torchbeast.warp import autoreset  # Imports torch.

    return autoreset.make(flags.env, **dict(flags.env_args))


# The command.


def parser():
    p = Parser(
        prog="polybeast_env",
        description="Environment servers for PolyBeast.",
        parents=[environment_parser(), tls.parser()],
    )
    # fmt: off
    g = p.add_argument_group("servers")
    g.add_argument("--address", metavar="HOST:PORT",
                   help="address of the first server; the others count up; or "
                   "unix:PATH, of several servers PATH.0, PATH.1, ... (default: "
                   "127.0.0.1:50051)")
    g.add_argument("--learner", metavar="HOST:PORT,...", type=text_or_path,
                   help="learners that each process dials, one after the other "
                   "(polybeast --listen); @FILE is read before each attempt")
    g.add_argument("--num_servers", type=number(int, 1), metavar="N",
                   help="processes (default: one per core)")
    g.add_argument("--envs_per_server", type=number(int, 1, MAX_ENVS), default=8,
                   metavar="E",
                   help="environments of each stream (default: %(default)s)")
    g.add_argument("--seed", type=number(int, 0, 2**31 - 1), metavar="N",
                   help="number to mix into the seeds that environments get from the "
                   "learner (default: none)")
    # fmt: on
    return p


def serve(flags):
    """Serves until a signal. Returns the exit code."""
    # Not at the top: making environments needs no gRPC.
    from torchbeast.remote import addresses, server, servers

    if flags.num_servers is None:
        flags.num_servers = num_cores()
    if flags.learner is None:
        module, address = "server", flags.address or "127.0.0.1:50051"
        where = addresses.count_up(address, flags.num_servers)
    else:
        if flags.address is not None:
            raise BadInput("expected --address or --learner, not both")
        module = "dialer"
        found = addresses.of_flag("--learner", flags.learner, list)
        first = random.randrange(len(found))  # No learner always gets fewest processes.
        where = list(islice(cycle(found), first, first + flags.num_servers))
    tls.check(flags, where)
    tls.load(flags, {"server": "server", "dialer": "client"}[module])
    allow_open_files(max(4 * flags.num_servers, server.MAX_CONNECTIONS))
    # A bad --env is to raise BadInput here, not in a server process.
    environment.probe(create_env, flags, min(2, flags.envs_per_server))
    if flags.insecure:
        log.warning(tls.INSECURE)
    with Signals() as signals, servers.Servers(create_env, module) as running:
        signals.on_second = running.kill
        running.start(flags, where)
        what = {"server": "at", "dialer": "for the learners"}[module]
        if not signals.received:  # Else some may not have started.
            log.info(
                f"{flags.env}: {flags.envs_per_server} environments for each stream "
                f"{what} {', '.join(where)}"
            )
        while not signals.received:
            time.sleep(0.2)
            running.restart_ended()
    log.info("stopped by %s", signals.received.name)
    return 128 + signals.received


def main(argv=None):
    return run_command("polybeast_env", lambda: serve(parser().parse_args(argv)))


if __name__ == "__main__":
    # Not as __main__: server processes have to find create_env() by the module's name.
    from polybeast_env import main

    leave(main())
