"""Values that are one of a few, and numbers that are numbers, refused by name. Knows annotations, no configuration.

Nothing in Python minds `KLConfig(place="rewards")`: every `==` then takes its other branch, and the loss has no KL. So
each config asks for `check_fields(self)` first, and functions for `check_choice`.
"""

import dataclasses
import difflib
import math
import numbers
import types
import typing
from collections.abc import Collection, Mapping

__all__ = ["check_choice", "check_choices", "check_fields"]


def check_choice(name: str, value: object, literal: typing.Any) -> None:
    """Refuse a value that `literal`, a Literal or a union of some and None, does not hold; take any other annotation.

    Raises:
        ValueError: naming the argument, its value, the allowed ones and the nearest of them.
    """
    allowed = _allowed(literal)
    if allowed is None or value in allowed:
        return
    near = difflib.get_close_matches(str(value), [str(choice) for choice in allowed], n=1, cutoff=0.5)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, allowed))}{meant}")


def check_choices(config: object) -> None:
    """Refuse a value of a dataclass's field whose annotation is a Literal that does not hold it.

    Raises:
        ValueError: as `check_choice`.
    """
    for name, annotation in _annotations(config).items():
        check_choice(name, getattr(config, name), annotation)


def check_fields(
    config: object,
    *,
    at_least: Mapping[str, int] = types.MappingProxyType({}),
    above: Mapping[str, int] = types.MappingProxyType({}),
    infinite: Collection[str] = (),
) -> None:
    """Refuse choices that are none, counts that are not whole, numbers that are not finite, and those out of bounds.

    Args:
        config: a dataclass; its annotations say what is a choice, a count, a number or a bool.
        at_least: the least value of some of its fields; None has no bound.
        above: what values of some fields must be greater than; None has no bound.
        infinite: fields that may be infinite; none may be NaN.

    Raises:
        ValueError: naming the field and its value.
    """
    check_choices(config)
    for name, annotation in _annotations(config).items():
        _check_kind(name, getattr(config, name), annotation, infinite=name in infinite)
    for name, least in at_least.items():
        if (value := getattr(config, name)) is not None and not value >= least:
            raise ValueError(f"{name}={value} must be >= {least}")
    for name, bound in above.items():
        if (value := getattr(config, name)) is not None and not value > bound:
            raise ValueError(f"{name}={value} must be > {bound}")


def _check_kind(name: str, value: object, annotation: object, *, infinite: bool) -> None:
    if isinstance(value, Mapping) and len(typing.get_args(annotation)) == len(("key", "value")):
        for key, item in value.items():
            _check_kind(f"{name}[{key!r}]", item, typing.get_args(annotation)[1], infinite=infinite)
    elif isinstance(value, tuple) and typing.get_origin(annotation) is tuple:
        for index, item in enumerate(value):
            _check_kind(f"{name}[{index}]", item, typing.get_args(annotation)[0], infinite=infinite)
    elif not _is_of(value, _members(annotation), infinite=infinite):
        raise ValueError(f"{name}={value!r} must be {_described(_members(annotation), infinite=infinite)}")


def _is_of(value: object, members: tuple[object, ...], *, infinite: bool) -> bool:
    """Whether a value is of a bool's, a count's or a number's kind; of other kinds nothing is asked."""
    kinds = set(members) - {types.NoneType}
    if (value is None and types.NoneType in members) or kinds not in ({bool}, {int}, {float}):
        return True
    if isinstance(value, bool) or kinds == {bool}:
        return isinstance(value, bool) and kinds == {bool}
    if kinds == {int}:
        return isinstance(value, numbers.Integral)
    return isinstance(value, numbers.Real) and (math.isfinite(value) or (infinite and not math.isnan(value)))


def _described(members: tuple[object, ...], *, infinite: bool) -> str:
    if float in members:
        return "a number, infinity included" if infinite else "a finite number"
    return "true or false" if bool in members else "a whole number"


def _annotations(config: typing.Any) -> dict[str, object]:
    hints = typing.get_type_hints(type(config))
    return {each.name: hints[each.name] for each in dataclasses.fields(config)}


def _allowed(annotation: object) -> tuple[object, ...] | None:
    """What a Literal, or a union of Literals and None, holds; None of any other annotation."""
    members = _members(annotation)
    literals = [member for member in members if typing.get_origin(member) is typing.Literal]
    rest = [member for member in members if member not in literals and member is not types.NoneType]
    if rest or not literals:
        return None
    none = (None,) if types.NoneType in members else ()
    return tuple(choice for literal in literals for choice in typing.get_args(literal)) + none


def _members(annotation: object) -> tuple[object, ...]:
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if union else (annotation,)
