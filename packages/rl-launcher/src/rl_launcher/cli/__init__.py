"""The command line: `rl-launcher run|resume|explain|validate|try-reward|evaluate|export|report|doctor|recipes|…`.

One file for each group of commands. Each command imports what it needs when it is called, so that `--help` is fast.
"""

from rl_launcher.cli.app import app, main

__all__ = ["app", "main"]
