"""When something began and ended: by the wall clock on a CPU, by events on the stream of a GPU. Waits for nothing.

Reading an interval of a GPU waits for the event that ends it, so intervals are read when somebody asks for metrics.
"""

import time
from typing import Any

import torch

__all__ = ["Clock", "Interval"]


class Interval:
    """From one moment to a later one."""

    def __init__(self, start: Any, end: Any) -> None:
        self._start = start
        self._end = end

    def seconds(self) -> float:
        """How long it took; on a GPU, once the device has come to its end."""
        if isinstance(self._start, float):
            return float(self._end - self._start)
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1000.0


class Clock:
    """Moments of `device`."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"

    def now(self) -> Any:
        """A moment; on a GPU, when its stream comes to it."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def since(self, start: Any) -> Interval:
        """From `start` to now."""
        return Interval(start, self.now())
