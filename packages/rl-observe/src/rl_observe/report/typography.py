"""Numbers as a page sets them: a true minus, powers of ten with raised exponents.

The plain words are those of `figures`.
"""

from __future__ import annotations

import re

from rl_observe.number_format import format_value

__all__ = ["power_of_ten", "typeset", "typeset_value"]

_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def typeset_value(value: float, unit: str) -> str:
    """Write a number in one of the units of `glossary.Metric`."""
    return typeset(format_value(value, unit))


def typeset(number: str) -> str:
    """Turn `-1.5e-08` into `−1.5·10⁻⁸`."""
    plain = re.sub(r"(\.0)?e([+-]?\d+)", lambda match: f"·{power_of_ten(int(match[2]))}", number)
    return plain.replace("-", "−")


def power_of_ten(exponent: int) -> str:
    """Write `10⁻⁸`."""
    return f"10{str(exponent).translate(_RAISED)}"
