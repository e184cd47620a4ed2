"""Names of files that a file gives: they must lie in the folder of that file, and nowhere else."""

from pathlib import PurePosixPath


def is_plain_name(name: object) -> bool:
    """Whether it is text that names a file beside the one that it was read from: no folder, no `..`, no root."""
    return isinstance(name, str) and name not in {"", ".", ".."} and PurePosixPath(name).name == name
