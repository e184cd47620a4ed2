"""Validation of a merged recipe: every problem with its file, line, nearest valid key and remedy.

pydantic names a place by a tuple in which the members of a union appear as extra words; here a place is a key. Of
the members of a union that all failed, the one that fits best is kept. Does not know files or lines.

Knows the schema; does not know the recipe.

Validation is pydantic's for JSON in strict mode: an int may stand for a float and a list for a tuple, but "3" is no
int and 1 is no boolean. Knows schemas and places; does not know where files or overrides come from.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from rl_launcher.recipe_files.dataclass_schema import (
    Annotation,
    choices_of,
    docstrings,
    is_section,
    item,
    key_types,
    keys,
    lay_defaults,
    members,
    origin_of,
    type_text,
)
from rl_launcher.recipe_files.problems import KeyPath, Node, Origin, Problem, dotted, nearest, shorten, similarity

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


_FEW = 10
_FEW_SECTIONS = 20
_CUTOFF = 0.65
_SIBLING_BONUS = 0.1
_YAML_1_1_BOOLEANS = {"yes", "no", "on", "off", "y", "n", "true", "false"}


def unknown_hint(failure: Failure, schema: type) -> str:
    """Return the valid key that resembles the unknown one most, and the section's keys if they are few."""
    if "." in str(failure.path[-1]):
        return "dots join keys in overrides only: in a file, indent the inner key below the outer one"
    parts = []
    meant = _nearest_keys(failure, schema)
    if meant:
        parts.append(f"did you mean {' or '.join(meant)}?")
    siblings = list(key_types(failure.section)) if failure.section is not None else []
    if 0 < len(siblings) <= (_FEW if len(failure.path) > 1 else _FEW_SECTIONS):
        parts.append(f"valid keys here: {', '.join(siblings)}")
    return " ".join(parts) or "remove it"


def missing_hint(failure: Failure) -> str:
    """Return the line to add and what the key means."""
    meaning = described(failure)
    return f"add `{failure.path[-1]}: …` ({type_text(failure.annotation)})" + (f": {meaning}" if meaning else "")


def type_hint(failure: Failure, where: Origin) -> str:
    """Return the likely reason for a value of a wrong type, else what the key means."""
    given, wanted = failure.given, members(failure.annotation)
    if isinstance(given, str):
        return _text_hint(given, wanted) or described(failure)
    if str in wanted and isinstance(given, int | float):
        return "write it in quotes"
    if isinstance(given, float) and int in wanted and given.is_integer():
        return f"write {int(given)}"
    if given is None and any(is_section(member) for member in wanted):
        return "write {} for its defaults, or delete the line"
    if isinstance(given, dict) and where.override and any(origin_of(member) in {list, tuple} for member in wanted):
        return "a list is replaced whole: key=[…]"
    return described(failure)


def described(failure: Failure) -> str:
    """Return the first sentence under the key."""
    name = str(failure.path[-1]) if failure.path else ""
    return docstrings(failure.section).get(name, "") if failure.section is not None else ""


def _text_hint(given: str, wanted: Sequence[Annotation]) -> str:
    like = nearest(given, [str(choice) for member in wanted for choice in choices_of(member)])
    if like:
        return f'did you mean "{like[0]}"?'
    if bool in wanted and given.lower() in _YAML_1_1_BOOLEANS:
        return "write true or false without quotes: in a recipe yes, no, on and off are strings"
    if {int, float} & set(wanted) and re.fullmatch(r"[-+.\d_eE]+", given):
        return "write the number without quotes or leading zeros (an environment variable is always a string)"
    return ""


def _nearest_keys(failure: Failure, schema: type) -> list[str]:
    """Compare the unknown name with the last name of each key, and with the key in full; the same section is ahead.

    Several, at most three, where they are equally near.
    """
    name = str(failure.path[-1])
    siblings = {dotted((*failure.path[:-1], other)) for other in key_types(failure.section or schema)}

    def score(candidate: str) -> float:
        last = similarity(name, candidate.rpartition(".")[2])
        if candidate in siblings:
            return last + _SIBLING_BONUS
        return max(last, similarity(name, candidate))

    scores = {candidate: score(candidate) for candidate in sorted(siblings | {key.dotted for key in keys(schema)})}
    best = max(scores.values())
    return [candidate for candidate in scores if scores[candidate] == best][:3] if best >= _CUTOFF else []


