"""Calls of environments, which other people wrote: they hang, exit and raise.

No torch in here: environment servers import this file.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections import Counter

import numpy as np

from torchbeast.flags import synchronous
from torchbeast.messages import BadInput, first_line, log
from torchbeast.process import (
    Terminated,
    end_group,
    open_standard_files,
    signals_that_raise,
)

SLOW_S = 5  # After which it is said what is waited for.
RETURN_S = 5  # A call's time to return when nobody wants the environments any more.

_calls = {}  # {thread: its calls that have not returned, the innermost last}.
_steps = Counter()  # {thread: steps that its environments have made}.
_wanted = True


class _Entered:
    """A call, from one change of it to the next."""

    def __init__(self, what):
        self.what = what


class NotWanted(BaseException):
    """Takes the place of a call when nobody wants the environments any more."""


def end():
    """Has calls raise NotWanted from now on, but for those of close(): environments
    that have been made are closed, however many were still to be made."""
    global _wanted
    _wanted = False


class EnvironmentRaised(RuntimeError):
    """Takes the place of what is no Exception, such as sys.exit()'s, and of
    StopIteration."""

    of_environment = True


def _is_ctrl_c(error):
    """Tells whether an exception may be Ctrl-C. Where this process handles SIGINT in
    its own way, it is the environment's."""
    handler = signal.getsignal(signal.SIGINT)
    is_default = handler == signal.default_int_handler
    is_ours = isinstance(error, Terminated)
    return is_ours or isinstance(error, KeyboardInterrupt) and is_default


class Call:
    """A context for calls of an environment, which watch() watches. Whatever is raised
    in it gets a note that names the call, which is the last line of its traceback, and
    of_environment = True, which tells it from a mistake of ours or of the agent's.

    what: such as "reset() of CartPole-v1". closing: whether it is a call of close().
    """

    def __init__(self, what, closing=False):
        self.what = what
        self.closing = closing

    def __enter__(self):
        if not _wanted and not self.closing:
            raise NotWanted
        _calls.setdefault(threading.get_ident(), []).append(_Entered(self.what))

    def __exit__(self, kind, error, _):
        calls = _calls[threading.get_ident()]
        calls.pop()
        if calls:
            # The call around this one has come further.
            calls[-1] = _Entered(calls[-1].what)
        ours = (BadInput, NotWanted)
        if error is None or isinstance(error, ours) or _is_ctrl_c(error):
            return
        with contextlib.suppress(AttributeError):  # It may have slots, and no room.
            error.of_environment = True
        note = f"{self.what} raised {first_line(error)}"
        # A StopIteration would end whatever loop this call is made in, as if all were
        # well.
        if not isinstance(error, Exception) or isinstance(error, StopIteration):
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
            seen = {call: seen.get(call, 0) + 1 for call in _innermost()}
        what = max(seen, key=seen.get).what
        wait = f"did not answer for {timeout_s:g} s (--env_timeout_seconds)"
        tell(f"{name} {wait}: {what}")
        end_group()

    threading.Thread(target=check, daemon=True, name="watch").start()


def count_steps(n):
    """To be called by environments: n more steps were made."""
    _steps[threading.get_ident()] += n


def tell_slow(num_steps, need="", who="") -> threading.Event:
    """Logs, after SLOW_S and then ever more rarely, which call of an environment this
    thread waits for, or how many steps there are, and what they are needed for: until
    there are num_steps, or until the event that it returns is set."""
    own, began_at, ended = threading.get_ident(), time.monotonic(), threading.Event()
    before, wait_s = _steps[own], SLOW_S

    def tell():
        nonlocal wait_s
        while not ended.wait(wait_s) and (n := _steps[own] - before) < num_steps:
            seconds = round(time.monotonic() - began_at)
            if n > 0:
                log.info("%s%d steps in the first %d s%s", who, n, seconds, need)
            elif calls := list(_calls.get(own, ())):
                what = f"waits for {calls[-1].what} ({seconds} s since the start)"
                log.info("%s%s%s", who, what, need)
            wait_s = time.monotonic() - began_at  # Twice as late each time.

    threading.Thread(target=tell, daemon=True, name="tell-slow").start()
    return ended


