"""Recipe files as YAML values that remember their file and line, with what they inherit.

YAML 1.2's core schema, plus digits grouped by `_` as in Python. Against YAML 1.1, which PyYAML reads by default:
`yes`, `no`, `on`, `off` are text; `1e-3` is a number; `2026-01-01` and `12:30` are text; `010` is text, since
1.1 reads it as 8 and 1.2 as 10. Does not know recipes.

Reference: YAML 1.2.2, chapter 10.3 (https://yaml.org/spec/1.2.2/#103-core-schema).

Knows YAML; does not know files, schemas or which keys exist. Keys are always text, as written. Refuses duplicate
keys, more than one document, tags beyond plain data and anchors which contain themselves.

Knows files; does not know schemas, inheritance or which keys exist.

`defaults: base.yaml`, or a list whose later files win; paths are relative to the file which names them. Mappings
merge, lists and scalars replace, `null` switches off what was there. Does not know schemas.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import yaml

from rl_launcher.recipe_files.problems import KeyPath, Node, Origin, Problem, RecipeError, Scalar, dotted, nearest

_PREFIX = "tag:yaml.org,2002:"
MERGE_TAG = _PREFIX + "merge"
_LINE_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
_INT = r"[-+]?(?:0|[1-9](?:_?[0-9])*)|0x[0-9a-fA-F]+|0o[0-7]+"
_DIGITS = r"[0-9](?:_?[0-9])*"
_EXPONENT = r"[eE][-+]?[0-9]+"
_FLOAT = (
    rf"[-+]?(?:{_DIGITS}\.(?:{_DIGITS})?(?:{_EXPONENT})?|\.{_DIGITS}(?:{_EXPONENT})?|{_DIGITS}{_EXPONENT})"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_RESOLVERS = (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", _INT, "-+0123456789"),
    ("float", _FLOAT, "-+0123456789."),
    ("merge", r"<<", "<"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
)


class RecipeLoader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalars of this dialect; only its composition is used."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  # PyYAML's own name


class RecipeDumper(yaml.SafeDumper):
    """Writes what both this dialect and YAML 1.1 read alike: a text that either takes for a number is quoted."""

    def represent_text(self, data: str) -> yaml.ScalarNode:
        """Write text of several lines with escapes, on one line."""
        return self.represent_scalar(_PREFIX + "str", data, style='"' if len(split_lines(data)) > 1 else None)


for _tag, _pattern, _first in _RESOLVERS:
    for _class in (RecipeLoader, RecipeDumper):
        _class.add_implicit_resolver(_PREFIX + _tag, re.compile(rf"^(?:{_pattern})$"), list(_first))
RecipeDumper.add_representer(str, RecipeDumper.represent_text)


def dump(plain: object) -> str:
    """Return plain data as YAML in the order of its keys, that `RecipeLoader` reads back as equal."""
    return str(yaml.dump(plain, Dumper=RecipeDumper, sort_keys=False, allow_unicode=True, width=sys.maxsize))


def split_lines(text: str) -> list[str]:
    """Cut text where YAML counts a new line."""
    return _LINE_BREAK.split(text)


def scalar(node: yaml.ScalarNode) -> Scalar:
    """Return what a YAML scalar stands for.

    Raises:
        ValueError: for a tag other than those of the core schema, or a text that its tag does not admit.
    """
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


def check_collection_tag(tag: str) -> None:
    """Refuse any collection but a mapping and a list.

    Raises:
        ValueError: naming the tag.
    """
    if tag not in {_PREFIX + "map", _PREFIX + "seq"}:
        raise ValueError(f"tag {tag.removeprefix(_PREFIX)} is not allowed: a recipe is plain data")


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


def read_file(path: Path) -> Node:
    """Read one recipe file, without what it inherits.

    Raises:
        RecipeError: the file is missing, empty, not a mapping or not YAML of this dialect.
    """
    text = _text(path)
    lines = split_lines(text)

    def at(line: int, column: int) -> Origin:
        source = lines[line] if line < len(lines) else ""
        return Origin(file=path, line=line + 1, column=column + 1, source=source)

    root, problems = compose(text, at)
    if root is not None and isinstance(root.value, Mapping) and not problems:
        return replace(root, key=Origin(file=path))
    raise RecipeError(str(path), problems or [_not_a_mapping(root, path)])


def missing_file(path: Path, *, where: Origin) -> Problem:
    """Return the problem of a recipe file that is not there, naming those like it."""
    beside = sorted(str(other) for other in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
    like = nearest(str(path), beside, cutoff=0.7)
    hint = f"did you mean {like[0]}?" if like else f"looked in {path.parent.absolute()}"
    return Problem(key="", where=where, message=f"there is no file {path}", hint=hint)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecipeError(str(path), [missing_file(path, where=Origin(file=path))]) from None
    except UnicodeDecodeError as error:
        message = f"not UTF-8: byte 0x{error.object[error.start]:02x} at offset {error.start}"
        hint = "save the file as UTF-8"
    except OSError as error:
        message, hint = f"cannot be read: {error.strerror}", "give the path of a YAML file"
    raise RecipeError(str(path), [Problem(key="", where=Origin(file=path), message=message, hint=hint)])


def _not_a_mapping(root: Node | None, path: Path) -> Problem:
    hint = "write `key: value` lines"
    if root is None:
        return Problem(key="", where=Origin(file=path), message="the file is empty", hint=hint)
    kind = "a list" if isinstance(root.value, list) else "a single value"
    message = f"a recipe is a mapping of keys to values, this file holds {kind}"
    return Problem(key="", where=root.origin, message=message, hint=hint)


DEFAULTS_KEY = "defaults"


Prepare = Callable[[Node], Node]
"""What is done to each file, and to each override, before it is merged with others."""


def as_written(node: Node) -> Node:
    """Prepare nothing."""
    return node


def read_recipe(path: Path, *, prepare: Prepare = as_written) -> Node:
    """Read a recipe with everything that it inherits.

    Raises:
        RecipeError: a file is missing or unreadable, or a file inherits itself; the chain of files is named.
    """
    return _read(path, chain=(), prepare=prepare)


def merge(base: Node, over: Node) -> Node:
    """Return `base` with what `over` writes: mappings merge, anything else replaces."""
    if not isinstance(base.value, Mapping) or not isinstance(over.value, Mapping):
        return over
    children = dict(base.value)
    for name, child in over.value.items():
        children[name] = merge(children[name], child) if name in children else child
    place = base if over.origin.override is not None else over  # an override of one key does not move its section
    return replace(place, value=children)


def _read(path: Path, *, chain: tuple[Path, ...], prepare: Prepare) -> Node:
    chain = (*chain, path)
    written = prepare(read_file(path))
    assert isinstance(written.value, Mapping)
    own = replace(written, value={name: child for name, child in written.value.items() if name != DEFAULTS_KEY})
    declaration = written.value.get(DEFAULTS_KEY)
    if declaration is None:
        return own
    merged: Node | None = None
    for name_node in _names(declaration, chain):
        parent = path.parent / str(name_node.value)
        _check_link(parent, name_node, chain)
        inherited = _read(parent, chain=chain, prepare=prepare)
        merged = inherited if merged is None else merge(merged, inherited)
    return own if merged is None else merge(merged, own)


def _names(declaration: Node, chain: tuple[Path, ...]) -> list[Node]:
    names = list(declaration.value) if isinstance(declaration.value, list) else [declaration]
    if all(isinstance(name.value, str) and name.value for name in names):
        return names
    message = f"`defaults` names the recipes to start from, got {declaration.plain()!r}"
    raise _refusal(declaration, chain, message=message, hint="write `defaults: base.yaml` or a list of paths")


def _check_link(parent: Path, name: Node, chain: tuple[Path, ...]) -> None:
    resolved = parent.resolve()
    if resolved in [link.resolve() for link in chain]:
        message = f"recipes inherit one another in a circle: {_arrows((*chain, parent))}"
        raise _refusal(name, chain, message=message, hint="remove one of these `defaults`")
    if not resolved.is_file():
        problem = missing_file(parent, where=name.where)
        message = f"{problem.message}, inherited through {_arrows((*chain, parent))}"
        raise _refusal(name, chain, message=message, hint=problem.hint)


def _refusal(node: Node, chain: tuple[Path, ...], *, message: str, hint: str) -> RecipeError:
    return RecipeError(str(chain[0]), [Problem(key=DEFAULTS_KEY, where=node.where, message=message, hint=hint)])


def _arrows(chain: tuple[Path, ...]) -> str:
    return " → ".join(str(link) for link in chain)