T = TypeVar("T")
_MAX_GIVEN = 60


def validate(recipe: Node, schema: type[T]) -> tuple[T | None, list[Problem]]:
    """Return the configured `schema` and no problem, or None and every problem in the order of the recipe."""
    adapter: TypeAdapter[T] = TypeAdapter(schema)
    attempt = _try(adapter, recipe, schema)
    value, failed = attempt
    if not failed:
        return value, []
    failed += _behind(failed, recipe, adapter=adapter, schema=schema)
    return None, sorted((_problem(failure, recipe, schema) for failure in failed), key=reading_order)


def reading_order(problem: Problem) -> tuple[bool, str, int, int]:
    """Sort by file and line, overrides last."""
    where = problem.where
    return where.override is not None, str(where.file), where.line or 0, where.column or 0


def _behind(failed: Sequence[Failure], recipe: Node, *, adapter: TypeAdapter[T], schema: type) -> list[Failure]:
    """Return the rules that break once wrong keys are taken out; pydantic checks no rule of a section with a wrong key.

    A rule which speaks of a key taken out is left for the next time.
    """
    known = {(failure.path, failure.message) for failure in failed}
    out = [_key_in_mapping(failure) for failure in failed if failure.kind in {"unknown", "type", "other"}]
    for path in out:
        recipe = recipe.without(path)
    names = {str(path[-1]) for path in out if path}
    rules = [failure for failure in _try(adapter, recipe, schema)[1] if failure.kind == "rule"] if out else []
    fresh = [rule for rule in rules if (rule.path, rule.message) not in known]
    return [rule for rule in fresh if not names & set(_words(rule.message))]


def _key_in_mapping(failure: Failure) -> KeyPath:
    """Return the key to take out: the whole list where an item of a list is wrong."""
    if failure.kind == "unknown":
        return failure.path
    return tuple(itertools.takewhile(lambda name: isinstance(name, str), failure.path))


def _try(adapter: TypeAdapter[T], recipe: Node, schema: type) -> tuple[T | None, list[Failure]]:
    data = json.dumps(lay_defaults(schema, recipe).plain())
    try:
        return adapter.validate_json(data, strict=True), []
    except ValidationError as error:
        return None, failures(schema, error)


def _problem(failure: Failure, recipe: Node, schema: type) -> Problem:
    if failure.kind == "rule":
        return _broken_rule(failure, recipe)
    node, written = recipe.nearest(failure.path)
    key = dotted(failure.path)
    if failure.kind == "unknown":
        section = dotted(failure.path[:-1])
        message = f"unknown key in section {section}" if section else "unknown key"
        return Problem(key=key, where=node.key, message=message, hint=unknown_hint(failure, schema))
    if failure.kind == "missing":
        return Problem(key=key, where=node.key, message="required key is missing", hint=missing_hint(failure))
    where = node.where if written else node.key
    if failure.kind == "type":
        message = f"given {_given(failure.given)}, wanted {type_text(failure.annotation)}"
        return Problem(key=key, where=where, message=message, hint=type_hint(failure, where))
    message = f"{failure.message}: given {_given(failure.given)}"
    return Problem(key=key, where=where, message=message, hint=described(failure))


def _broken_rule(failure: Failure, recipe: Node) -> Problem:
    """Place the message of a `__post_init__` at the key that it names first, else at the section."""
    section_node, _ = recipe.nearest(failure.path)
    for name in _named_keys(failure):
        node, written = recipe.nearest((*failure.path, name))
        if written and not node.origin.is_default and failure.section is not None:
            hint = docstrings(failure.section).get(name, "")
            return Problem(key=dotted((*failure.path, name)), where=node.where, message=failure.message, hint=hint)
    return Problem(key=dotted(failure.path), where=section_node.key, message=failure.message)


def _named_keys(failure: Failure) -> Sequence[str]:
    names = key_types(failure.section) if failure.section is not None else {}
    return list(dict.fromkeys(word for word in _words(failure.message) if word in names))


def _words(message: str) -> list[str]:
    return re.findall(r"[A-Za-z_]\w*", message)


def _given(value: object) -> str:
    text = shorten(json.dumps(value, ensure_ascii=False), _MAX_GIVEN)
    kinds: dict[type, str] = {str: "a string", dict: "a section", list: "a list"}
    kind = kinds.get(type(value))
    return f"{text} ({kind})" if kind else text
