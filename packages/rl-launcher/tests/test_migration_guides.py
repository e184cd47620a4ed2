"""The tables of the migration guides in docs/ name only keys that a recipe has."""

import re
from pathlib import Path

import pytest

from rl_launcher.recipe_files import json_schema
from rl_launcher.schema import Recipe

DOCS = Path(__file__).parents[3] / "docs"
GUIDES = ["from-nemo-rl.md", "from-trl.md", "from-verl.md"]
SECTIONS = ("policy", "data", "env", "evaluation", "cluster", "checkpointing", "health", "logger", "sft", "grpo", "dpo")


def keys_of(schema):
    """Every dotted key of the recipe, sections too."""
    definitions, found = schema["$defs"], set()

    def walk(section, prefix):
        for name, field in section.get("properties", {}).items():
            found.add(prefix + name)
            for reference in re.findall(r"#/\$defs/(\w+)", str(field)):
                walk(definitions[reference], f"{prefix}{name}.")

    walk(schema if "properties" in schema else definitions[schema["$ref"].rpartition("/")[2]], "")
    return found


def named_in(guide):
    """The keys in the right column of each table."""
    rows = [line.split("|") for line in (DOCS / guide).read_text().splitlines() if line.startswith("| ")]
    spans = {span for row in rows for span in re.findall(r"`([a-z_.0-9]+)`", row[-2])}
    return {name for name in spans if name.partition(".")[0] in SECTIONS and "." in name}


@pytest.mark.parametrize("guide", GUIDES)
def test_every_key_that_a_guide_names_exists(guide):
    known = keys_of(json_schema(Recipe))
    named = named_in(guide)
    assert len(named) > 25
    assert sorted(named - known) == []


@pytest.mark.parametrize("guide", GUIDES)
def test_every_key_in_the_prose_of_a_guide_exists(guide):
    known = keys_of(json_schema(Recipe))
    prose = re.sub(r"^\|.*$", "", (DOCS / guide).read_text(), flags=re.MULTILINE)
    named = {name.rstrip(".") for name in re.findall(rf"`((?:{'|'.join(SECTIONS)})\.[a-z_.]+)", prose)}
    assert named
    assert sorted(named - known) == []
