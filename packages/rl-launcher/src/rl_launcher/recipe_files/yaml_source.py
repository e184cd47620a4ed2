"""Recipes as YAML: `compose` reads text into nodes with line and column, `dump` writes plain data.

The dialect is YAML 1.2's core schema (https://yaml.org/spec/1.2.2/#103-core-schema), plus digits grouped by `_` as in
Python. PyYAML alone reads YAML 1.1. The differences: `yes`, `no`, `on`, `off` are text; `1e-3` is a number;
`2026-01-01` and `12:30` are text; `010` is text, since 1.1 reads it as 8 and 1.2 as 10. Keys are always text. Duplicate
keys, several documents, tags beyond plain data and anchors that contain themselves are refused.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace

import yaml

from rl_launcher.recipe_files.nodes import Node, Scalar
from rl_launcher.recipe_files.problems import KeyPath, Origin, Problem, dotted

At = Callable[[int, int], Origin]
"""The origin of a line and a column, counted from 0."""

_PREFIX = "tag:yaml.org,2002:"
_LINE_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
_DIGITS = r"[0-9](?:_?[0-9])*"
_EXPONENT = r"[eE][-+]?[0-9]+"
_FLOAT = (
    rf"[-+]?(?:{_DIGITS}\.(?:{_DIGITS})?(?:{_EXPONENT})?|\.{_DIGITS}(?:{_EXPONENT})?|{_DIGITS}{_EXPONENT})"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_RESOLVERS = (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(?:0|[1-9](?:_?[0-9])*)|0x[0-9a-fA-F]+|0o[0-7]+", "-+0123456789"),
    ("float", _FLOAT, "-+0123456789."),
    ("merge", r"<<", "<"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
)


class RecipeLoader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalars of this dialect; only its node composition is used."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  # PyYAML's own name


class RecipeDumper(yaml.SafeDumper):
    """Writes what YAML 1.1 and this dialect read alike: a text that either takes for a number is quoted."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Text of several lines is written with escapes, on one line.
    return dumper.represent_scalar(_PREFIX + "str", text, style='"' if _LINE_BREAK.search(text) else None)


for _tag, _pattern, _first in _RESOLVERS:
    for _class in (RecipeLoader, RecipeDumper):
        _class.add_implicit_resolver(_PREFIX + _tag, re.compile(rf"^(?:{_pattern})$"), list(_first))
RecipeDumper.add_representer(str, _represent_text)


def dump(plain: object) -> str:
    """Return plain data as YAML in the order of its keys; `compose` reads it back as equal."""
    return str(yaml.dump(plain, Dumper=RecipeDumper, sort_keys=False, allow_unicode=True, width=sys.maxsize))


def split_lines(text: str) -> list[str]:
    """Split text where YAML starts a new line."""
    return _LINE_BREAK.split(text)


def compose(text: str, at: At) -> tuple[Node | None, list[Problem]]:
    """Read one YAML document; None if it is empty or cannot be parsed."""
    try:
        node = yaml.compose(text, Loader=RecipeLoader)
    except yaml.reader.ReaderError as error:
        before = split_lines(text[: error.position])
        code = error.character if isinstance(error.character, int) else ord(error.character)
        where = at(len(before) - 1, len(before[-1]))
        hint = "delete it, or write it as an escape in double quotes"
        return None, [_syntax(where, f"character U+{code:04X} is not allowed", hint)]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = at(mark.line, mark.column) if mark else at(0, 0)
        tab = error.problem == "found character '\\t' that cannot start any token"
        hint = "indent with spaces, not tabs" if tab else "check colons, quotes, brackets and indentation"
        return None, [_syntax(where, "; ".join(part for part in (error.problem, error.context) if part), hint)]
    if node is None:
        return None, []
    converter = _Converter(at)
    return converter.convert(node), converter.problems


def _syntax(where: Origin, message: str, hint: str) -> Problem:
    return Problem(key="", where=where, message=f"YAML syntax: {message}", hint=hint)


class _Converter:
    """Turns PyYAML's nodes into `Node`, collecting what is not allowed."""

    def __init__(self, at: At) -> None:
        self.problems: list[Problem] = []
        self._at = at
        self._open: list[yaml.Node] = []  # from the root to the node at hand; to find anchors that contain themselves

    def convert(self, node: yaml.Node, path: KeyPath = ()) -> Node:
        origin = self._place(node)
        leaf = Node(value=None, origin=origin, key=origin)
        if any(node is outer for outer in self._open):
            self._refuse(origin, path, message="an anchor contains itself", hint="write the value out")
            return leaf
        self._open.append(node)
        try:
            return replace(leaf, value=self._value(node, path))
        except ValueError as error:
            self._refuse(origin, path, message=str(error), hint="write a plain value")
            return leaf
        finally:
            self._open.pop()

    def _value(self, node: yaml.Node, path: KeyPath) -> Scalar | dict[str, Node] | list[Node]:
        if isinstance(node, yaml.ScalarNode):
            return _scalar(node)
        if node.tag not in {_PREFIX + "map", _PREFIX + "seq"}:
            raise ValueError(f"tag {node.tag.removeprefix(_PREFIX)} is not allowed: a recipe is plain data")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        return [self.convert(item, (*path, index)) for index, item in enumerate(node.value)]

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Node]:
        written: dict[str, Node] = {}
        merged: dict[str, Node] = {}  # what `<<` brings in; keys of the mapping itself win
        first: dict[str, Origin] = {}
        for key_node, value_node in node.value:
            key = self._place(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                message = "a key must be a scalar, not a list or a mapping"
                self._refuse(key, path, message=message, hint="quote it if it is text")
                continue
            name = str(key_node.value)
            if name in first:
                message = f"the key is written twice, first at {first[name]}"
                self._refuse(key, (*path, name), message=message, hint="keep one of them")
                continue
            first[name] = key
            if key_node.tag != _PREFIX + "merge":
                written[name] = replace(self.convert(value_node, (*path, name)), key=key)
                continue
            for source in value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]:
                value = self.convert(source, path).value
                if isinstance(value, dict):
                    merged = {**value, **merged}  # the first of a list wins
                else:
                    message = "`<<` takes a mapping or a list of them"
                    self._refuse(self._place(source), path, message=message, hint="write `<<: *name`")
        return {**merged, **written}

    def _place(self, node: yaml.Node) -> Origin:
        return self._at(node.start_mark.line, node.start_mark.column)

    def _refuse(self, where: Origin, path: KeyPath, *, message: str, hint: str) -> None:
        # An anchor is converted once for each use, and its problems are reported once.
        if (where, message) not in [(known.where, known.message) for known in self.problems]:
            self.problems.append(Problem(key=dotted(path), where=where, message=message, hint=hint))


def _scalar(node: yaml.ScalarNode) -> Scalar:
    """Return the value of a YAML scalar; ValueError for a tag outside the core schema or a text it does not fit."""
    text = str(node.value)
    match node.tag.removeprefix(_PREFIX):
        case "str" | "merge":
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise ValueError("half of a surrogate pair is not a character")
            return text
        case "null":
            return None
        case "bool" if text.lower() in {"true", "false"}:
            return text.lower() == "true"
        case "int":
            return int(text, base=0)
        case "float":
            return float(re.sub(r"\.(?=[a-z])", "", text.lower()))
        case tag:
            raise ValueError(f"tag {tag} is not allowed for {text!r}: a recipe is plain data")
