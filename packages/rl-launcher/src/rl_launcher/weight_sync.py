"""The way of new weights into the engine, and what it has done so far."""

from rl_refit import Refit, RefitReport

__all__ = ["WeightSync"]


class WeightSync:
    """A `Refit` that remembers its last report and counts; satisfies `rl_algorithms.contracts.WeightSync`."""

    def __init__(self, refit: Refit) -> None:
        self._refit = refit
        self.count = 0
        """Refits that were verified and committed."""
        self.last: RefitReport | None = None
        """The report of the latest of them."""

    def __call__(self, *, version: int) -> RefitReport:
        """Transfer, verify and commit; see `Refit`."""
        self.last = self._refit(version)
        self.count += 1
        return self.last

    def metrics(self) -> dict[str, float]:
        """Bytes and seconds of the latest refit, for the log."""
        if self.last is None:
            return {}
        return {"refit_bytes": float(self.last.bytes), "refit_s": sum(self.last.seconds.values())}

    def explain(self) -> str:
        """What each refit will move."""
        return self._refit.explain()
