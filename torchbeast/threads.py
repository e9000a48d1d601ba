"""Threads that end together."""

import threading
import time

import torch

from torchbeast import ranks


class Threads:
    """Threads of one training. When one of them returns or raises, all have to end.

    `stop`, a threading.Event, is set when one of them has ended or a signal has come.
    """

    def __init__(self):
        self.stop = threading.Event()
        self._threads = []
        self._errors = []

    def add(self, name, body, num_torch_threads=1):
        """Adds a thread that calls body(). In it, PyTorch shares each operation among
        num_torch_threads threads of its own."""

        def target():
            # At its first call in a thread PyTorch takes the number that another thread
            # set last: so a first call, then the number.
            torch.get_num_threads()
            torch.set_num_threads(num_torch_threads)
            try:
                body()
            except BaseException as e:  # sys.exit() in a network, too.
                self._errors.append(e)
                ranks.current.leave(e)
            finally:
                self.stop.set()

        self._threads.append(threading.Thread(target=target, name=name))

    def run(self, signals, end, watch=lambda: None):
        """Starts the threads, and calls watch() once a second until one of them ends or
        a signal comes. Then calls end(), which has to make the others end,
        and waits for all. Raises the first error of any of them."""
        try:
            for thread in self._threads:
                thread.start()
            watched_at = time.monotonic()
            # A handler may not set an Event that this thread may be waiting for.
            while not self.stop.wait(0.2):
                signals.check()
                if time.monotonic() > watched_at + 1:
                    watch()
                    watched_at = time.monotonic()
        except BaseException as e:
            ranks.current.leave(e)
            raise
        finally:
            self.stop.set()
            end()
            for thread in self._threads:  # One that was not started is not alive.
                while thread.is_alive():
                    thread.join(5)
                    if ranks.current.lost:  # It may wait for the others for ever.
                        break
        if self._errors:
            raise self._errors[0]
