"""``python -m pipeloom``."""

import sys

from pipeloom.cli import main

if __name__ == "__main__":
    sys.exit(main())
