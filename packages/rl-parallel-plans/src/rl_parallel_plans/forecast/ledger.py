"""What lived when, in bytes: an account of storages from which peaks and their make-up are read afterwards.

Knows numbers and words, not tensors. A holding may get its category late (a temporary turns out to be a gradient):
make-ups are computed when asked for, so that the last word counts for its whole life.
"""

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate


@dataclass(slots=True)
class Holding:
    """One storage: its present size, what it is, and the module that was running when it was made."""

    num_bytes: int
    category: str
    owner: str


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes alive at one time in a phase, and what they were."""

    total: int
    by_category: dict[str, int]
    by_owner: dict[tuple[str, str], int]


class Ledger:
    """Births, sizes and deaths of holdings in order, and the phases in which they fell."""

    def __init__(self) -> None:
        self._events: list[tuple[Holding, int]] = []
        self._phases: dict[str, tuple[int, int]] = {}
        self.running = ""
        """Name of the phase that is running, the innermost; empty outside of all."""

    def open(self, num_bytes: int, *, category: str, owner: str) -> Holding:
        """A new holding, alive until resized to 0."""
        holding = Holding(0, category, owner)
        self.resize(holding, num_bytes)
        return holding

    def resize(self, holding: Holding, num_bytes: int) -> None:
        """From now on `holding` has `num_bytes`; 0 where it died."""
        if num_bytes != holding.num_bytes:
            self._events.append((holding, num_bytes - holding.num_bytes))
            holding.num_bytes = num_bytes

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name what happens inside."""
        start, outer, self.running = len(self._events), self.running, name
        try:
            yield
        finally:
            self.running = outer
        self._phases[name] = (start, len(self._events))

    def moment(self, name: str) -> None:
        """Name the present state."""
        self._phases[name] = (len(self._events), len(self._events))

    def peaks(self, *, without: Collection[str] = ()) -> dict[str, Peak]:
        """The peak of each phase, earliest start first. What a phase begins with counts too.

        without: categories that are left out, such as those that lie in another memory.
        """
        totals = [0, *accumulate(0 if each.category in without else delta for each, delta in self._events)]
        spans = sorted(self._phases.items(), key=lambda item: item[1])
        return {
            name: self._peak(max(range(start, end + 1), key=totals.__getitem__), without)
            for name, (start, end) in spans
        }

    def _peak(self, num_events: int, without: Collection[str]) -> Peak:
        by_category: Counter[str] = Counter()
        by_owner: Counter[tuple[str, str]] = Counter()
        for holding, delta in self._events[:num_events]:
            if holding.category in without:
                continue
            by_category[holding.category] += delta
            by_owner[holding.category, holding.owner] += delta
        return Peak(
            by_category.total(),
            {category: count for category, count in by_category.most_common() if count},
            {owner: count for owner, count in by_owner.most_common() if count},
        )
