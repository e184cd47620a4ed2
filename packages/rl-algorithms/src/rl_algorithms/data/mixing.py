"""Several sets of rows as one stream, in proportions that hold at every moment, not only on average.

With weights w_i that sum to 1, set i has been drawn c_i(n) times after n draws, and

    |c_i(n) - n w_i| < 1        for every i and n

which sampling would miss by the root of n. The j-th draw of set i falls into the window [floor(j / w_i),
ceil((j + 1) / w_i)) of draws; of those whose window is open, the one that closes first is next. One such draw at a
time always meets every window (Baruah, Cohen, Plaxton, Varvel 1996, Proportionate progress; the case of one resource).
All in whole numbers, hence the same on every machine.
"""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Generic, SupportsFloat, TypeVar

from rl_algorithms.data.order import ShuffledPasses, check_state
from rl_algorithms.rows import DataError

__all__ = ["Mixed", "Mixture"]

ItemT = TypeVar("ItemT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed(Generic[ItemT]):
    """An item, and the set that it was drawn from."""

    name: str
    """The set's name."""

    item: ItemT
    """What was drawn."""


class Mixture(Generic[ItemT]):
    """An endless stream drawn from several sets, each in shuffled passes of its own.

    Args:
        sets: the items of each set, by its name.
        weights: how often each set is drawn, in any unit: `{"maths": 3, "code": 1}`. The same names as `sets`. 0.1 is
            a tenth, not the binary fraction nearest to it.
        seed: the order within each set, and which set comes first, depend on it.

    Raises:
        DataError: a set is empty, or the names differ.
        ValueError: a weight is not positive and finite.
    """

    def __init__(self, sets: Mapping[str, Sequence[ItemT]], *, weights: Mapping[str, SupportsFloat], seed: int) -> None:
        _check_names(sets, weights)
        self._sets, self._seed = dict(sets), seed
        self._weights = _whole(weights)
        self._total = sum(self._weights.values())
        self._passes = {name: ShuffledPasses(len(items), seed=f"{seed}/{name}") for name, items in sets.items()}
        order = sorted(sets)
        random.Random(seed).shuffle(order)
        self._order = order
        self._drawn = dict.fromkeys(sorted(sets), 0)

    def __iter__(self) -> Iterator[Mixed[ItemT]]:
        return self

    def __next__(self) -> Mixed[ItemT]:
        name = self._next_set()
        item = self._sets[name][self._passes[name][self._drawn[name]]]
        self._drawn[name] += 1
        return Mixed(name=name, item=item)

    def batches(self, *, size: int) -> Iterator[list[Mixed[ItemT]]]:
        """The stream in batches of `size`, forever."""
        if size < 1:
            raise ValueError(f"size={size} must be >= 1")
        while True:
            yield [next(self) for _ in range(size)]

    def state(self) -> dict[str, Any]:
        """Where it stands, fit for JSON: how often each set was drawn, and what the order depends on."""
        return {
            "seed": self._seed,
            "num_items": {name: len(self._sets[name]) for name in self._drawn},
            "weights": {name: self._weights[name] for name in self._drawn},
            "drawn": dict(self._drawn),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state` was taken.

        Raises:
            DataError: it is of other sets, sizes, weights, or another seed.
        """
        check_state(state, self.state(), position="drawn")
        self._drawn = {name: state["drawn"][name] for name in self._drawn}

    def _next_set(self) -> str:
        now = sum(self._drawn.values())
        # Window [floor(j W / w), ceil((j + 1) W / w)) of the next draw of each set, in whole numbers.
        open_sets = [name for name in self._order if self._drawn[name] * self._total // self._weights[name] <= now]
        return min(open_sets, key=lambda name: -(-(self._drawn[name] + 1) * self._total // self._weights[name]))


def _check_names(sets: Mapping[str, Sequence[ItemT]], weights: Mapping[str, SupportsFloat]) -> None:
    if not sets:
        raise DataError("there are no sets to mix")
    if set(sets) != set(weights):
        raise DataError(f"the sets are {sorted(sets)} and the weights are for {sorted(weights)}; give one for each")
    for name, items in sets.items():
        if not len(items):
            raise DataError(f"the set {name!r} has no rows to draw from")
        if not (math.isfinite(weight := float(weights[name])) and weight > 0):
            raise ValueError(f"weights[{name!r}]={weight} must be finite and > 0; leave out what is not wanted")


def _whole(weights: Mapping[str, SupportsFloat]) -> dict[str, int]:
    exact = {name: Fraction(repr(float(weight))) for name, weight in weights.items()}
    unit = math.lcm(*(weight.denominator for weight in exact.values()))
    whole = {name: int(weight * unit) for name, weight in exact.items()}
    shared = math.gcd(*whole.values())
    return {name: weight // shared for name, weight in whole.items()}
