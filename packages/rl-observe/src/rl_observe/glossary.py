"""The words and numbers that people read: what each metric, phase and condition means, and how a value is written.

The texts are in glossary.toml. Metrics that it does not list are shown as plain numbers under their own names.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any, NamedTuple

PHASE_PREFIX = "phase_s/"
"""A metric with this prefix holds the seconds that one logged step spent in a phase."""


class Metric(NamedTuple):
    """How one metric is shown."""

    label: str  # the name shown to people
    unit: str  # a unit of `format_value`
    meaning: str  # one sentence for somebody who does not know the metric


class Phase(NamedTuple):
    """One kind of work in a step."""

    name: str  # the part of the metric's name after `phase_s/`
    color: str  # its color in a terminal, legible on light and dark; the report has colors of its own
    meaning: str  # what is done in it


TEXTS: dict[str, dict[str, Any]] = tomllib.loads(
    resources.files(__package__).joinpath("glossary.toml").read_text(encoding="utf-8")
)
"""The tables of glossary.toml."""
METRICS: Mapping[str, Metric] = {name: Metric(*texts) for name, texts in TEXTS["metrics"].items()}
"""By the name under which the trainer logs it."""
FAMILIES: Mapping[str, Metric] = {prefix: Metric(*texts) for prefix, texts in TEXTS["families"].items()}
"""By the prefix of names that a run chooses, such as those of its reward components."""
PHASES = tuple(Phase(name, *texts) for name, texts in TEXTS["phases"].items())
"""In the order in which a step goes through them."""


def metric_of(name: str) -> Metric | None:
    """Look up a metric by its name, or else by its family; None if it is unknown."""
    family = next((prefix for prefix in FAMILIES if name.startswith(prefix)), None)
    if name in METRICS or family is None:
        return METRICS.get(name)
    of_family = FAMILIES[family]
    return Metric(f"{of_family.label}, {name.removeprefix(family)}", of_family.unit, of_family.meaning)


def phase_seconds(values: Mapping[str, object]) -> dict[str, float]:
    """Extract the seconds of each phase from a step's values: known phases in their order, then any others."""
    found = {
        name.removeprefix(PHASE_PREFIX): seconds
        for name, value in values.items()
        if name.startswith(PHASE_PREFIX) and (seconds := finite_number(value)) is not None
    }
    known = [phase.name for phase in PHASES if phase.name in found]
    return {name: found[name] for name in (*known, *(name for name in found if name not in known))}


def finite_number(value: object) -> float | None:
    """Return `value` if it is a number of magnitude up to 1e300 (beyond that, sums overflow), else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) <= 10**300 else None


def format_value(value: float, unit: str) -> str:
    """Write a number as plain text in a unit; an unknown unit is written as a plain number.

    `bytes` `1.61 MB`, `count` `5.24 k`, `ratio` `1.000002`, `scientific` `3.1e-04`, `score` `0.625`, `seconds`
    `43.0 s`, `share` (a fraction of 1) `91.2 %`.
    """
    if unit in ("bytes", "count"):
        prefixes = ["", "k", "M", "G", "T"]
        while abs(value) >= 999.5 and len(prefixes) > 1:
            value /= 1000
            del prefixes[0]
        digits = f"{value:.0f}" if value == round(value) else f"{value:.3g}"
        name = prefixes[0] + ("B" if unit == "bytes" else "")
        return f"{digits} {name}".rstrip()
    if unit == "ratio":
        return f"{value:.6f}".rstrip("0").rstrip(".")
    if unit == "scientific":
        return f"{value:.1e}" if value else "0"
    if unit == "score":
        return f"{value:.3f}"
    if unit == "seconds":
        return format_duration(value)
    if unit == "share":
        return f"{100 * value:.1f} %"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}" if abs(value) < 1e6 else f"{value:.2e}"


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


_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def typeset_value(value: float, unit: str) -> str:
    """Write a number as a page does, with a true minus sign and raised exponents: `-1.5e-08` is `−1.5·10⁻⁸`."""
    plain = re.sub(
        r"(\.0)?e([+-]?\d+)", lambda match: f"·10{str(int(match[2])).translate(_RAISED)}", format_value(value, unit)
    )
    return plain.replace("-", "−")
