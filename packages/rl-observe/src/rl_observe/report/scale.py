"""From numbers to places on an axis, and the round numbers to label it with.

It does not know what is drawn. Places are shares of the axis: 0 at its low end, 1 at its high end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Scale", "linear_scale", "log_scale"]

# The steps that people count in, times a power of ten.
_ROUND_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
# Beyond these, floats no longer hold the difference of two ticks.
_LARGEST = 1e300
_SMALLEST_SPREAD = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """One axis."""

    low: float
    """The number at place 0."""
    high: float
    """The number at place 1; greater than `low`."""
    ticks: tuple[float, ...]
    """Round numbers between the two."""
    is_log: bool = False
    """Whether equal ratios take equal room."""

    def place(self, value: float) -> float:
        """Where `value` lies; a value off the axis is moved to its end."""
        value = min(max(value, self.low), self.high)
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def linear_scale(values: Iterable[float], *, num_ticks: int = 4, tight: bool = False) -> Scale:
    """An axis that holds all `values`, its ends round unless `tight`. Without values it runs from 0 to 1."""
    numbers = [min(max(value, -_LARGEST), _LARGEST) for value in values] or [0.0, 1.0]
    low, high = min(numbers), max(numbers)
    size = max(abs(low), abs(high))
    if high - low <= max(_SMALLEST_SPREAD * size, 1 / _LARGEST):
        pad = size / 2 if size > 1 / _LARGEST else 0.5
        low, high = low - pad, high + pad
    step = _round_step((high - low) / num_ticks)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(index * step for index in range(first, last + 1))
    if tight:
        return Scale(low=low, high=high, ticks=tuple(tick for tick in ticks if low <= tick <= high))
    return Scale(low=ticks[0], high=ticks[-1], ticks=ticks)


def log_scale(values: Iterable[float], *, floor: float) -> Scale:
    """An axis of whole powers of ten that holds all `values`; those below `floor` lie at its low end."""
    numbers = [min(max(value, floor), _LARGEST) for value in values] or [floor]
    first = math.floor(math.log10(min(numbers)) + 1e-9)
    last = max(first + 1, math.ceil(math.log10(max(numbers)) - 1e-9))
    stride = math.ceil((last - first) / 4)
    ticks = tuple(10.0**power for power in range(first, last + 1) if (last - power) % stride == 0)
    return Scale(low=10.0**first, high=10.0**last, ticks=ticks, is_log=True)


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in _ROUND_STEPS if factor * power >= rough * (1 - 1e-9))
