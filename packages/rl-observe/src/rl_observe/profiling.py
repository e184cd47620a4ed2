"""`torch.profiler` around some optimizer steps, and memory metrics.

profile/grpo-steps-3-to-4-rank-0-4711.trace.json.gz        one file a process; opens in ui.perfetto.dev

It does not know what the process computes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from torch.profiler import profile

    from rl_observe.config import ProfilerConfig

__all__ = ["Profiler", "memory_metrics"]


class Profiler:
    """Record the steps that `config` names, once. Every process has its own, and tells it how far its stage is.

    Args:
        config: which steps; None records nothing.
        folder: where the file goes; made when there is something to write.
        rank: of this process, for the file's name.
    """

    def __init__(self, config: ProfilerConfig | None, folder: Path, *, rank: int = 0) -> None:
        self._config, self._folder, self._rank = config, folder, rank
        self._profile: profile | None = None
        self._stage, self._first, self._reached = "", 0, 0
        self._done = config is None
        self.written: Path | None = None
        """The file, once it is there."""

    def reached(self, stage: str, step: int) -> None:
        """Say that `step` of `stage` is done, 0 at its beginning: recording starts and ends between two steps."""
        if self._done or self._config is None or self._config.stage not in {None, stage}:
            return
        if self._profile is not None:
            if stage != self._stage:
                self._write()
                return
            self._reached = step
            if step >= self._first + self._config.num_steps - 1:
                self._write()
        elif step + 1 >= self._config.first_step:
            self._stage, self._first, self._reached = stage, step + 1, step
            self._profile = _started(self._config)

    def close(self) -> None:
        """Write what was recorded of steps that were begun when the run ended; a second time does nothing."""
        if self._profile is not None:
            self._write()
        self._done = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self) -> None:
        profile, self._profile, self._done = self._profile, None, True
        if profile is None:
            return
        profile.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        last = max(self._first, self._reached)
        stage = "".join(letter if letter.isalnum() else "-" for letter in self._stage)
        steps = f"{stage}-steps-{self._first}-to-{last}"
        path = self._folder / f"{steps}-rank-{self._rank}-{os.getpid()}.trace.json.gz"
        profile.export_chrome_trace(str(path))
        self.written = path


def _started(config: ProfilerConfig) -> profile:
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    recording = profile(
        activities=activities,
        with_stack=config.with_stack,
        record_shapes=config.record_shapes,
        profile_memory=config.profile_memory,
    )
    recording.start()
    return recording


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
