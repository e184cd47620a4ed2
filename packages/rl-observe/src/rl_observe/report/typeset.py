"""Numbers as a page sets them: a true minus sign, and powers of ten with raised exponents."""

from __future__ import annotations

import re

from rl_observe.number_format import format_value

__all__ = ["typeset_value"]

_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def typeset_value(value: float, unit: str) -> str:
    """Write a number in one of the units of `glossary.Metric`; `-1.5e-08` becomes `−1.5·10⁻⁸`."""
    plain = re.sub(
        r"(\.0)?e([+-]?\d+)", lambda match: f"·10{str(int(match[2])).translate(_RAISED)}", format_value(value, unit)
    )
    return plain.replace("-", "−")
