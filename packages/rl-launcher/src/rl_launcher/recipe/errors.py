"""pydantic's errors, told about the keys that people write.

pydantic names a place by a tuple in which the members of a union appear as extra words; here a place is a key. Of
the members of a union that all failed, the one that fits best is kept. Does not know files or lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rl_launcher.recipe.annotations import Annotation, choices_of, is_section, item, key_types, members
from rl_launcher.recipe.locations import KeyPath

_UNKNOWN = {"unexpected_keyword_argument", "extra_forbidden"}
_MISSING = {"missing", "missing_argument", "missing_keyword_only_argument"}
_RULE = {"value_error", "assertion_error"}
_TYPE = {"literal_error", "enum", "int_from_float"}
_LENGTH = {"too_long", "too_short"}

Kind = Literal["unknown", "missing", "rule", "type", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One error of pydantic, placed in the schema."""

    kind: Kind
    path: KeyPath
    """The key, or the section whose rule broke."""

    annotation: Annotation
    """The declared type of what is at `path`."""

    section: type | None
    """The section which holds the key; for a broken rule the section itself."""

    given: object
    message: str
    choices: tuple[tuple[KeyPath, str], ...]
    """Unions passed on the way: where, and which member."""


def failures(schema: type, error: ValidationError) -> list[Failure]:
    """Return every error of pydantic once."""
    placed = [_place(schema, details) for details in error.errors(include_url=False)]
    return _keep_best_members(placed)


def _place(schema: type, details: ErrorDetails) -> Failure:
    path: KeyPath = ()
    here: Annotation = schema
    section: Annotation = None
    declared: Annotation = schema
    choices: list[tuple[KeyPath, str]] = []
    kind = _kind(details)
    short = kind == "missing" and isinstance(details["loc"][-1], int)  # of a tuple: its length is wrong
    for part in details["loc"][: -1 if short else None]:
        possible = members(here)
        if len(possible) > 1:
            choices.append((path, str(part)))
            here = _member(possible, str(part))
            continue
        section = possible[0] if possible else None
        path = (*path, part)
        declared = here = item(section, part)
    if kind == "rule":
        section = next(iter(members(here)), None)
    cause = details.get("ctx", {}).get("error")
    return Failure(
        kind="type" if short else kind,
        path=path,
        annotation=declared,
        section=section if is_section(section) else None,
        given=details["input"],
        message=str(cause) if cause is not None else details["msg"],
        choices=tuple(choices),
    )


def _kind(details: ErrorDetails) -> Kind:
    name = details["type"]
    if name in _UNKNOWN:
        return "unknown"
    if name in _MISSING:
        return "missing"
    if name in _RULE:
        return "rule"
    wrong_length = name in _LENGTH and details.get("ctx", {}).get("field_type") == "Tuple"
    return "type" if wrong_length or name in _TYPE or name.endswith(("_type", "_parsing")) else "other"


def _member(possible: Sequence[Annotation], tag: str) -> Annotation:
    """Return the member of a union that pydantic calls `tag`: by its name, or by the value of its tag field."""
    for member in possible:
        if getattr(member, "__name__", None) == tag:
            return member
        fields = key_types(member).values() if is_section(member) else ()
        if any(tag in map(str, choices_of(field)) for field in fields):
            return member
    return Any


def _keep_best_members(placed: list[Failure]) -> list[Failure]:
    for union in sorted({at for failure in placed for at, _ in failure.choices}, key=len):
        by_member: dict[str, list[Failure]] = {}
        for failure in placed:
            for at, tag in failure.choices:
                if at == union:
                    by_member.setdefault(tag, []).append(failure)
        if by_member:
            best = min(by_member.values(), key=lambda found: _misfit(found, union))
            placed = [f for f in placed if f in best or union not in [at for at, _ in f.choices]]
    return placed


def _misfit(found: Sequence[Failure], union: KeyPath) -> tuple[bool, int]:
    """Order members of a union: those whose very shape is wrong come last, then by the number of errors."""
    return any(failure.path == union and failure.kind == "type" for failure in found), len(found)
