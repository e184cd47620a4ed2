"""The reference page and the JSON schema say what the dataclasses say."""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import ClassVar, Literal, Optional

import pytest

from rl_launcher.recipe_files import json_schema, reference

CONFIG: dict[str, object] = {"extra": "forbid"}


class Color(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam:
    __pydantic_config__: ClassVar[dict[str, object]] = CONFIG

    lr: float = 1e-3
    """Size of a step, e.g. 1e-3. Larger learns faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    __pydantic_config__: ClassVar[dict[str, object]] = CONFIG

    steps: int
    """How
    long."""

    then: Optional["Stage"] = None
    """What follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    __pydantic_config__: ClassVar[dict[str, object]] = CONFIG

    name: str | None
    """Of the run."""

    kind: Literal["a", 1, True] = "a"
    color: Color = Color.BLUE
    out: Path = Path("runs")
    betas: tuple[float, ...] = (0.5, 1)
    adam: Adam = field(default_factory=lambda: Adam(lr=2.0))
    """How weights move."""

    other: Adam | None = None
    stage: Stage | None = None
    named: dict[str, float | int] = field(default_factory=dict)


def test_the_reference_has_a_row_for_every_key() -> None:
    assert reference(Recipe).splitlines() == [
        "| key | type | default | meaning |",
        "|---|---|---|---|",
        "| `name` | `str \\| null` | required | Of the run. |",
        '| `kind` | `"a" \\| 1 \\| true` | `"a"` |  |',
        '| `color` | `"red" \\| "blue"` | `"blue"` |  |',
        '| `out` | `path` | `"runs"` |  |',
        "| `betas` | `tuple[float, ...]` | `[0.5, 1]` |  |",
        "| `adam` | `section` | its defaults | How weights move. |",
        "| `adam.lr` | `float` | `2.0` | Size of a step, e.g. 1e-3. |",
        "| `other` | `section \\| null` | `null` |  |",
        "| `other.lr` | `float` | `0.001` | Size of a step, e.g. 1e-3. |",
        "| `stage` | `section \\| null` | `null` |  |",
        "| `stage.steps` | `int` | required | How long. |",
        "| `stage.then` | `section \\| null` | `null` | What follows. |",
        "| `named` | `dict[str, float \\| int]` | `{}` |  |",
    ]


def test_the_json_schema_lets_a_recipe_inherit_what_it_leaves_out() -> None:
    schema = json_schema(Recipe)
    assert schema["$schema"].endswith("2020-12/schema")
    assert next(iter(schema["properties"])) == "defaults"
    assert schema["properties"]["name"]["description"] == "Of the run."
    assert schema["additionalProperties"] is False
    assert "required" not in schema
    assert "required" not in schema["$defs"]["Stage"]
    assert schema["$defs"]["Adam"]["properties"]["lr"]["default"] == 1e-3


def test_a_schema_that_contains_itself_has_a_json_schema_too() -> None:
    assert set(json_schema(Stage)["$defs"]["Stage"]["properties"]) == {"defaults", "steps", "then"}
    assert "| `then` |" in reference(Stage)


@pytest.mark.parametrize("describe", [reference, json_schema])
def test_a_schema_without_rules_is_refused(describe: object) -> None:
    assert callable(describe)
    with pytest.raises(TypeError, match="a schema is a dataclass"):
        describe(int)
