"""Checks that every configuration makes: text that must be one of a few values, numbers that must be finite."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin


def check_choices(config: Any) -> None:
    """Every field that is annotated as a `Literal` has one of its values."""
    for field in fields(config):
        value, allowed = getattr(config, field.name), list(_allowed(field.type))
        if allowed and not any(value is each or (type(value) is type(each) and value == each) for each in allowed):
            names = {each.lower(): each for each in allowed if isinstance(each, str)}
            near = get_close_matches(str(value).lower(), names, n=1, cutoff=0.4)
            hint = f": {names[near[0]]!r} is the nearest" if near else ""
            raise ValueError(f"{field.name}={value!r} must be one of {', '.join(map(repr, allowed))}{hint}")


def check_finite(config: Any) -> None:
    """Every float, also in a tuple, is a finite number."""
    for field in fields(config):
        value = getattr(config, field.name)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                raise ValueError(f"{field.name}={value} must be finite")


BOUNDS: Mapping[str, Callable[[float], bool]] = {
    "> 0": lambda value: value > 0,
    ">= 0": lambda value: value >= 0,
    ">= 1": lambda value: value >= 1,
}


def out_of_bounds(config: Any, bounds: Mapping[str, str]) -> Iterator[str]:
    """What to say of numbers outside of their bounds; a field that may be None has none then.

    bounds: "> 0", ">= 0" or ">= 1" -> names of fields, with spaces between them.
    """
    optional = {field.name for field in fields(config) if type(None) in get_args(field.type)}
    for bound, names in bounds.items():
        for name in names.split():
            value = getattr(config, name)
            if value is not None and not BOUNDS[bound](value):
                yield f"{name}={value} must be {bound}{', or None' if name in optional else ''}"


def refuse(problems: Iterable[str]) -> None:
    """One ValueError for all that is wrong, not one a try."""
    if found := list(problems):
        raise ValueError("; ".join(found))


def _allowed(annotation: Any) -> Iterator[Any]:
    """The values of a Literal, and None beside one; nothing of an annotation without a Literal."""
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif any(get_origin(part) is Literal for part in get_args(annotation)):
        for part in get_args(annotation):
            yield from (None,) if part is type(None) else _allowed(part)
