"""In which order rows come: shuffled passes that can be resumed anywhere.

The order of pass e is a function of the seed and e alone, so that a position is all there is to remember:
nothing is replayed to go on with a run.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from rl_algorithms.data.rows import DataError

__all__ = ["ShuffledBatches", "ShuffledPasses", "batches", "check_state"]

ItemT = TypeVar("ItemT")


class ShuffledPasses:
    """Endless passes over `range(num_items)`, each in an order of its own; any position can be asked for.

    Args:
        num_items: how many there are; at least 1.
        seed: what the orders depend on, with the number of the pass.
    """

    def __init__(self, num_items: int, *, seed: str) -> None:
        self._num_items, self._seed = num_items, seed
        self._pass, self._order = -1, list[int]()

    def __getitem__(self, position: int) -> int:
        number, index = divmod(position, self._num_items)
        if number != self._pass:
            self._order = list(range(self._num_items))
            random.Random(f"{self._seed}/{number}").shuffle(self._order)  # a string is hashed alike in each process
            self._pass = number
        return self._order[index]


class ShuffledBatches(Generic[ItemT]):
    """Batches of `size`, forever: each pass over `items` is a new shuffle, and a batch may span two passes.

    Args:
        items: what to draw from.
        size: how many make a batch. It may change when a run goes on; the order of the items stays.
        seed: the order depends on it, and on the number of items, alone.

    Raises:
        DataError: there is nothing to draw from.
    """

    def __init__(self, items: Sequence[ItemT], *, size: int, seed: int) -> None:
        if not len(items):
            raise DataError("there are no rows to draw batches from")
        if size < 1:
            raise ValueError(f"size={size} must be >= 1")
        self._items, self._size, self._seed = items, size, seed
        self._passes = ShuffledPasses(len(items), seed=str(seed))
        self._drawn = 0

    def __iter__(self) -> Iterator[list[ItemT]]:
        return self

    def __next__(self) -> list[ItemT]:
        batch = [self._items[self._passes[self._drawn + offset]] for offset in range(self._size)]
        self._drawn += self._size
        return batch

    def state(self) -> dict[str, int]:
        """Where it stands: three numbers, fit for JSON."""
        return {"seed": self._seed, "num_items": len(self._items), "drawn": self._drawn}

    def load_state(self, state: Mapping[str, int]) -> None:
        """Go on from where `state` was taken.

        Raises:
            DataError: it is of other data, or of another seed.
        """
        check_state(state, self.state(), position="drawn")
        self._drawn = state["drawn"]


def batches(items: Sequence[ItemT], *, size: int, seed: int) -> Iterator[list[ItemT]]:
    """`ShuffledBatches` of which no state is wanted.

    Raises:
        DataError: there is nothing to draw from.
    """
    return ShuffledBatches(items, size=size, seed=seed)


def check_state(state: Mapping[str, object], mine: Mapping[str, object], *, position: str) -> None:
    """Refuse a state that differs from `mine` in anything but the `position`."""
    for name in mine:
        if name not in state:
            raise DataError(f"the state of the data has no {name!r}; it has {', '.join(map(repr, state))}")
    for name, value in mine.items():
        if name != position and state[name] != value:
            raise DataError(
                f"the state of the data has {name}={state[name]!r}, and this run {value!r}: the order would be "
                f"another. Go on with the data and the seed that the run began with, or begin anew"
            )
