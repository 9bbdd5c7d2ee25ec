"""`python -m bedstone` is the command `bedstone`."""

import sys

from bedstone.cli import main

if __name__ == "__main__":
    sys.exit(main())
