"""A program in which constants of modules have other values, so that a test does not
wait as long as a user would.

python -m tests.constants torchbeast.ranks.VOTE_TIMEOUT_S=15 monobeast [flags]
"""

import importlib
import sys

if __name__ == "__main__":
    sys.argv.pop(0)
    while "=" in sys.argv[0]:
        name, value = sys.argv.pop(0).split("=")
        module, _, name = name.rpartition(".")
        module = importlib.import_module(module)
        setattr(module, name, type(getattr(module, name))(value))
    sys.exit(importlib.import_module(sys.argv[0]).main(sys.argv[1:]))
