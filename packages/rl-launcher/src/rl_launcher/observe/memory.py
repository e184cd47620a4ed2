"""How much memory this process and its GPU hold, as figures for the log. It initialises nothing."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

__all__ = ["memory_metrics"]

_STATM = Path("/proc/self/statm")


def memory_metrics() -> dict[str, float]:
    """`memory_rss_bytes`, and `memory_gpu_bytes` and `memory_gpu_peak_bytes` where this process uses a GPU.

    The process's figure is left out where the system has no `/proc`; those of the GPU are what torch's allocator of
    the current device reserves, now and at most so far.
    """
    figures = {}
    rss = _resident_bytes()
    if rss is not None:
        figures["memory_rss_bytes"] = float(rss)
    # A process that never imported torch, or never touched a GPU, must not begin to for a line in a log.
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        figures["memory_gpu_bytes"] = float(torch.cuda.memory_reserved())
        figures["memory_gpu_peak_bytes"] = float(torch.cuda.max_memory_reserved())
    return figures


def _resident_bytes() -> int | None:
    try:
        pages = int(_STATM.read_text(encoding="ascii").split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
