"""A merged recipe against its schema: the configured dataclass, or every problem with its line and the way out.

Validation is pydantic's for JSON in strict mode: an int may stand for a float and a list for a tuple, but "3" is no
int and 1 is no boolean. Knows schemas and places; does not know where files or overrides come from.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from rl_launcher.recipe.annotations import key_types, type_text
from rl_launcher.recipe.errors import Failure, failures
from rl_launcher.recipe.hints import described, missing_hint, type_hint, unknown_hint
from rl_launcher.recipe.locations import KeyPath, Node, dotted
from rl_launcher.recipe.plain_data import lay_defaults
from rl_launcher.recipe.problems import Problem, shorten
from rl_launcher.recipe.schema import docstrings

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
