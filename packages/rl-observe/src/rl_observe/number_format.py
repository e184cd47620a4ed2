"""Numbers as people read them: percentages, durations, bytes, counts. Plain text, with a decimal point."""

from __future__ import annotations

import math
from collections.abc import Callable


def format_value(value: float, unit: str) -> str:
    """Write a number in one of the units of `glossary.Metric`; an unknown unit is written as a plain number."""
    return _FORMATS.get(unit, _format_number)(value)


def format_percent(share: float) -> str:
    """Write a fraction of 1 as `91.2 %`."""
    return f"{100 * share:.1f} %"


def format_bytes(size: float) -> str:
    """Write bytes in powers of ten: `1.61 MB`."""
    return _scaled(size, ("B", "kB", "MB", "GB", "TB"))


def format_count(count: float) -> str:
    """Write a count: `837`, `5.24 k`, `1.02 M`."""
    return _scaled(count, ("", "k", "M", "G", "T"))


def format_duration(seconds: float) -> str:
    """Write a duration with two or three significant figures: `2.1 ms`, `43.0 s`, `12 min 05 s`, `3 h 07 min`."""
    if seconds < 0.001:
        return f"{1e6 * seconds:.0f} µs"
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_clock(seconds: float) -> str:
    """Write a duration as a clock does: `0:43`, `12:05`, `3:07:21`."""
    minutes, rest = divmod(math.floor(seconds), 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _scaled(value: float, units: tuple[str, ...]) -> str:
    unit = units[0]
    for unit in units:
        if abs(value) < 999.5 or unit is units[-1]:
            break
        value /= 1000
    digits = f"{value:.0f}" if value == round(value) else f"{value:.3g}"
    return f"{digits} {unit}".rstrip()


def _format_number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}" if abs(value) < 1e6 else f"{value:.2e}"


_FORMATS: dict[str, Callable[[float], str]] = {
    "bytes": format_bytes,
    "count": format_count,
    "ratio": lambda value: f"{value:.6f}".rstrip("0").rstrip("."),
    "scientific": lambda value: f"{value:.1e}" if value else "0",
    "score": lambda value: f"{value:.3f}",
    "seconds": format_duration,
    "share": format_percent,
}
