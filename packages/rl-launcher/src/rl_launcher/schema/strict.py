"""What every section of a recipe shares: unknown keys are refused, and numbers have lower bounds."""

from collections.abc import Mapping
from typing import Any

__all__ = ["STRICT", "refuse_below"]

STRICT: dict[str, object] = {"extra": "forbid", "use_attribute_docstrings": True}


def refuse_below(
    section: object, *, at_least: Mapping[str, float] | None = None, above: Mapping[str, float] | None = None
) -> None:
    """Refuse the first field that is too small; None passes.

    Raises:
        ValueError: naming the field, its value and its bound.
    """
    for bounds, sign in ((at_least or {}, ">="), (above or {}, ">")):
        for name, bound in bounds.items():
            value: Any = getattr(section, name)
            if value is not None and not (value >= bound if sign == ">=" else value > bound):
                raise ValueError(f"{name}={value} must be {sign} {bound}")
