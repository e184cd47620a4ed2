"""Recipes that cannot be read: files, what they inherit, overrides, references to the environment; and bad schemas."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rl_launcher.recipe_files import Problem, RecipeError, load_recipe
from rl_launcher.schema import Recipe as RealRecipe

CONFIG: dict[str, object] = {"extra": "forbid"}
GOOD = "grpo: {max_num_steps: 3}\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPO:
    __pydantic_config__: ClassVar[dict[str, object]] = CONFIG

    max_num_steps: int
    clip_low: float = 0.2
    shuffle: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    __pydantic_config__: ClassVar[dict[str, object]] = CONFIG

    grpo: GRPO
    tags: list[str] = field(default_factory=list)
    seed: int | None = None


def refused(directory: Path, text: str | bytes, *overrides: str) -> RecipeError:
    path = directory / "recipe.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, schema=Recipe, overrides=overrides)
    return caught.value


def only(error: RecipeError) -> Problem:
    assert len(error.problems) == 1, str(error)
    return error.problems[0]


# -- Files ------------------------------------------------------------------------------------------


def test_a_missing_file_names_the_file_like_it(tmp_path: Path) -> None:
    (tmp_path / "grpo.yaml").write_text(GOOD)
    with pytest.raises(RecipeError, match=rf"there is no file .*gpro.yaml\n    did you mean {tmp_path}/grpo.yaml\?"):
        load_recipe(tmp_path / "gpro.yaml", schema=Recipe)


def test_a_directory_is_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot be read: Is a directory"):
        load_recipe(tmp_path, schema=Recipe)


@pytest.mark.parametrize("text", ["", "# a comment\n", "---\n"])
def test_an_empty_file_is_refused(tmp_path: Path, text: str) -> None:
    message = str(refused(tmp_path, text))
    assert "the file is empty" in message or "this file holds a single value" in message


@pytest.mark.parametrize(("text", "kind"), [("- a\n- b\n", "a list"), ("words\n", "a single value")])
def test_the_root_is_a_mapping(tmp_path: Path, text: str, kind: str) -> None:
    assert f"recipe.yaml:1:1: a recipe is a mapping of keys to values, this file holds {kind}" in str(
        refused(tmp_path, text)
    )


def test_bytes_that_are_no_utf_8_are_named(tmp_path: Path) -> None:
    assert "not UTF-8: byte 0xff at offset 6" in str(refused(tmp_path, b"seed: \xff"))


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("seed: 1\npolicy: [a, b\nseed: 2\n", "2:11", None),
        ("seed: 1\n\tgrpo: 2\n", "2:1", "indent with spaces, not tabs"),
        ("seed: a: b\n", "1:8", "mapping values are not allowed here"),
        ("seed: 1\ntags: a\x07b\n", "2:8", "character U+0007 is not allowed"),
        ("seed: 1\n---\nseed: 2\n", "2:1", "expected a single document"),
        ("seed: *nothing\n", "1:7", "found undefined alias"),
    ],
)
def test_broken_yaml_is_shown_with_line_and_column(tmp_path: Path, text: str, place: str, message: str | None) -> None:
    error = str(refused(tmp_path, text))
    assert message is None or message in error
    assert "YAML syntax: " in error
    line = int(place.split(":", maxsplit=1)[0])
    if message is not None:
        assert f"recipe.yaml:{place}: YAML syntax" in error
        assert f"    {line} | {text.splitlines()[line - 1]}" in error


def test_a_duplicate_key_names_both_places(tmp_path: Path) -> None:
    problem = only(refused(tmp_path, "seed: 1\ngrpo:\n  shuffle: true\n  clip_low: 0\n  shuffle: false\n"))
    assert problem.key == "grpo.shuffle"
    assert (problem.where.line, problem.where.column) == (5, 3)
    assert re.fullmatch(r"the key is written twice, first at .*recipe.yaml:3", problem.message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &a {x: 1, x: 2}\nb: {<<: *a}\nc: *a\n", "1 problem\n"),
        ("seed: !!python/name:os.system ''\n", "a recipe is plain data"),
        ("tags: !!set {a, b}\n", "tag set is not allowed"),
        ("seed: !!int abc\n", "invalid literal"),
        ('tags: ["\\ud800"]\n', "half of a surrogate pair"),
        ("tags: &t [*t]\n", "an anchor contains itself"),
        ("grpo: &g {<<: *g}\n", "an anchor contains itself"),
        ("grpo: {<<: 3}\n", "`<<` takes a mapping"),
        ("? [a, b]\n: 1\n", "a key must be a scalar"),
    ],
)
def test_only_plain_data_is_read(tmp_path: Path, text: str, message: str) -> None:
    assert message in str(refused(tmp_path, text))


# -- Inheritance -----------------------------------------------------------------------------------


def test_a_circle_of_defaults_names_the_chain(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_text("seed: 1\ndefaults: recipe.yaml\n")
    problem = only(refused(tmp_path, "defaults: b.yaml\n"))
    assert problem.message.endswith(
        "in a circle: " + " → ".join(f"{tmp_path}/{x}.yaml" for x in ("recipe", "b", "recipe"))
    )
    assert str(problem.where) == f"{tmp_path / 'b.yaml'}:2"


def test_a_missing_base_names_the_chain(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_text("defaults: [gone.yaml]\n")
    problem = only(refused(tmp_path, "defaults: b.yaml\n"))
    assert problem.message == (
        f"there is no file {tmp_path}/gone.yaml, inherited through "
        f"{tmp_path}/recipe.yaml → {tmp_path}/b.yaml → {tmp_path}/gone.yaml"
    )
    assert str(problem.where) == f"{tmp_path / 'b.yaml'}:1"


@pytest.mark.parametrize("name", ["grpo", "grpo.yaml"])
@pytest.mark.parametrize("own", ["mine.yaml", "grpo.yaml"])
def test_defaults_find_a_shipped_recipe_by_its_name(tmp_path: Path, name: str, own: str) -> None:
    (tmp_path / own).write_text(f"defaults: {name}\ngrpo: {{max_num_steps: 77}}\n")
    resolved = load_recipe(tmp_path / own, schema=RealRecipe)
    assert resolved.value.grpo is not None
    assert resolved.value.grpo.max_num_steps == 77
    assert str(resolved.origins["grpo.num_prompts"]).startswith("shipped grpo.yaml:")


def test_a_file_beside_a_recipe_goes_before_a_shipped_one(tmp_path: Path) -> None:
    (tmp_path / "grpo.yaml").write_text("seed: 5\n")
    (tmp_path / "mine.yaml").write_text("defaults: grpo.yaml\n" + GOOD)
    assert load_recipe(tmp_path / "mine.yaml", schema=Recipe).value.seed == 5


def test_the_hint_of_a_missing_base_never_names_the_recipe_itself(tmp_path: Path) -> None:
    problem = only(refused(tmp_path, "defaults: recipes.yaml\n"))
    assert f"{tmp_path}/recipe.yaml?" not in problem.hint
    assert "rl-launcher recipes copy" in problem.hint
    assert "did you mean the shipped recipe grpo-2node?" in only(refused(tmp_path, "defaults: grpo-2nodes\n")).hint


@pytest.mark.parametrize("value", ["3", "null", "{a: b}", "[a.yaml, 3]"])
def test_defaults_are_paths(tmp_path: Path, value: str) -> None:
    (tmp_path / "a.yaml").write_text("seed: 1\n")
    assert "`defaults` names the recipes to start from, got " in only(refused(tmp_path, f"defaults: {value}")).message


def test_a_wrong_value_points_into_the_base_that_holds_it(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(GOOD + "\nseed: [1]\n")
    assert str(only(refused(tmp_path, "defaults: base.yaml\n")).where) == f"{tmp_path / 'base.yaml'}:3"


# -- Overrides and the environment ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grpo.shuffle", "no `=` in it"),
        ("+grpo.shuffle=true", "'+grpo.shuffle' is not a dotted key"),
        ("grpo..shuffle=true", "'grpo..shuffle' is not a dotted key"),
        ("grpo.shuffle =true", "'grpo.shuffle ' is not a dotted key"),
        ("=true", "'' is not a dotted key"),
        ("grpo.shuffle=", "nothing after the `=`"),
        ("tags=[a", "YAML syntax: "),
        ("grpo={clip_low: 0, clip_low: 0}", "the key is written twice"),
    ],
)
def test_a_malformed_override_is_quoted(tmp_path: Path, text: str, message: str) -> None:
    problem = only(refused(tmp_path, GOOD, text))
    assert message in problem.message
    assert str(problem).startswith(f'override "{text}": ')


def test_an_override_is_held_to_the_schema_like_a_file(tmp_path: Path) -> None:
    problem = only(refused(tmp_path, GOOD, "grpo.max_steps=1"))
    assert str(problem).splitlines()[0] == 'override "grpo.max_steps=1": grpo.max_steps: unknown key in section grpo'
    assert problem.hint.startswith("did you mean grpo.max_num_steps?")
    assert only(refused(tmp_path, GOOD, "grpo.shuffle=1")).message == "given 1, wanted bool"


def test_an_item_of_a_list_cannot_be_overridden(tmp_path: Path) -> None:
    problem = only(refused(tmp_path, GOOD + "tags: [a]", "tags.0=b"))
    assert problem.hint == "a list is replaced as a whole: key=[…]"


def test_a_missing_variable_names_key_line_and_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RECIPE_NOBODY", raising=False)
    problem = only(refused(tmp_path, "seed: 1\ngrpo:\n  max_num_steps: ${env:RECIPE_NOBODY}\n"))
    assert (problem.key, problem.where.line) == ("grpo.max_num_steps", 3)
    assert problem.message == "environment variable RECIPE_NOBODY is not set"
    assert "${env:RECIPE_NOBODY:default}" in problem.hint


@pytest.mark.parametrize("wrong", ["${grpo.max_num_steps}", "${env:}", "${env:A", "${env:A:${env:B}}"])
def test_other_references_are_refused(tmp_path: Path, wrong: str) -> None:
    problem = only(refused(tmp_path, GOOD + f"tags: ['{wrong}']"))
    assert problem.key == "tags.0"
    assert "is not a reference" in problem.message


# -- Schemas ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lax:
    a: int = 1


@dataclass(frozen=True)
class HoldsLax:
    __pydantic_config__: ClassVar[dict[str, object]] = CONFIG

    inner: Lax | None = None


@dataclass(frozen=True)
class HoldsSeveral:
    __pydantic_config__: ClassVar[dict[str, object]] = CONFIG

    inner: dict[str, list[GRPO] | None] = field(default_factory=dict)


@dataclass(frozen=True)
class ClaimsDefaults:
    __pydantic_config__: ClassVar[dict[str, object]] = CONFIG

    defaults: int = 1


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (HoldsLax, "Lax needs __pydantic_config__ = .*'extra': 'forbid'.*, got none"),
        (HoldsSeveral, "HoldsSeveral.inner: a key holds one section"),
        (ClaimsDefaults, "ClaimsDefaults.defaults: recipes inherit through this key"),
        (dict, "a schema is a dataclass"),
    ],
)
def test_a_schema_that_would_let_typos_pass_is_a_fault_of_the_program(
    tmp_path: Path, schema: type[Any], message: str
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("{}")
    with pytest.raises(TypeError, match=message):
        load_recipe(path, schema=schema)
