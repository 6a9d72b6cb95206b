"""`python -m tui3090`."""

import sys

from tui3090.cli import main

if __name__ == "__main__":
    sys.exit(main())
