"""`torch.profiler` around a few optimizer steps, and the memory that this process uses."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_observe.log_files import Closing

if TYPE_CHECKING:
    from torch.profiler import profile

    from rl_observe.config import ProfilerConfig


class Profiler(Closing):
    """Record the steps that `config` names, once, into one file that opens in ui.perfetto.dev.

    The file is named like `grpo-steps-3-to-4-rank-0-4711.trace.json.gz`; the last number is the process id. Every
    process has its own profiler.

    Args:
        config: the steps to record; None records nothing.
        folder: where the file goes; created when there is something to write.
        rank: of this process, for the file's name.
    """

    def __init__(self, config: ProfilerConfig | None, folder: Path, *, rank: int = 0) -> None:
        self._config, self._folder, self._rank = config, folder, rank
        self._profile: profile | None = None
        self._stage, self._first, self._last = "", 0, 0
        self._done = config is None
        self.written: Path | None = None
        """The file, once it is written."""

    def reached(self, stage: str, step: int) -> None:
        """Report that `step` of `stage` is done (0 at its beginning). Recording starts and stops between two steps."""
        config = self._config
        if self._done or config is None or config.stage not in {None, stage}:
            return
        if self._profile is None:
            if step + 1 < config.first_step:
                return
            import torch
            from torch.profiler import ProfilerActivity, profile

            gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._stage, self._first, self._last = stage, step + 1, step + 1
            self._profile = profile(
                activities=[ProfilerActivity.CPU, *gpu],
                with_stack=config.with_stack,
                record_shapes=config.record_shapes,
                profile_memory=config.profile_memory,
            )
            self._profile.start()
        elif stage != self._stage:
            self._write()
        else:
            self._last = max(self._first, step)
            if step >= self._first + config.num_steps - 1:
                self._write()

    def close(self) -> None:
        """Write what has been recorded if the run ended during the recorded steps; a second call does nothing."""
        if self._profile is not None:
            self._write()
        self._done = True

    def _write(self) -> None:
        profile, self._profile, self._done = self._profile, None, True
        if profile is None:
            return
        profile.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        stage = "".join(letter if letter.isalnum() else "-" for letter in self._stage)
        steps = f"{stage}-steps-{self._first}-to-{self._last}"
        path = self._folder / f"{steps}-rank-{self._rank}-{os.getpid()}.trace.json.gz"
        profile.export_chrome_trace(str(path))
        self.written = path


_STATM = Path("/proc/self/statm")


def memory_metrics() -> dict[str, float]:
    """Measure `memory_rss_bytes`, and `memory_gpu_bytes` and `memory_gpu_peak_bytes` if this process uses a GPU.

    The first is left out on systems without `/proc`. The GPU figures are what torch's allocator reserves on the current
    device, now and at its peak so far.
    """
    figures = {}
    try:
        pages = int(_STATM.read_text(encoding="ascii").split()[1])
        figures["memory_rss_bytes"] = float(pages * os.sysconf("SC_PAGE_SIZE"))
    except OSError:
        pass
    # A process that has not imported torch or initialized CUDA must not do so for a line in a log.
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        figures["memory_gpu_bytes"] = float(torch.cuda.memory_reserved())
        figures["memory_gpu_peak_bytes"] = float(torch.cuda.max_memory_reserved())
    return figures
