"""Where a refit is: its phase, bucket and tensor, how long each phase took, and whether one has taken too long.

Knows nothing of weights. A deadline is looked at where a phase says so, never in the middle of a copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import final

from rl_refit.errors import DeadlineError

__all__ = ["Progress"]


@final
class Progress:
    """The state of one refit, for its report and its errors."""

    def __init__(self, *, deadline_s: float) -> None:
        self.phase_name = "prepare"
        self.tensor: str | None = None
        self.bucket: int | None = None
        self.seconds: dict[str, float] = {}
        self._deadline_s = deadline_s
        self._began = monotonic()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase and give it a deadline of its own."""
        self.phase_name, self.tensor, self.bucket, self._began = name, None, None, monotonic()
        yield
        self.seconds[name] = monotonic() - self._began

    def check_deadline(self) -> None:
        """Pass while the phase is within its deadline.

        Raises:
            DeadlineError: It is not; names the phase, the bucket, and the seconds.
        """
        seconds = monotonic() - self._began
        if seconds > self._deadline_s:
            raise DeadlineError(
                f"{self.where()}: {seconds:.3f} s so far, and a phase may take deadline_s={self._deadline_s}",
                phase=self.phase_name,
                bucket=self.bucket,
                seconds=seconds,
            )

    def where(self) -> str:
        """Phase, bucket and tensor, as far as there is one."""
        bucket = "" if self.bucket is None else f", bucket {self.bucket}"
        return f"phase {self.phase_name}{bucket}" + ("" if self.tensor is None else f", tensor {self.tensor!r}")
