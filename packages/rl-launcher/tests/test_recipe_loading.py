"""Recipes that are right: what they load as, and where each value is said to come from."""

import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from rl_launcher.recipe_files import RecipeError, load_recipe

CONFIG: dict[str, object] = {"extra": "forbid"}


class Color(Enum):
    RED = "red"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam:
    __pydantic_config__: ClassVar[dict[str, object]] = CONFIG

    lr: float = 1e-3
    eps: float = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    __pydantic_config__: ClassVar[dict[str, object]] = CONFIG

    name: str = "tiny"
    layers: int = 2
    optimizer: Adam = field(default_factory=lambda: Adam(lr=3e-4))


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    __pydantic_config__: ClassVar[dict[str, object]] = CONFIG

    every: int = 5
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    __pydantic_config__: ClassVar[dict[str, object]] = CONFIG

    policy: Policy = field(default_factory=Policy)
    evaluation: Evaluation | None = None
    tags: list[str] = field(default_factory=list)
    weights: dict[str, float] = field(default_factory=dict)
    on: bool = False
    text: str = ""
    number: float = 0.0
    out: Path = Path("runs")
    color: Color = Color.RED
    kind: Literal["grpo", "dpo"] = "grpo"
    seed: int | str | None = None


def write(directory: Path, text: str, name: str = "recipe.yaml") -> Path:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def load(directory: Path, text: str, *overrides: str) -> Recipe:
    return load_recipe(write(directory, text), schema=Recipe, overrides=overrides).value


@pytest.mark.parametrize(
    ("written", "number"),
    [("1e-3", 1e-3), ("1E3", 1e3), ("-1.5e+2", -150.0), ("3", 3.0), (".5", 0.5), ("5.", 5.0), ("1_000", 1000.0)],
)
def test_every_spelling_of_a_number_is_a_number(tmp_path: Path, written: str, number: float) -> None:
    value = load(tmp_path, f"number: {written}").number
    assert value == number
    assert isinstance(value, float)


def test_infinities_are_numbers(tmp_path: Path) -> None:
    assert load(tmp_path, "number: -.inf").number == -math.inf
    assert math.isnan(load(tmp_path, "number: .nan").number)


@pytest.mark.parametrize("word", ["on", "off", "yes", "No", "2026-01-01", "12:30", "010", "1.2.3", "=", "0b1"])
def test_what_yaml_1_1_would_turn_into_something_else_stays_text(tmp_path: Path, word: str) -> None:
    assert load(tmp_path, f"text: {word}").text == word


def test_keys_are_text_as_written(tmp_path: Path) -> None:
    assert load(tmp_path, "on: true\nweights: {1: 2, no: 3.5}") == Recipe(on=True, weights={"1": 2.0, "no": 3.5})


def test_plain_data_becomes_the_types_of_the_schema(tmp_path: Path) -> None:
    loaded = load(tmp_path, "{out: a/b, color: red, kind: dpo, seed: abc, evaluation: {names: [x, y]}}")
    assert loaded == Recipe(
        out=Path("a/b"), color=Color.RED, kind="dpo", seed="abc", evaluation=Evaluation(names=("x", "y"))
    )


def test_anchors_and_merge_keys_are_plain_yaml(tmp_path: Path) -> None:
    text = "weights: &w {a: 1, b: 2}\npolicy:\n  optimizer: {<<: [{lr: 1}, {lr: 2, eps: 3}], eps: 4}\ntags: &t [x]\n"
    resolved = load_recipe(write(tmp_path, text), schema=Recipe)
    assert resolved.value.policy.optimizer == Adam(lr=1.0, eps=4.0)
    assert str(resolved.origins["policy.optimizer.lr"]).endswith("recipe.yaml:3")


def test_a_partly_written_section_keeps_the_defaults_of_its_place(tmp_path: Path) -> None:
    optimizer = load(tmp_path, "policy: {optimizer: {eps: 1}}").policy.optimizer
    assert optimizer == Adam(lr=3e-4, eps=1.0)  # 3e-4 is the default of `policy.optimizer`, 1e-3 that of `Adam`


