"""Validation of a merged recipe: every problem with its place, the nearest valid key and the remedy.

pydantic validates the recipe as JSON in strict mode: an int may stand for a float and a list for a tuple, but "3" is
not an int and 1 is not a boolean. Its errors are then placed: pydantic names a place by a tuple in which the members of
a union appear as extra entries; a `Failure` has the key, and a `Problem` the file and line.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import yaml
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
    section_of,
    type_text,
)
from rl_launcher.recipe_files.nodes import Node, leaves
from rl_launcher.recipe_files.problems import KeyPath, Problem, dotted, nearest, reading_order, shorten, similarity

T = TypeVar("T")
_MAX_GIVEN = 60
_MAX_LISTED_KEYS = {"root": 20, "section": 10}
_MAX_HINTS = 5
_CUTOFF = 0.65
_SIBLING_BONUS = 0.1
_YAML_1_1_BOOLEANS = {"yes", "no", "on", "off", "y", "n", "true", "false"}


def validate(recipe: Node, schema: type[T]) -> tuple[T | None, list[Problem]]:
    """Return the configured `schema` and no problem, or None and every problem in the order of the recipe."""
    adapter: TypeAdapter[T] = _adapter(schema)  # type: ignore[arg-type]  # a class is hashable
    attempt = _try(adapter, recipe, schema)
    value, failed = attempt
    if not failed:
        return value, []
    # pydantic checks no rule of a section that has a wrong key, so the wrong keys are taken out and it is asked again.
    # A rule that speaks of a key that was taken out is left for the next time.
    out = [_key_to_remove(failure) for failure in failed if failure.kind in {"unknown", "type", "other"}]
    rest = recipe
    for path in out:
        rest = rest.with_value(path, None)
    names = {str(path[-1]) for path in out}
    known = {(failure.path, failure.message) for failure in failed}
    for rule in _try(adapter, rest, schema)[1] if out else []:
        is_new = rule.kind == "rule" and (rule.path, rule.message) not in known
        if is_new and not names & set(re.findall(r"[A-Za-z_]\w*", rule.message)):
            failed.append(rule)
    return None, sorted((_problem(failure, recipe, schema) for failure in failed), key=reading_order)


@functools.cache
def _adapter(schema: type) -> TypeAdapter[Any]:
    return TypeAdapter(schema)  # which takes a second for all sections of a recipe


# -- pydantic's errors, placed in the schema --------------------------------------------------------

Kind = Literal["unknown", "missing", "rule", "type", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One error of pydantic, placed in the schema."""

    kind: Kind
    path: KeyPath
    """The key, or the section whose rule is broken."""

    annotation: Annotation
    """The declared type of the value at `path`."""

    section: type | None
    """The section that holds the key; for a broken rule the section itself."""

    given: object
    message: str
    union: tuple[KeyPath, str] | None
    """The union that was tried: where it is, and which of its members this error is about."""


def _try(adapter: TypeAdapter[T], recipe: Node, schema: type) -> tuple[T | None, list[Failure]]:
    try:
        return adapter.validate_json(json.dumps(lay_defaults(schema, recipe).plain()), strict=True), []
    except ValidationError as error:
        placed = [_place(schema, details) for details in error.errors(include_url=False)]
    # Of the members of a union that all failed, keep the one that got deepest: the shape of the others is wrong.
    best: dict[KeyPath, Failure] = {}
    for failure in placed:
        if failure.union and len(failure.path) > len(best.setdefault(failure.union[0], failure).path):
            best[failure.union[0]] = failure
    return None, [each for each in placed if each.union is None or best[each.union[0]].union == each.union]


def _place(schema: type, details: ErrorDetails) -> Failure:
    kind = _kind(details)
    location = details["loc"]
    if kind == "missing" and isinstance(location[-1], int):  # a tuple is too short: the tuple is wrong, not its item
        kind, location = "type", location[:-1]
    path: KeyPath = ()
    here: Annotation = schema  # the type in which the next name is looked up
    declared: Annotation = schema
    section: type | None = None
    union: tuple[KeyPath, str] | None = None
    for part in location:
        possible = members(here)
        if len(possible) > 1:  # pydantic names the member here; only one of them can hold items
            union = (path, str(part))
            here = next((member for member in possible if typing.get_args(member)), Any)
            continue
        section = section_of(here)
        path = (*path, part)
        declared = here = item(section or next(iter(possible), Any), part)
    cause = details.get("ctx", {}).get("error")
    return Failure(
        kind=kind,
        path=path,
        annotation=declared,
        section=section_of(here) if kind == "rule" else section,
        given=details["input"],
        message=str(cause) if cause is not None else details["msg"],
        union=union,
    )


