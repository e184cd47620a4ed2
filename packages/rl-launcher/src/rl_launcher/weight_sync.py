"""The way of new weights into the engine, and what it has done so far."""

from collections.abc import Callable

from rl_refit import Refit, RefitReport

__all__ = ["WeightSync", "refit_metrics"]


def refit_metrics(report: RefitReport) -> dict[str, float]:
    """What the log has of a refit; `refit_verified` is 1 where digests of both sides were compared, else 0."""
    return {
        "refit_bytes": float(report.bytes),
        "refit_s": report.total_seconds,
        "refit_verified": float(report.digest is not None),
    }


class WeightSync:
    """A `Refit` that remembers its last report and counts; satisfies `rl_algorithms.contracts.WeightSync`.

    Args:
        refit: What sends.
        merge: Called before each refit: brings what is sent up to date, where that is not the policy's own memory.
    """

    def __init__(self, refit: Refit, *, merge: Callable[[], object] | None = None) -> None:
        self._refit, self._merge = refit, merge
        self.count = 0
        """Refits that were verified and committed."""
        self.last: RefitReport | None = None
        """The report of the latest of them."""

    def __call__(self, *, version: int) -> RefitReport:
        """Transfer, verify and commit; see `Refit`."""
        if self._merge is not None:
            self._merge()
        self.last = self._refit(version)
        self.count += 1
        return self.last

    def metrics(self) -> dict[str, float]:
        """Bytes and seconds of the latest refit, and whether it was compared, for the log."""
        if self.last is None:
            return {}
        return refit_metrics(self.last)

    def explain(self) -> str:
        """What each refit will move."""
        return self._refit.explain()