def test_what_a_recipe_inherits_merges_deeply(tmp_path: Path) -> None:
    write(
        tmp_path, "policy: {name: a, layers: 1, optimizer: {lr: 1}}\ntags: [a, b]\nevaluation: {every: 1}", "up/a.yaml"
    )
    write(tmp_path, "policy: {name: b}\nweights: {x: 1}\nevaluation: {names: [n]}", "up/b.yaml")
    write(tmp_path, "defaults: [a.yaml, b.yaml]\nweights: {y: 2}", "up/both.yaml")
    loaded = load(tmp_path, "defaults: up/both.yaml\ntags: [c]\npolicy: {optimizer: {eps: 2}}\n")
    assert loaded == Recipe(
        policy=Policy(name="b", layers=1, optimizer=Adam(lr=1.0, eps=2.0)),
        tags=["c"],
        weights={"x": 1.0, "y": 2.0},
        evaluation=Evaluation(every=1, names=("n",)),
    )


def test_null_switches_an_inherited_section_off_and_a_key_on_again(tmp_path: Path) -> None:
    write(tmp_path, "evaluation: {every: 1, names: [a]}", "base.yaml")
    assert load(tmp_path, "defaults: base.yaml\nevaluation: null").evaluation is None
    assert load(tmp_path, "defaults: base.yaml\nevaluation: null", "evaluation.every=7").evaluation == Evaluation(
        every=7
    )


def test_two_recipes_may_share_a_base(tmp_path: Path) -> None:
    write(tmp_path, "text: base", "base.yaml")
    write(tmp_path, "defaults: base.yaml\nseed: 1", "a.yaml")
    write(tmp_path, "defaults: base.yaml\non: true", "b.yaml")
    assert load(tmp_path, "defaults: [a.yaml, b.yaml]") == Recipe(text="base", seed=1, on=True)


def test_overrides_are_yaml_and_the_last_wins(tmp_path: Path) -> None:
    loaded = load(
        tmp_path,
        "tags: [a, b]\nweights: {x: 1}\nevaluation: {every: 1}",
        "tags=[c]",
        "weights={y: 2}",
        "policy.optimizer.lr=1e-5",
        "evaluation=null",
        "text='a=b: c'",
        "seed=1",
        "seed='2'",
    )
    assert loaded == Recipe(
        tags=["c"],
        weights={"x": 1.0, "y": 2.0},
        policy=Policy(optimizer=Adam(lr=1e-5)),
        text="a=b: c",
        seed="2",
    )


def test_environment_variables_fill_strings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECIPE_USER", "ada")
    monkeypatch.delenv("RECIPE_NOBODY", raising=False)
    text = """
text: "${env:RECIPE_USER}-$${env:X}-$${"
tags: ["${env:RECIPE_NOBODY:http://x}", "${env:RECIPE_NOBODY:}"]
out: /scratch/${env:RECIPE_USER}/run
"""
    loaded = load(tmp_path, text)
    assert loaded.text == "ada-${env:X}-${"
    assert loaded.tags == ["http://x", ""]
    assert loaded.out == Path("/scratch/ada/run")


def test_a_variable_is_not_asked_for_where_its_value_is_replaced(tmp_path: Path) -> None:
    assert load(tmp_path, "text: ${env:RECIPE_NOBODY}", "text=x").text == "x"


def test_origins_name_the_line_the_override_or_the_default(tmp_path: Path) -> None:
    base = write(tmp_path, "\npolicy:\n  layers: 3\n", "base.yaml")
    recipe = write(tmp_path, "defaults: base.yaml\n\npolicy:\n  optimizer:\n    eps: 1\n")
    origins = load_recipe(recipe, schema=Recipe, overrides=["policy.name=x", "weights.a=1"]).origins
    assert str(origins["policy.layers"]) == f"{base}:3"
    assert (origins["policy.optimizer.eps"].file, origins["policy.optimizer.eps"].line) == (recipe, 5)
    assert str(origins["policy.name"]) == 'override "policy.name=x"'
    assert origins["weights.a"].override == "weights.a=1"
    assert str(origins["policy.optimizer.lr"]) == "default"
    assert origins["evaluation"].is_default
    assert "evaluation.every" not in origins


