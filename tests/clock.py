"""A program on a machine whose clock is set back by an hour, every second.

python -m tests.clock monobeast [flags]
"""

import importlib
import sys
import time

if __name__ == "__main__":
    start, real = time.monotonic(), time.time
    time.time = lambda: real() - 3600 * int(time.monotonic() - start)
    sys.exit(importlib.import_module(sys.argv[1]).main(sys.argv[2:]))
