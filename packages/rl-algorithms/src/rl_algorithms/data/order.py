"""In which order rows come: shuffled passes that can be resumed anywhere.

The order of pass e is a function of the seed and e alone, so that a position is all there is to remember:
nothing is replayed to go on with a run.
"""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from rl_algorithms.rows import DataError

__all__ = ["ShuffledBatches", "ShuffledPasses", "StreamedBatches", "batches", "check_state"]

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


class StreamedBatches(Generic[ItemT]):
    """Batches of a stream that does not fit into memory, forever, from a position that can be saved and gone on from.

    Each pass reads the stream in its order. Blocks of `buffer` items are shuffled, each in an order that depends on the
    seed, the pass and the block alone; to go on, the stream is read again up to the block where it stopped.

    Args:
        open_stream: begins a new pass: always the same items in the same order.
        size: how many make a batch.
        buffer: items in memory at once; 1 keeps the order of the stream.
        seed: what the orders depend on.

    Raises:
        ValueError: `size` or `buffer` is below 1.
        DataError: when its turn comes, a pass has no items, or fewer than one before.
    """

    def __init__(
        self, open_stream: Callable[[], Iterable[ItemT]], *, size: int, buffer: int = 10_000, seed: int
    ) -> None:
        for name, value in {"size": size, "buffer": buffer}.items():
            if value < 1:
                raise ValueError(f"{name}={value} must be >= 1")
        self._open, self._size, self._buffer, self._seed = open_stream, size, buffer, seed
        self._pass, self._drawn = 0, 0
        self._items: Iterator[ItemT] | None = None

    def __iter__(self) -> Iterator[list[ItemT]]:
        return self

    def __next__(self) -> list[ItemT]:
        return [self._next() for _ in range(self._size)]

    def state(self) -> dict[str, int]:
        """Where it stands, fit for JSON: the pass, and how many of its items were drawn."""
        return {"seed": self._seed, "buffer": self._buffer, "pass": self._pass, "drawn": self._drawn}

    def load_state(self, state: Mapping[str, int]) -> None:
        """Go on from where `state` was taken.

        Raises:
            DataError: it is of another seed or buffer.
        """
        mine = {"seed": self._seed, "buffer": self._buffer}
        check_state(state, {**mine, "pass": 0, "drawn": 0}, position=("pass", "drawn"))
        self._pass, self._drawn, self._items = state["pass"], state["drawn"], None

    def _next(self) -> ItemT:
        for _ in range(2):
            if self._items is None:
                self._items = self._shuffled()
            for item in self._items:
                self._drawn += 1
                return item
            if not self._drawn:
                raise DataError(f"pass {self._pass} over the stream has no items to draw batches from")
            self._pass, self._drawn, self._items = self._pass + 1, 0, None
        raise AssertionError("a pass that has begun has an item")

    def _shuffled(self) -> Iterator[ItemT]:
        """The items of the pass that are left."""
        number, offset = divmod(self._drawn, self._buffer)
        stream = itertools.islice(self._open(), number * self._buffer, None)
        while block := list(itertools.islice(stream, self._buffer)):
            random.Random(f"{self._seed}/{self._pass}/{number}").shuffle(block)
            if offset > len(block):
                raise DataError(f"the stream has fewer items than {self._drawn} of this pass, which were drawn before")
            yield from block[offset:]
            number, offset = number + 1, 0


def batches(items: Sequence[ItemT], *, size: int, seed: int) -> Iterator[list[ItemT]]:
    """`ShuffledBatches` of which no state is wanted.

    Raises:
        DataError: there is nothing to draw from.
    """
    return ShuffledBatches(items, size=size, seed=seed)


def check_state(state: Mapping[str, object], mine: Mapping[str, object], *, position: str | tuple[str, ...]) -> None:
    """Refuse a state that differs from `mine` in anything but the `position`."""
    position = (position,) if isinstance(position, str) else position
    for name in mine:
        if name not in state:
            raise DataError(f"the state of the data has no {name!r}; it has {', '.join(map(repr, state))}")
    for name, value in mine.items():
        if name not in position and state[name] != value:
            raise DataError(
                f"the state of the data has {name}={state[name]!r}, and this run {value!r}: the order would be "
                f"another. Go on with the data and the seed that the run began with, or begin anew"
            )