def first_rollouts(flags, num_envs):
    """Returns the number of steps of environments that step together until the first
    rollouts are there, or their part of a batch where acting waits for updates, and a
    text that says so. Rollouts of one episode may be there after the first step."""
    if getattr(flags, "one_episode_rollouts", False):
        return 1, ""
    what, names = "the first rollouts need", ["envs_per_actor", "envs_per_server"]
    names = [f"--{name}" for name in names if hasattr(flags, name)]
    if synchronous(flags):
        what = "its part of the first batch needs"
        names = ["--batch_size", "--unroll_length"]
        num = getattr(flags, "num_actors", None) or getattr(flags, "num_servers", None)
        num_learners = int(os.environ.get("WORLD_SIZE", 1))
        num_envs = max(1, flags.batch_size // num_learners // (num or 1))
    num_steps = getattr(flags, "unroll_length", 20) * num_envs
    need = f"{num_steps} steps: with a smaller {' or '.join(names)} fewer"
    return num_steps, f"; {what} {need}"


def _innermost():
    return [call for calls in list(_calls.values()) for call in calls[-1:]]


def end_process(done=lambda: False):
    """Ends this process, which has called lead_group(), and all that it started: calls
    end(), and waits until done(), or until no call has begun or returned for RETURN_S.
    """
    end()
    seen = {}  # {call: since when}
    while not done():
        now = time.monotonic()
        seen = {call: seen.get(call, now) for call in _innermost() or [None]}
        if now - min(seen.values()) > RETURN_S:
            for call in _innermost():
                what = f"{call.what} did not return within {RETURN_S:g} s"
                log.warning("%s: its environment is not closed", what)
            break
        time.sleep(0.01)
    end_group()


@contextlib.contextmanager
def _signals_deferred():
    """A context in the first thread in which signals that raise do so at its end:
    nobody can close what is half made. If the end does not come within RETURN_S, or
    another signal comes a second or more later, they raise at once."""
    signals = signals_that_raise()
    if threading.current_thread() is not threading.main_thread() or not signals:
        yield
        return
    first = None  # (signal, when it came)
    left = threading.Event()

    def handler(signum, frame):
        nonlocal first
        if first is None:
            first = signal.Signals(signum), time.monotonic()
            end()
        elif time.monotonic() > first[1] + 1:
            raise Terminated(first[0])

    def insist():
        while not left.wait(0.1):
            if first is not None and time.monotonic() > first[1] + RETURN_S:
                signal.pthread_kill(threading.main_thread().ident, first[0])
                return

    before = {s: signal.signal(s, handler) for s in signals}
    thread = threading.Thread(target=insist, name="insist", daemon=True)
    thread.start()
    try:
        yield
    finally:
        left.set()
        thread.join()
        for s, old in before.items():
            signal.signal(s, old)
        if first is not None:
            global _wanted
            _wanted = True
            raise Terminated(first[0])


def _torch():
    """Returns torch in the first thread, if it is imported. In a server's others there
    are no networks, and it may be half imported."""
    if threading.get_ident() == threading.main_thread().ident:
        return sys.modules.get("torch")


_random = None  # The state of the random numbers that are environments'.
_is_random = False  # They are what torch draws.


@contextlib.contextmanager
def random_of_environments():
    """A context in which torch's random numbers are environments' own, whose seeds are
    not to be the agent's."""
    global _random, _is_random
    if (torch := _torch()) is None or _is_random:
        yield
        return
    generator = torch.default_generator
    agents = generator.get_state()
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    if _random is None:
        generator.manual_seed(generator.initial_seed() ^ 0x5EED)  # Others.
    else:
        generator.set_state(_random)
    _is_random = True
    try:
        yield
    finally:
        _is_random = False
        _random = generator.get_state()
        generator.set_state(agents)
        if on_gpus is not None:  # torch.manual_seed() sets those, too.
            torch.cuda.set_rng_state_all(on_gpus)


@contextlib.contextmanager
def _torch_kept():
    """A context after which torch's dtype, device and gradients by default are what
    they were: an environment may set them for itself, and networks are made after
    it."""
    if (torch := _torch()) is None:
        yield
        return
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    gradients = torch.is_grad_enabled()
    try:
        with random_of_environments():
            yield
    finally:
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(device)
        torch.set_grad_enabled(gradients)


def create(create_env, flags, num_envs, render_mode=None, seed=None):
    """Calls create_env(). Raises BadInput if it makes another number of
    environments."""
    env = None
    call = Call(f"create_env() of --env {flags.env}")
    try:
        with _signals_deferred(), np.errstate(), _torch_kept(), call:
            env = create_env(flags, num_envs, render_mode, seed)
    except Terminated:
        if env is not None:
            env.close()
        raise
    finally:
        open_standard_files()
    if env.num_envs != num_envs * env.num_agents:
        raise BadInput(
            f"create_env() made {env.num_envs} rows, expected num_envs * num_agents = "
            f"{num_envs} * {env.num_agents}"
        )
    return env
