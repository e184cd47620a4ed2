"""`python -m rl_refit`; see `rl_refit.command`."""

from __future__ import annotations

import sys

from rl_refit.command import main

if __name__ == "__main__":
    sys.exit(main())