def _kind(details: ErrorDetails) -> Kind:
    name = details["type"]
    if name in {"unexpected_keyword_argument", "extra_forbidden"}:
        return "unknown"
    if name in {"missing", "missing_argument", "missing_keyword_only_argument"}:
        return "missing"
    if name in {"value_error", "assertion_error"}:
        return "rule"
    wrong_length = name in {"too_long", "too_short"} and details.get("ctx", {}).get("field_type") == "Tuple"
    is_type = name in {"literal_error", "enum", "int_from_float"} or name.endswith(("_type", "_parsing"))
    return "type" if wrong_length or is_type else "other"


def _key_to_remove(failure: Failure) -> KeyPath:
    """Return the wrong key; the whole list if an item of a list is wrong."""
    if failure.kind == "unknown":
        return failure.path
    return tuple(itertools.takewhile(lambda name: isinstance(name, str), failure.path))


# -- Failures as problems with file, line and remedy ------------------------------------------------


def _problem(failure: Failure, recipe: Node, schema: type) -> Problem:
    if failure.kind == "rule":
        return _broken_rule(failure, recipe)
    node, written = recipe.find(failure.path)
    key = dotted(failure.path)
    if failure.kind == "unknown":
        section = dotted(failure.path[:-1])
        message = f"unknown key in section {section}" if section else "unknown key"
        return Problem(key=key, where=node.key, message=message, hint=_unknown_hint(failure, recipe, schema))
    meaning = docstrings(failure.section).get(str(failure.path[-1]), "") if failure.section and failure.path else ""
    if failure.kind == "missing":
        hint = f"add `{failure.path[-1]}: …` ({type_text(failure.annotation)})" + (f": {meaning}" if meaning else "")
        return Problem(key=key, where=node.key, message="required key is missing", hint=hint)
    where = node.where if written else node.key
    kinds: dict[type, str] = {str: " (a string)", dict: " (a section)", list: " (a list)"}
    given = shorten(json.dumps(failure.given, ensure_ascii=False), _MAX_GIVEN) + kinds.get(type(failure.given), "")
    if failure.kind == "type":
        message = f"given {given}, wanted {type_text(failure.annotation)}"
        hint = _type_hint(failure.given, members(failure.annotation), overridden=where.override is not None)
        return Problem(key=key, where=where, message=message, hint=hint or meaning)
    return Problem(key=key, where=where, message=f"{failure.message}: given {given}", hint=meaning)


def _broken_rule(failure: Failure, recipe: Node) -> Problem:
    """Place the message of a `__post_init__` at a key that it names and somebody wrote, else at the section.

    A key may be named in full, as in `optimizer.warmup_steps=3`. The first one counts, but an override before a file.
    """
    named: list[tuple[KeyPath, Node, str]] = []
    for name in dict.fromkeys(re.findall(r"[A-Za-z_]\w*(?:\.\w+)*", failure.message)):
        section, leaf = failure.section, name.split(".")
        for part in leaf[:-1]:
            section = section_of(key_types(section).get(part, Any)) if section else None
        node, written = recipe.find((*failure.path, *leaf))
        if section and leaf[-1] in key_types(section) and written and not node.origin.is_default:
            named.append(((*failure.path, *leaf), node, docstrings(section).get(leaf[-1], "")))
    if not named:
        node, _ = recipe.find(failure.path)
        return Problem(key=dotted(failure.path), where=node.key, message=failure.message)
    path, node, meaning = min(named, key=lambda each: each[1].origin.override is None)
    return Problem(key=dotted(path), where=node.where, message=failure.message, hint=meaning)


