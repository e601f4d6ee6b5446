"""``python -m xcoll``: the command line."""

import sys

from xcoll.cli import main

if __name__ == "__main__":
    sys.exit(main())
