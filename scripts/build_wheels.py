"""Build the wheels of several packages in one process, with the hooks that pip itself would call.

    python build_wheels.py [--editable] SHELF PACKAGE_DIRECTORY...

It runs in an environment with hatchling and editables, and writes the wheels to SHELF.
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

from hatchling.build import build_editable, build_wheel


def main() -> None:
    """Build each package from its own directory, as the hooks expect."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--editable", action="store_true", help="wheels that point to the source instead of holding it")
    parser.add_argument("shelf", type=Path)
    parser.add_argument("packages", type=Path, nargs="*")
    arguments = parser.parse_args()
    shelf = arguments.shelf.resolve()
    shelf.mkdir(parents=True, exist_ok=True)
    hook = build_editable if arguments.editable else build_wheel
    for package in [path.resolve() for path in arguments.packages]:
        with contextlib.chdir(package):
            hook(str(shelf))


if __name__ == "__main__":
    main()
