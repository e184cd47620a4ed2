"""Where a step's time went: named phases of wall-clock seconds. Knows nothing of what the phases do."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["PhaseTimer"]


class PhaseTimer:
    """Adds up seconds by phase from one `lap()` to the next.

    >>> timer = PhaseTimer()
    >>> with timer.phase("train"):
    ...     pass
    >>> list(timer.lap())
    ['phase_s/train']
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the block towards `name`. Phases do not nest."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def lap(self) -> dict[str, float]:
        """Seconds of each phase since the last lap, as `phase_s/<name>`; start the next lap."""
        seconds, self._seconds = self._seconds, {}
        return {f"phase_s/{name}": value for name, value in seconds.items()}
