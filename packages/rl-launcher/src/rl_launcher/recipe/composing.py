"""YAML text as values that remember their places.

Knows YAML; does not know files, schemas or which keys exist. Keys are always text, as written. Refuses duplicate
keys, more than one document, tags beyond plain data and anchors which contain themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import yaml

from rl_launcher.recipe.locations import KeyPath, Node, Origin, Scalar, dotted
from rl_launcher.recipe.problems import Problem
from rl_launcher.recipe.yaml_dialect import MERGE_TAG, RecipeLoader, check_collection_tag, scalar, split_lines

At = Callable[[int, int], Origin]  # line and column, counted from 0
_TAB = "found character '\\t' that cannot start any token"


def compose(text: str, at: At) -> tuple[Node | None, list[Problem]]:
    """Read one YAML document; None where it is empty or no YAML."""
    try:
        node = yaml.compose(text, Loader=RecipeLoader)
    except yaml.reader.ReaderError as error:
        return None, [_bad_character(error, text, at)]
    except yaml.MarkedYAMLError as error:
        return None, [_bad_syntax(error, at)]
    if node is None:
        return None, []
    converter = _Converter(at)
    root = converter.convert(node)
    return root, converter.problems


def _bad_character(error: yaml.reader.ReaderError, text: str, at: At) -> Problem:
    before = split_lines(text[: error.position])
    code = error.character if isinstance(error.character, int) else ord(error.character)
    message = f"YAML syntax: character U+{code:04X} is not allowed"
    where = at(len(before) - 1, len(before[-1]))
    return Problem(key="", where=where, message=message, hint="delete it, or write it as an escape in double quotes")


def _bad_syntax(error: yaml.MarkedYAMLError, at: At) -> Problem:
    mark = error.problem_mark or error.context_mark
    where = at(mark.line, mark.column) if mark else at(0, 0)
    what = "; ".join(part for part in (error.problem, error.context) if part)
    hint = "indent with spaces, not tabs" if error.problem == _TAB else "check colons, quotes, brackets and indentation"
    return Problem(key="", where=where, message=f"YAML syntax: {what}", hint=hint)


class _Converter:
    """Turns PyYAML's nodes into ours, collecting what is not allowed."""

    def __init__(self, at: At) -> None:
        self.problems: list[Problem] = []
        self._at = at
        self._open: list[yaml.Node] = []

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
            return scalar(node)
        check_collection_tag(node.tag)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        return [self.convert(item, (*path, index)) for index, item in enumerate(node.value)]

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Node]:
        written: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        first: dict[str, Origin] = {}
        for key_node, value_node in node.value:
            key = self._place(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                message = "a key is a word, not a list or a mapping"
                self._refuse(key, path, message=message, hint="quote it if it is text")
                continue
            name = str(key_node.value)
            if name in first:
                message = f"the key is written twice, first at {first[name]}"
                self._refuse(key, (*path, name), message=message, hint="keep one of them")
                continue
            first[name] = key
            if key_node.tag == MERGE_TAG:
                merged = self._merged(value_node, path)
            else:
                written[name] = replace(self.convert(value_node, (*path, name)), key=key)
        return {**merged, **written}

    def _merged(self, node: yaml.Node, path: KeyPath) -> dict[str, Node]:
        merged: dict[str, Node] = {}
        for source in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            value = self.convert(source, path).value
            if isinstance(value, dict):
                merged = {**value, **merged}  # the first of a list wins
            else:
                message = "`<<` takes a mapping or a list of them"
                self._refuse(self._place(source), path, message=message, hint="write `<<: *name`")
        return merged

    def _place(self, node: yaml.Node) -> Origin:
        return self._at(node.start_mark.line, node.start_mark.column)

    def _refuse(self, where: Origin, path: KeyPath, *, message: str, hint: str) -> None:
        if (where, message) not in [(known.where, known.message) for known in self.problems]:
            # an anchor is read once for each use
            self.problems.append(Problem(key=dotted(path), where=where, message=message, hint=hint))
