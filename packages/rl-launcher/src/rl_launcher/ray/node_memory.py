"""How much memory a node of a running cluster has: of its GPUs, of its host, and in /dev/shm."""

import os
import socket
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rl_backends.least_memory import host_bytes

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - only its size is read
NVIDIA_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMemory:
    """What a node said of itself. What it could not find out is None or empty, and is not checked."""

    host: str
    """Its name."""
    host_bytes: int
    """Of its main memory, or the limit of its container if that is less."""
    shm_bytes: int | None
    """Size of /dev/shm; None where there is none."""
    gpus: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Name and bytes of each of its GPUs, by the number that Ray knows it as; empty where nvidia-smi is not there."""

    def of(self, numbers: Sequence[str]) -> list[tuple[str, int]]:
        """Name and bytes of some of its GPUs, or of all where the numbers are others."""
        if all(number in self.gpus for number in numbers):
            return [self.gpus[number] for number in numbers]
        return [*self.gpus.values()]


MeasureNode = Callable[[str], NodeMemory]
"""Is called on a node with its Ray id."""


def measure_node(node_id: str) -> NodeMemory:
    """Measure the node that this is called on; initializes no GPU, which would take memory of it.

    node_id: Ray's, which this does not look at: it is for measures that tell apart the raylets of one machine.
    """
    del node_id
    shm = None
    if Path(SHARED_MEMORY).is_dir():
        stat = os.statvfs(SHARED_MEMORY)
        shm = stat.f_frsize * stat.f_blocks
    return NodeMemory(host=socket.gethostname(), host_bytes=host_bytes(), shm_bytes=shm, gpus=_gpus())


def _gpus() -> dict[str, tuple[str, int]]:
    query = ["nvidia-smi", "--query-gpu=index,name,memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(  # noqa: S603 - a fixed command
            query, capture_output=True, text=True, timeout=NVIDIA_TIMEOUT_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    rows = [[cell.strip() for cell in line.split(",")] for line in said.splitlines()]
    return {row[0]: (row[1], int(row[2]) * 2**20) for row in rows if len(row) == 3 and row[2].isdigit()}
