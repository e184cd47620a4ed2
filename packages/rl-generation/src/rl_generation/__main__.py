"""`python -m rl_generation`; see `rl_generation.cli`."""

import sys

from rl_generation.cli import main

if __name__ == "__main__":
    sys.exit(main())
