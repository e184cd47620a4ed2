"""Which units of a rank go into one microbatch. Integers only, no tensors.

    padded    units of like length, so that little padding is computed: neighbours in the order of lengths
    packed    any units, filled up to the bound on tokens: best fit, longest first

First as few microbatches as the bounds allow, then, of as many as all ranks must have, alike ones: the largest decides
the memory that a step takes.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Bounds", "packed_groups", "padded_groups"]

Groups = list[list[int]]


@dataclass(frozen=True, slots=True)
class Bounds:
    """On one microbatch."""

    units: int
    """Most units."""

    tokens: int | None
    """Most tokens, as the model reads them."""


def padded_groups(units: Sequence[int], tokens: Sequence[int], bounds: Bounds) -> Callable[[int], Groups]:
    """How to cut a rank's units, most tokens first; the result cuts into at least the number that it is given.

    units: unit numbers, in descending order of `tokens`.
    tokens: of each unit (by its number), padded to its own longest row.
    """
    ordered = [tokens[unit] for unit in units]
    fewest = len(_starts(ordered, bounds.units, bounds.tokens))

    def into(number: int) -> Groups:
        wanted = max(number, fewest)
        starts = _starts(ordered, bounds.units, _smallest_bound(ordered, bounds, wanted))
        groups = [list(units[start:end]) for start, end in zip(starts, [*starts, len(units)][1:], strict=True)]
        return _split_up(groups, lambda group: tokens[group[0]] * len(group), wanted)

    return into


def packed_groups(units: Sequence[int], tokens: Sequence[int], bounds: Bounds) -> Callable[[int], Groups]:
    """As `padded_groups`, for rows without padding: the tokens of a microbatch are the sum of its units'."""
    fitted = _best_fit(units, tokens, bounds)

    def into(number: int) -> Groups:
        wanted = max(number, len(fitted))
        spread = _spread(units, tokens, bounds, number=min(wanted, len(units)))
        if spread is None:
            spread = _split_up(fitted, lambda group: sum(tokens[unit] for unit in group), wanted)
        return sorted(spread, key=lambda group: (-sum(tokens[unit] for unit in group), group))

    return into


def _starts(ordered: Sequence[int], most_units: int, most_tokens: int | None) -> list[int]:
    """Where each run of neighbours begins. The first of a run is its longest, to which the others are padded."""
    starts, at = [], 0
    while at < len(ordered):
        starts.append(at)
        at += most_units if most_tokens is None else max(1, min(most_units, most_tokens // ordered[at]))
    return starts


def _smallest_bound(ordered: Sequence[int], bounds: Bounds, number: int) -> int | None:
    """The smallest bound on tokens that still gives `number` runs."""
    if not ordered:
        return None
    low, high = ordered[0], ordered[0] * bounds.units
    if bounds.tokens is not None:
        high = max(low, min(high, bounds.tokens))
    while low < high:
        middle = (low + high) // 2
        if len(_starts(ordered, bounds.units, middle)) <= number:
            high = middle
        else:
            low = middle + 1
    return low


def _split_up(groups: Groups, size: Callable[[list[int]], int], number: int) -> Groups:
    """Halve the largest groups until there are `number`, or nothing is left to halve."""
    heap = [(-size(group), index, group) for index, group in enumerate(groups)]
    heapq.heapify(heap)
    whole: list[tuple[int, list[int]]] = []
    while heap and len(heap) + len(whole) < number:
        _, index, group = heapq.heappop(heap)
        if len(group) == 1:
            whole.append((index, group))
            continue
        half = len(group) // 2
        for part, rows in enumerate((group[:half], group[half:])):
            heapq.heappush(heap, (-size(rows), 2 * index + part + len(groups), rows))
    return sorted([group for _, group in whole] + [group for _, _, group in heap], key=lambda g: (-size(g), g))


def _best_fit(units: Sequence[int], tokens: Sequence[int], bounds: Bounds) -> Groups:
    """Each unit, longest first, into the fullest group that still takes it (best fit decreasing: Johnson, 1973)."""
    if bounds.tokens is None:
        return [list(units[start : start + bounds.units]) for start in range(0, len(units), bounds.units)]
    groups: Groups = []
    free: list[tuple[int, int]] = []
    for unit in units:
        found = bisect_left(free, (tokens[unit], -1))
        if found < len(free):
            left, index = free.pop(found)
        else:
            left, index = bounds.tokens, len(groups)
            groups.append([])
        groups[index].append(unit)
        if len(groups[index]) < bounds.units:
            insort(free, (left - tokens[unit], index))
    return groups


def _spread(units: Sequence[int], tokens: Sequence[int], bounds: Bounds, *, number: int) -> Groups | None:
    """Exactly `number` groups of like numbers of tokens, longest units first; None where the bounds do not let it."""
    groups: Groups = [[] for _ in range(number)]
    loads = [(0, index) for index in range(number)]
    for unit in units:
        if not loads:
            return None
        load, index = loads[0]
        if bounds.tokens is not None and load + tokens[unit] > bounds.tokens:
            return None
        groups[index].append(unit)
        if len(groups[index]) < bounds.units:
            heapq.heapreplace(loads, (load + tokens[unit], index))
        else:
            heapq.heappop(loads)
    return groups
