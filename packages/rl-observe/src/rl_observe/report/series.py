"""Curves before they are drawn: taken out of a run's rows, smoothed, and thinned to what a page can show.

It does not know axes or colours.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from rl_observe.report.record import Row, number

__all__ = ["Points", "points", "smooth", "thin"]

Points = Sequence[tuple[float, float | None]]
"""Steps and values in the order of the steps; None where a step has no finite value, which breaks the line."""

# More points than a chart has pixels only make the page heavy.
_DRAWN = 600


def points(rows: Sequence[Row], name: str) -> Points:
    """One metric over the steps of a stage; rows that do not name it are left out."""
    return [
        (float(step), number(row, name)) for row in rows if name in row and (step := number(row, "step")) is not None
    ]


def smooth(curve: Points) -> Points:
    """The centred mean over a twelfth of the curve, at least five points.

    Towards an end the window shrinks to two neighbours, so that a slope stays a slope.
    """
    half = max(2, len(curve) // 24)
    sums = list(accumulate((value or 0.0 for _, value in curve), initial=0.0))
    counts = list(accumulate((value is not None for _, value in curve), initial=0))
    smoothed: list[tuple[float, float | None]] = []
    for index, (step, value) in enumerate(curve):
        reach = max(2, min(half, index, len(curve) - 1 - index))
        low, high = max(0, index - reach), min(len(curve), index + reach + 1)
        smoothed.append((step, None if value is None else (sums[high] - sums[low]) / (counts[high] - counts[low])))
    return smoothed


def thin(curve: Points) -> Points:
    """At most about 600 points of the curve: of each stretch its lowest and its highest, so that no spike is lost."""
    if len(curve) <= _DRAWN:
        return curve
    stretch = 2 * len(curve) / _DRAWN
    kept: list[tuple[float, float | None]] = []
    for index in range(_DRAWN // 2):
        part = curve[round(index * stretch) : round((index + 1) * stretch)]
        finite = [point for point in part if point[1] is not None]
        if not finite:
            kept += part[:1]
            continue
        extremes = {min(finite, key=_value), max(finite, key=_value)}
        kept += sorted(extremes)
    return kept


def _value(point: tuple[float, float | None]) -> float:
    return point[1] or 0.0
