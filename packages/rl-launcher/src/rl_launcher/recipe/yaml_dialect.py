"""The YAML that a recipe is written in: which plain words are numbers, booleans or null.

YAML 1.2's core schema, plus digits grouped by `_` as in Python. Against YAML 1.1, which PyYAML reads by default:
`yes`, `no`, `on`, `off` are text; `1e-3` is a number; `2026-01-01` and `12:30` are text; `010` is text, since
1.1 reads it as 8 and 1.2 as 10. Does not know recipes.

Reference: YAML 1.2.2, chapter 10.3 (https://yaml.org/spec/1.2.2/#103-core-schema).
"""

from __future__ import annotations

import re
import sys

import yaml

from rl_launcher.recipe.locations import Scalar

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
