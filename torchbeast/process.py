"""What every process of ours does: signals, limits, how it ends.

No torch in here: environment servers import this file.
"""

import atexit
import contextlib
import ctypes
import functools
import glob
import multiprocessing
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import resource_tracker
from multiprocessing.process import ORIGINAL_DIR

from torchbeast.messages import BadInput, Stop, log

# What ends a program in order: Ctrl-C, a service manager, a terminal that is closed.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
START_S = 120  # A child's time to start, or --env_timeout_seconds if that is more.
LEAVE_S = 10


def handle_signals(handler) -> dict:
    """Has SIGNALS call the handler. Returns {signal: handler before}."""
    signals = set(SIGNALS)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # That is what nohup is for.
        signals.remove(signal.SIGHUP)
    return {s: signal.signal(s, handler) for s in signals}


def keep_freed_memory():
    """Has glibc keep freed memory for the next allocation. To be called before there
    are threads.

    By default glibc hands large blocks back at once, and the kernel clears each new one
    page by page, which took a third of the time of an update of the shallow network on
    a CPU.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return  # Not glibc.
    TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8  # malloc.h
    mallopt(MMAP_THRESHOLD, 2**30)
    mallopt(TRIM_THRESHOLD, 2**31 - 1)
    # Only one arena keeps: those of other threads are unmapped when they are empty.
    mallopt(ARENA_MAX, 1)


def allow_open_files(num_files, remedy=""):
    """Raises this process's limit of open files as far as the system allows: whoever
    connects takes one, and environments may take any number. Raises BadInput, which
    names a remedy beside a higher limit, if there can be fewer than num_files, beside
    some 60 of libraries, logs and environments.
    """
    needed = num_files + 64
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise BadInput(
            f"this command needs {needed} open files, the limit is {hard}: raise it "
            "(ulimit -Hn; LimitNOFILE= of systemd; docker run --ulimit nofile=...)"
            f"{remedy}"
        )
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except ValueError:  # macOS: it has no limit, but does not take that as one.
        if needed > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


@contextlib.contextmanager
def signals_blocked():
    """A context for starting a process that calls lead_group(), lest SIGNALS end it
    before that. The signals are sent to the whole process group; this process acts on
    them."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def lead_group():
    """Makes this process the leader of a session and a process group of its own, which
    end with end_group(). SIGNALS do nothing in it: its parent acts on them.

    Whatever an environment starts gets SIGNALS as by default. (A mask, or SIG_IGN,
    would be inherited: simulators would outlive their terminate().)
    """
    os.setsid()
    for s in SIGNALS:
        signal.signal(s, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    open_standard_files()
    leave_forks_alone()


@functools.cache
def leave_forks_alone():
    """Has a process that an environment forks get SIGNALS as by default, as handlers of
    ours would only note them there, and none of our files."""
    os.register_at_fork(after_in_child=_leave_alone)


def _leave_alone():
    for s in SIGNALS:
        if signal.getsignal(s) != signal.SIG_IGN:  # By nohup.
            signal.signal(s, signal.SIG_DFL)
    while _copies:
        os.close(_copies.pop())


def start_python(module, title="", **kwargs):
    """Starts a Python that calls a module's main() with its end of a pipe. Returns
    (subprocess.Popen, our end). (A process of multiprocessing's would import what this
    program's main module does, and with it PyTorch: two seconds, 180 MB.)"""
    ours, theirs = multiprocessing.Pipe()
    code = f"""# {title}
import sys
from multiprocessing.connection import Connection
parent = Connection({theirs.fileno()})
sys.path[:] = parent.recv()
from {module} import main
main(parent)"""
    command = [sys.executable, "-c", code]
    kwargs |= dict(stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
    with theirs:  # An environment may have changed the directory.
        process = subprocess.Popen(command, cwd=ORIGINAL_DIR, **kwargs)
    with contextlib.suppress(OSError):  # It has ended: who waits for it says so.
        ours.send([os.fspath(p) or ORIGINAL_DIR for p in sys.path])
    return process, ours


def end_group():
    """Ends this process, which has called lead_group(), and all that it started."""
    os.killpg(os.getpid(), signal.SIGKILL)


def follow_parent():
    """Has this process get SIGTERM when its parent ends, in whatever way. Only Linux
    has that."""
    if (prctl := getattr(ctypes.CDLL(None), "prctl", None)) is not None:
        PR_SET_PDEATHSIG = 1  # sys/prctl.h
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def kill_group(process):
    """Kills a child that calls lead_group(), and all that it started, whether or not it
    has ended itself. process: multiprocessing's or subprocess's."""
    process.kill()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def signal_name(signum):
    """Returns SIGKILL and so on; of real-time signals most have no name."""
    with contextlib.suppress(ValueError):
        return signal.Signals(signum).name
    return f"signal {signum}"


def children(pid="self") -> set[int]:
    """Returns the process ids of a process's children."""
    found = set()
    if not os.path.exists("/proc/self"):
        return _children_by_ps(os.getpid() if pid == "self" else pid)
    for path in glob.glob(f"/proc/{pid}/task/*/children"):
        with contextlib.suppress(OSError), open(path) as f:
            found.update(map(int, f.read().split()))
    return found


def _children_by_ps(pid):
    """The same where the system is not Linux."""
    words = ["ps", "-A", "-o", "ppid=,pid="]
    try:
        ps = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError:
        return set()
    pairs = [tuple(map(int, line.split())) for line in ps.communicate()[0].splitlines()]
    return {child for parent, child in pairs if parent == pid} - {ps.pid}


def kill_children(pids):
    """Kills children of this process, their children and so on."""
    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
    for pid in pids - {tracker}:  # It ends with us, and others may need it.
        # One may be another user's: sudo, or a program that is setuid.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGSTOP)  # It starts no more of them.
            kill_children(children(pid))
            os.kill(pid, signal.SIGKILL)


_copies = []  # Of standard input, output and error.


def open_standard_files():
    """Opens standard input, output and error where they are closed, as they were when
    this was called first, or as /dev/null. Otherwise the next file that is opened would
    take their place."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            if _copies:
                os.dup2(_copies[fd], fd)
            else:
                os.open(os.devnull, os.O_RDWR)
    if not _copies:
        _copies.extend(os.dup(fd) for fd in range(3))


class Terminated(KeyboardInterrupt):
    """One of SIGNALS, where nothing else handles it."""

    def __init__(self, signum):
        super().__init__()
        self.signum = signum


_terminated = None  # (signal, when it came), of the last one that has raised.


def _terminate(signum, frame):
    global _terminated
    _terminated = signal.Signals(signum), time.monotonic()
    raise Terminated(signum)


def take_signals_back():
    """Installs this process's handlers of SIGNALS once more: libraries of environments
    put theirs in place of them, and then the system's."""
    if threading.current_thread() is threading.main_thread():
        for s in SIGNALS:
            if (handler := signal.getsignal(s)) is not None:
                signal.signal(s, handler)


def signals_that_raise():
    """Returns those of SIGNALS whose handlers raise KeyboardInterrupt."""
    handlers = signal.default_int_handler, _terminate
    return [s for s in SIGNALS if signal.getsignal(s) in handlers]


@contextlib.contextmanager
def terminable():
    """A context in which SIGTERM and SIGHUP raise, as Ctrl-C does, instead of ending
    this process at once. What is lost on the way, as in a destructor, counts for the
    first Signals in the context, or for the error that it became."""
    global _terminated
    before, _terminated = {}, None
    for s in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(s) == signal.SIG_DFL:
            before[s] = signal.signal(s, _terminate)
    try:
        yield
    except Exception as e:  # The import of an extension makes an ImportError of it.
        if _terminated is not None:
            raise Terminated(_terminated[0]) from e
        raise
    finally:
        _terminated = None
        for s, handler in before.items():
            if signal.getsignal(s) == _terminate:
                signal.signal(s, handler)


def ignore_again(received_at):
    """Has SIGNALS do nothing until a second after received_at, and while this process
    ends, so that its exit code is that of the first signal."""

    def handler(signum, _frame):
        if time.monotonic() > received_at + 1:
            old = before[signum]
            signal.signal(signum, signal.SIG_DFL if old == _terminate else old)
            signal.raise_signal(signum)

    def ignore():  # Python gives its own handlers up before it ends.
        for s in before:
            if signal.getsignal(s) == handler:
                signal.signal(s, signal.SIG_IGN)

    before = handle_signals(handler)
    atexit.register(ignore)


class Signals:
    """Makes check() raise Stop after one of SIGNALS. A second signal, unless it is
    SIGHUP, quits at once. What comes within a second of the first is the first again:
    the programs timeout and srun pass on what their whole process group got.

    on_second: called in the signal handler. It has to end the children without
    blocking.
    """

    current = None  # Those of this process, while they are handled.

    def __init__(self):
        self.on_second = lambda: None
        self.received = None

    def __enter__(self):
        Signals.current = self
        self._old = handle_signals(self._handle)
        if _terminated is not None and self.received is None:
            self.received, self.received_at = _terminated
        return self

    def __exit__(self, *_):
        Signals.current = None
        for s, handler in self._old.items():
            signal.signal(s, handler)
        if self.received is not None:
            ignore_again(self.received_at)

    def _handle(self, signum, _frame):
        if self.received is not None:
            again = time.monotonic() < self.received_at + 1
            if again or signum == signal.SIGHUP:
                return  # A terminal that is closed sends two SIGHUPs, or more.
            self.on_second()
            kill_children(children())
            with contextlib.suppress(OSError, ValueError):
                if select.select([], [2], [], 0)[1]:  # Not a pipe that nobody reads.
                    cursor = b"\x1b[?25h" if os.isatty(2) else b""  # rich hides it.
                    os.write(2, cursor + b"\nquit without saving\n")
            os._exit(128 + signum)
        self.received_at = time.monotonic()  # First: a signal may interrupt this.
        self.received = signal.Signals(signum)

    def stop(self):
        """Returns the Stop after a signal, else None."""
        if self.received is not None:
            return Stop(f"stopped by {self.received.name}", 128 + self.received)

    def check(self):
        if stop := self.stop():
            raise stop

    @contextlib.contextmanager
    def blamed(self):
        """A context in which an error of an environment becomes the Stop of a signal
        that comes before it or within a second. Whatever an environment starts gets
        Ctrl-C from the terminal, too, and ends at once."""
        try:
            yield
        except Exception as e:
            if not hasattr(e, "of_environment"):
                raise
            deadline = time.monotonic() + 1
            while self.received is None and time.monotonic() < deadline:
                time.sleep(0.01)
            if stop := self.stop():
                raise stop from e
            raise


def signalled():
    """Tells whether a signal has come, if they are handled. Any thread may call it."""
    return Signals.current is not None and Signals.current.received is not None


def check_signals():
    """Raises Stop after a signal, if signals are handled. Any thread may call it."""
    if (signals := Signals.current) is not None:
        signals.check()


def leave(code):
    """Ends this program as sys.exit() does, but waits at most LEAVE_S for threads and
    exit handlers that environments have left behind, and for no timer."""
    signal.setitimer(signal.ITIMER_REAL, 0)

    def insist():
        time.sleep(LEAVE_S)
        threads = set(threading.enumerate()) - {threading.main_thread()}
        names = [thread.name for thread in threads if not thread.daemon]
        what = f"thread {', '.join(names)}" if names else "an exit handler"
        log.warning("ends without %s, which an environment left behind", what)
        with contextlib.suppress(AttributeError, OSError, ValueError):
            sys.stdout.flush()  # An environment may have closed it.
        os._exit(code)

    threading.Thread(target=insist, name="insist", daemon=True).start()
    for file in filter(None, (sys.stdout, sys.stderr)):
        if file.closed:  # By an environment.
            continue
        try:
            file.flush()
        except OSError:  # The terminal is closed: Python would exit with code 120.
            os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
    sys.exit(code)
