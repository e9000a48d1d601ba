"""Calls of environments, which other people wrote: they hang, exit and raise.

No torch in here: environment servers import this file.
"""

import contextlib
import signal
import threading
import time
from collections import Counter

from torchbeast.messages import BadInput, first_line, log
from torchbeast.process import end_group

SLOW_S = 5  # After which it is said what is waited for.

_calls = {}  # {thread: its calls that have not returned, the innermost last}.
_steps = Counter()  # {thread: steps that its environments have made}.


class _Entered:
    """A call, from one change of it to the next."""

    def __init__(self, what):
        self.what = what


class EnvironmentRaised(RuntimeError):
    """Takes the place of what is no Exception: sys.exit() in an environment."""

    of_environment = True


def _is_ctrl_c(error):
    """Tells whether an exception may be Ctrl-C. Where this process handles SIGINT in
    its own way, it is the environment's."""
    handler = signal.getsignal(signal.SIGINT)
    is_default = handler == signal.default_int_handler
    return isinstance(error, KeyboardInterrupt) and is_default


class Call:
    """A context for calls of an environment, which watch() watches. Whatever is raised
    in it gets a note that names the call, which is the last line of its traceback, and
    of_environment = True, which tells it from a mistake of ours or of the agent's.

    what: such as "reset() of CartPole-v1".
    """

    def __init__(self, what):
        self.what = what

    def __enter__(self):
        _calls.setdefault(threading.get_ident(), []).append(_Entered(self.what))

    def __exit__(self, kind, error, _):
        calls = _calls[threading.get_ident()]
        calls.pop()
        if calls:
            calls[-1] = _Entered(
                calls[-1].what
            )  # The call around this one has come further.
        if error is None or isinstance(error, BadInput) or _is_ctrl_c(error):
            return
        with contextlib.suppress(AttributeError):  # Of exceptions with slots.
            error.of_environment = True
        note = f"{self.what} raised {first_line(error)}"
        if not isinstance(error, Exception):
            raise EnvironmentRaised(note) from error
        if not calls and hasattr(error, "add_note"):  # From Python 3.11 on.
            error.add_note(note)


def watch(name: str, timeout_s: float, tell):
    """Ends this process when a call of an environment has not returned for timeout_s,
    because nothing can end the call alone, and all that it started. Calls tell(one
    line) first. Only for a process that has called lead_group().

    A call that holds the GIL all the time is not noticed. The thread that watches ends
    with the process.
    """

    def check():
        seen = {}  # {call: how often}: time in which the process was stopped is none.
        while max(seen.values(), default=0) <= 10:
            time.sleep(timeout_s / 10)
            innermost = [call for calls in list(_calls.values()) for call in calls[-1:]]
            seen = {call: seen.get(call, 0) + 1 for call in innermost}
        tell(f"{name} did not answer for {timeout_s:g} s (--env_timeout_seconds)")
        end_group()

    threading.Thread(target=check, daemon=True, name="watch").start()


def count_steps(n):
    """To be called by environments: n more steps were made."""
    _steps[threading.get_ident()] += n


def tell_slow(num_steps, who="") -> threading.Event:
    """Logs, after SLOW_S and then ever more rarely, which call of an environment this
    thread waits for, or how many steps there are: until there are num_steps, or until
    the event that it returns is set."""
    own, began_at, ended = threading.get_ident(), time.monotonic(), threading.Event()
    before, wait_s = _steps[own], SLOW_S

    def tell():
        nonlocal wait_s
        while not ended.wait(wait_s) and (n := _steps[own] - before) < num_steps:
            seconds = round(time.monotonic() - began_at)
            if n > 0:
                log.info("%s%d steps in the first %d s", who, n, seconds)
            elif calls := list(_calls.get(own, ())):
                what = calls[-1].what
                log.info("%swaits for %s (%d s since the start)", who, what, seconds)
            wait_s = time.monotonic() - began_at  # Twice as late each time.

    threading.Thread(target=tell, daemon=True, name="tell-slow").start()
    return ended


def create(create_env, flags, num_envs, render_mode=None, seed=None):
    """Calls create_env(). Raises BadInput if it makes another number of
    environments."""
    with Call(f"create_env() of --env {flags.env}"):
        env = create_env(flags, num_envs, render_mode, seed)
    if env.num_envs != num_envs * env.num_agents:
        raise BadInput(
            f"create_env() made {env.num_envs} environments, expected num_envs = "
            f"{num_envs}"
        )
    return env