def _type_hint(given: object, wanted: Sequence[Annotation], *, overridden: bool) -> str:
    """Return the likely reason for a value of a wrong type, if there is one."""
    text = given if isinstance(given, str) else ""
    like = nearest(text, [str(choice) for member in wanted for choice in choices_of(member)]) if text else []
    hint = ""
    if like:
        hint = f'did you mean "{like[0]}"?'
    elif bool in wanted and text.lower() in _YAML_1_1_BOOLEANS:
        hint = "write true or false without quotes: in a recipe yes, no, on and off are strings"
    elif {int, float} & set(wanted) and re.fullmatch(r"[-+.\d_eE]+", text):
        hint = "write the number without quotes or leading zeros (an environment variable is always a string)"
    elif str in wanted and isinstance(given, int | float):
        hint = "write it in quotes"
    elif isinstance(given, float) and int in wanted and given.is_integer():
        hint = f"write {int(given)}"
    elif given is None and any(is_section(member) for member in wanted):
        hint = "write {} for its defaults, or delete the line"
    elif isinstance(given, dict) and overridden and any(origin_of(each) in {list, tuple} for each in wanted):
        hint = "a list is replaced as a whole: key=[…]"
    return hint


def _unknown_hint(failure: Failure, recipe: Node, schema: type) -> str:
    """Return the valid key that was probably meant, and the keys of the section if they are few."""
    if "." in str(failure.path[-1]):
        return "dots join keys in overrides only: in a file, indent the inner key below the outer one"
    if foreign := _foreign_hint(failure, recipe, schema):
        return foreign
    parts = []
    if meant := _nearest_keys(failure, schema):
        parts.append(f"did you mean {' or '.join(meant)}?")
    siblings = list(key_types(failure.section)) if failure.section is not None else []
    if 0 < len(siblings) <= _MAX_LISTED_KEYS["root" if len(failure.path) == 1 else "section"]:
        parts.append(f"valid keys here: {', '.join(siblings)}")
    return " ".join(parts) or "remove it"


def _nearest_keys(failure: Failure, schema: type) -> list[str]:
    """Return up to three keys whose last name, or full name, resembles the unknown one; the same section is ahead."""
    name = str(failure.path[-1])
    siblings = {dotted((*failure.path[:-1], other)) for other in key_types(failure.section or schema)}
    scores = {}
    for candidate in sorted(siblings | {key.dotted for key in keys(schema)}):
        last = similarity(name, candidate.rpartition(".")[2])
        scores[candidate] = last + _SIBLING_BONUS if candidate in siblings else max(last, similarity(name, candidate))
    best = max(scores.values())
    return [candidate for candidate in scores if scores[candidate] == best][:3] if best >= _CUTOFF else []


def _foreign_hint(failure: Failure, recipe: Node, schema: type) -> str:
    """Answer keys of other trainers from the table that the schema names in `foreign_keys`, a YAML file.

    The table maps a key of theirs, or the end of one, to ours: a key, a list of keys, or `{keys: …, advice: …}`. `*` in
    a key of ours is any section: the one that the key was written in, else those that the recipe has, else all.
    """
    if (table := getattr(schema, "foreign_keys", None)) is None:
        return ""
    entries = yaml.safe_load(table.read_text(encoding="utf-8"))
    valid = [key.dotted for key in keys(schema)]
    present = {name for name, node in recipe.children() if node.value is not None}
    hints = []
    for path, _ in leaves(failure.given, failure.path):
        ends = (dotted(path[start:]) for start in range(len(path)))
        if (entry := next((entries[end] for end in ends if end in entries), None)) is None:
            continue
        entry = entry if isinstance(entry, dict) else {"keys": entry}
        meant = []
        for pattern in [entry["keys"]] if isinstance(entry["keys"], str) else entry["keys"]:
            found = [key for key in valid if re.fullmatch(re.escape(pattern).replace(r"\*", r"\w+"), key)]
            here = [key for key in found if key.split(".")[0] == path[0]]
            meant.append(" or ".join(here or [key for key in found if key.split(".")[0] in present] or found))
        hint = f"did you mean {' and '.join(meant)}? {entry.get('advice', '')}".rstrip()
        hints.append(hint if path == failure.path else f"{dotted(path)}: {hint}")
    return "\n    ".join(hints[:_MAX_HINTS])
