"""Whether a disk has room for a conversion, before a byte is written. Knows bytes."""

import shutil
from pathlib import Path

from rl_backends.checkpoint_directory import VARIABLE
from rl_backends.errors import CheckpointError

__all__ = ["ELSEWHERE", "check_space", "told_bytes"]

MIB, GIB = 2**20, 2**30
MARGIN_BYTES = 16 * 2**20
"""For metadata, and for what a filesystem takes beside the numbers."""
MARGIN = 0.02
ELSEWHERE = f"make room, or name another folder in {VARIABLE}"


def told_bytes(num_bytes: int) -> str:
    """For people."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.2f} MiB"


def check_space(directory: Path, *, tensor_bytes: int) -> None:
    """Refuse where the numbers would not fit; quotas are not seen here, and fail when they are met.

    Raises:
        CheckpointError: what is needed, what is there, and where.
    """
    needed = int(tensor_bytes * (1 + MARGIN)) + MARGIN_BYTES
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise CheckpointError(
            f"{directory} has {told_bytes(free)} free, and the conversion would take {told_bytes(needed)}: {ELSEWHERE}"
        )
