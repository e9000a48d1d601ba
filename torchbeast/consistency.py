"""The command that torchbeast/warp/consistency.py describes."""

import sys

from torchbeast.warp.consistency import main

if __name__ == "__main__":
    sys.exit(main())
