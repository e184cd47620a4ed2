"""A schema for people and for editors: the reference page in markdown, and a JSON schema.

Knows schemas; does not know recipes.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import TypeAdapter

from rl_launcher.recipe.aliases import aliases_of
from rl_launcher.recipe.annotations import is_section, members, type_text
from rl_launcher.recipe.inheritance import DEFAULTS_KEY
from rl_launcher.recipe.plain_data import to_plain
from rl_launcher.recipe.schema import MISSING, Key, check_schema, descriptions, keys, sections

_DEFAULTS_SCHEMA = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    "description": "Recipes to start from, relative to this file; the later ones win.",
}


def reference(schema: type) -> str:
    """Return a markdown table of every key: dotted key, type, default, first sentence of its docstring."""
    check_schema(schema)
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    lines += [_row(key) for key in keys(schema)]
    return "\n".join(lines) + "\n"


def json_schema(schema: type) -> dict[str, Any]:
    """Return a JSON schema (draft 2020-12) by which an editor completes and checks a recipe.

    No key is required in it, since `defaults` or an override may give what a file leaves out.
    """
    check_schema(schema)
    described = TypeAdapter(schema).json_schema()
    definitions = described.get("$defs", {})
    root = definitions[described["$ref"].rpartition("/")[2]] if "$ref" in described else described
    for part in (root, *definitions.values()):
        part.pop("required", None)
    for section in sections(schema):
        part = root if section is schema else definitions[section.__name__]
        for name, text in descriptions(section).items():
            part["properties"][name].setdefault("description", text)
        for alias, name in aliases_of(section).items():
            part["properties"][alias] = {**part["properties"][name], "description": f"Another name of {name}."}
    root["properties"] = {DEFAULTS_KEY: _DEFAULTS_SCHEMA, **root.get("properties", {})}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **described}


def _row(key: Key) -> str:
    cells = (f"`{key.dotted}`", f"`{type_text(key.annotation)}`", _default(key), key.docstring)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(key: Key) -> str:
    if key.default is MISSING:
        return "required"
    if any(is_section(member) for member in members(key.annotation)) and key.default is not None:
        return "its defaults"
    return f"`{json.dumps(to_plain(key.default), ensure_ascii=False)}`"
