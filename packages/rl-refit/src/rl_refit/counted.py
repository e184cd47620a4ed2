"""A `Refit` for a training loop: called with the version alone, it counts and keeps its latest report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from rl_refit.refit import Refit, RefitReport
from rl_refit.replicas import ReplicasReport

__all__ = ["CountedRefit", "CountedWeightSync"]


class CountedWeightSync(Protocol):
    """Transfers new weights into an engine and counts what it did: a `CountedRefit`, or one over several processes."""

    count: int
    """Verified and committed refits."""

    @property
    def last(self) -> RefitReport | ReplicasReport | None:
        """The report of the latest one; of several replicas, what it did to all of them."""

    def __call__(self, *, version: int) -> RefitReport | ReplicasReport:
        """Transfer, verify and commit."""

    def metrics(self) -> dict[str, float]:
        """Bytes and seconds of the latest refit, for the log."""

    def explain(self) -> str:
        """What each refit transfers."""


class CountedRefit:
    """A refit that a loop calls after its optimizer steps.

    Args:
        refit: What moves the weights.
        refresh: Called before each refit; brings the source's memory up to date where it is not the trainer's own, such
            as merged adapters.
    """

    def __init__(self, refit: Refit, *, refresh: Callable[[], object] | None = None) -> None:
        self._refit, self._refresh = refit, refresh
        self.count = 0
        """Refits that were committed; a run that resumes sets it."""
        self.last: RefitReport | None = None
        """The report of the latest of them."""

    def __call__(self, *, version: int) -> RefitReport:
        """Transfer, verify and commit the weights as of `version` optimizer steps.

        Raises:
            RefitError: As of `Refit`; nothing is counted then.
        """
        if self._refresh is not None:
            self._refresh()
        self.last = self._refit(version)
        self.count += 1
        return self.last

    def metrics(self) -> dict[str, float]:
        """`RefitReport.metrics` of the latest refit; empty before the first."""
        return {} if self.last is None else self.last.metrics()

    def explain(self) -> str:
        """What each refit will move."""
        return self._refit.explain()
