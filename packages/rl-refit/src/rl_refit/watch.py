"""What whoever waits in a refit looks at: the deadline of the phase, the other parties, and where it is itself.

Knows no weights and no wire. Nothing in a refit waits without asking `check` at least every `PATIENCE_S` seconds; that
is what ends every wait with an error that names the cause, instead of a hang.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import final

from rl_refit.errors import DeadlineError

__all__ = ["PATIENCE_S", "Watch"]

PATIENCE_S = 0.05
"""Longest wait, in seconds, between two looks at the watch."""


@final
class Watch:
    """The clock and the state of one refit at one party.

    Args:
        deadline_s: Seconds that each phase may take.
        look_around: Called by `check`, at most every `PATIENCE_S`: raises what another party reports, or its death.
    """

    def __init__(self, *, deadline_s: float, look_around: Callable[[], None] | None = None) -> None:
        self.deadline_s = deadline_s
        self.phase_name = "prepare"
        self.bucket: int | None = None
        self.tensor: str | None = None
        self.peer: str | None = None
        self.seconds: dict[str, float] = {}
        self._look_around = look_around
        self._looked = self._began = monotonic()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase and give it a deadline of its own."""
        self.phase_name, self._began = name, monotonic()
        self.at()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + monotonic() - self._began

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time a part of the phase under a name of its own."""
        began = monotonic()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + monotonic() - began

    def at(self, *, bucket: int | None = None, tensor: str | None = None, peer: str | None = None) -> None:
        """Note what is being done, for errors: the bucket, the tensor, and the party that is waited for."""
        self.bucket, self.tensor, self.peer = bucket, tensor, peer

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline of the phase; 0 when it has passed."""
        return max(0.0, self._began + self.deadline_s - monotonic())

    def check(self) -> None:
        """Pass while the phase is within its deadline and no party has given up or died.

        Raises:
            DeadlineError: The phase takes too long; names phase, bucket, tensor and peer.
            RefitError: What `look_around` found.
        """
        now = monotonic()
        if self._look_around is not None and now - self._looked >= PATIENCE_S:
            self._looked = now
            self._look_around()
        if now - self._began > self.deadline_s:
            raise DeadlineError(
                f"{self.where()}: {now - self._began:.3f} s so far, and a phase may take deadline_s={self.deadline_s}",
                phase=self.phase_name,
                bucket=self.bucket,
                peer=self.peer,
                seconds=now - self._began,
            )

    def where(self) -> str:
        """Phase, bucket, tensor and peer, as far as there is one."""
        parts = [f"phase {self.phase_name}"]
        parts += [] if self.bucket is None else [f"bucket {self.bucket}"]
        parts += [] if self.tensor is None else [f"tensor {self.tensor!r}"]
        parts += [] if self.peer is None else [f"waiting for {self.peer}"]
        return ", ".join(parts)
