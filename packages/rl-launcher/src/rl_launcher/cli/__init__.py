"""The command line: `rl-launcher run|resume|explain|validate|evaluate|export|report|doctor|recipes|…`.

One file for each group of commands; each imports what it needs when it is called, so that `--help` is there at once.
"""

from rl_launcher.cli.app import app, main

__all__ = ["app", "main"]