def test_the_origin_of_a_value_of_several_lines_is_the_line_of_its_key(tmp_path: Path) -> None:
    origins = load_recipe(write(tmp_path, "seed: 1\ntags:\n\n  - a\n"), schema=Recipe).origins
    assert origins["tags"].line == 2


def test_explain_has_one_aligned_line_for_each_key(tmp_path: Path) -> None:
    path = write(tmp_path, "text: |\n  two\n  lines\nevaluation: {}")
    resolved = load_recipe(path, schema=Recipe, overrides=["tags=[a]"])
    lines = resolved.explain().splitlines()
    assert len(lines) == len(resolved.origins)
    by_key = {line.split()[0]: line for line in lines}
    assert by_key["policy.optimizer.lr"].split()[1:] == ["0.0003", "default"]
    assert by_key["tags"].split() == ["tags", '["a"]', "override", '"tags=[a]"']
    assert by_key["text"].split("  ")[-1] == f"{path}:1"
    assert len({line.index(str(origin)) for line, origin in zip(lines, resolved.origins.values(), strict=True)}) == 1


def test_origins_cannot_be_changed(tmp_path: Path) -> None:
    resolved = load_recipe(write(tmp_path, "seed: 1"), schema=Recipe)
    with pytest.raises(TypeError):
        resolved.origins["seed"] = resolved.origins["on"]  # type: ignore[index]


def test_a_byte_order_mark_is_not_a_key(tmp_path: Path) -> None:
    assert load(tmp_path, "\ufeffseed: 1").seed == 1


def test_a_recipe_may_be_a_dict_of_python_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "text: base\nseed: 1", "base.yaml")
    recipe = {"defaults": "base.yaml", "out": Path("a/b"), "color": Color.RED, "evaluation": Evaluation(names=("x",))}
    resolved = load_recipe(recipe, schema=Recipe)
    assert resolved.value == Recipe(text="base", seed=1, out=Path("a/b"), evaluation=Evaluation(names=("x",)))
    assert str(resolved.origins["out"]) == "Python"
    assert str(resolved.origins["text"]) == "base.yaml:1"


def test_overrides_may_be_python_values_by_dotted_or_nested_keys(tmp_path: Path) -> None:
    path = write(tmp_path, "policy: {name: a, layers: 1}")
    overrides = {"policy": {"layers": 3}, "policy.optimizer.lr": 1e-5, "evaluation": None, "tags": ["x"], "text": "1"}
    resolved = load_recipe(path, schema=Recipe, overrides=overrides)
    assert resolved.value == Recipe(policy=Policy(name="a", layers=3, optimizer=Adam(lr=1e-5)), tags=["x"], text="1")
    assert str(resolved.origins["policy.layers"]) == "Python keyword policy"
    assert str(resolved.origins["policy.optimizer.lr"]) == "Python keyword policy.optimizer.lr"
    assert resolved.origins["policy.name"].file == path


@pytest.mark.parametrize(
    "load_it",
    [lambda given: load_recipe(given, schema=Recipe), lambda given: load_recipe({}, schema=Recipe, overrides=given)],
)
def test_a_python_value_that_is_no_plain_data_is_refused_by_its_key(load_it: Callable[[object], object]) -> None:
    with pytest.raises(RecipeError) as caught:
        load_it({"policy": {"name": print}})
    (problem,) = caught.value.problems
    assert problem.key == "policy.name"
    assert problem.message == "a value of type builtin_function_or_method cannot be written into a recipe"
    assert str(caught.value).startswith("recipe given in Python is refused: 1 problem\nPython")


def test_a_python_override_is_held_to_the_schema_like_a_text(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe({}, schema=Recipe, overrides={"policy.layrs": 3, "": 1})
    assert [str(problem).splitlines()[0] for problem in caught.value.problems] == [
        "Python keyword : '' is not a dotted key",
        "Python keyword policy.layrs: policy.layrs: unknown key in section policy",
    ]


def test_errors_survive_pickling(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, "sed: 1")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)
    assert copy.problems == caught.value.problems
