"""What is said of a wrong key or value, and where it points."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from rl_launcher.recipe_files import Problem, RecipeError, load_recipe

CONFIG: dict[str, object] = {"extra": "forbid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam:
    __pydantic_config__: ClassVar[dict[str, object]] = CONFIG

    learning_rate: float = 1e-3
    """Size of a step. More follows."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    __pydantic_config__: ClassVar[dict[str, object]] = CONFIG

    model_name: str
    """Directory or name of the model. More follows."""

    precision: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the weights."""

    optimizer: Adam = field(default_factory=Adam)
    """How weights move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPO:
    __pydantic_config__: ClassVar[dict[str, object]] = CONFIG

    max_num_steps: int = 10
    """Optimizer steps."""

    clip_low: float = 0.2
    """Lower clip."""

    clip_high: float = 0.28
    """Upper clip."""

    shuffle: bool = True
    """Mix the prompts."""

    def __post_init__(self) -> None:
        if self.clip_low > self.clip_high:
            raise ValueError(f"clip_low {self.clip_low} must not exceed clip_high {self.clip_high}")
        if self.max_num_steps == 13:
            raise ValueError("thirteen is not a number of steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    __pydantic_config__: ClassVar[dict[str, object]] = CONFIG

    every: int = 5
    """Steps between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    __pydantic_config__: ClassVar[dict[str, object]] = CONFIG

    policy: Policy
    """What learns."""

    grpo: GRPO = field(default_factory=GRPO)
    """The loop."""

    evaluation: Evaluation | None = None
    """Off by default."""

    tags: list[str] = field(default_factory=list)
    """Words."""

    seed: int | str | None = None
    """Where randomness starts."""

    names: str | tuple[str, ...] = ()
    """One or several."""


GOOD = "policy: {model_name: tiny}\n"


def refused(directory: Path, text: str, *overrides: str) -> RecipeError:
    path = directory / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, schema=Recipe, overrides=overrides)
    return caught.value


def only(error: RecipeError) -> Problem:
    assert len(error.problems) == 1, str(error)
    return error.problems[0]


@pytest.mark.parametrize(
    ("text", "key", "meant"),
    [
        ("grpo: {max_steps: 1}", "grpo.max_steps", "grpo.max_num_steps"),
        ("max_num_steps: 1", "max_num_steps", "grpo.max_num_steps"),
        ("grpo_max_num_steps: 1", "grpo_max_num_steps", "grpo.max_num_steps"),
        ("learning_rate: 1", "learning_rate", "policy.optimizer.learning_rate"),
        ("optimizer: {betas: [1, 2]}", "optimizer", "policy.optimizer"),
        ("evaluation: {evry: 1}", "evaluation.evry", "evaluation.every"),
        ("GRPO: {}", "GRPO", "grpo"),
    ],
)
def test_an_unknown_key_names_the_nearest_one(tmp_path: Path, text: str, key: str, meant: str) -> None:
    problem = only(refused(tmp_path, GOOD + text))
    assert problem.key == key
    assert problem.where.line == 2
    assert problem.message.startswith("unknown key")
    assert problem.hint.startswith(f"did you mean {meant}? valid keys here: ")


def test_an_unknown_key_like_no_other_lists_the_valid_ones(tmp_path: Path) -> None:
    problem = only(refused(tmp_path, GOOD + "grpo: {zzz: 1}"))
    assert problem.message == "unknown key in section grpo"
    assert problem.hint == "valid keys here: max_num_steps, clip_low, clip_high, shuffle"


def test_a_dotted_key_in_a_file_is_told_to_be_nested(tmp_path: Path) -> None:
    problem = only(refused(tmp_path, GOOD + "grpo.shuffle: true"))
    assert problem.hint.startswith("dots join keys in overrides only")


def test_a_missing_key_points_at_its_section_and_says_what_it_is(tmp_path: Path) -> None:
    problem = only(refused(tmp_path, "seed: 1\npolicy:\n  precision: float32\n"))
    assert (problem.key, problem.where.line) == ("policy.model_name", 2)
    assert problem.message == "required key is missing"
    assert problem.hint == "add `model_name: …` (str): Directory or name of the model."


def test_a_missing_section_points_at_the_file(tmp_path: Path) -> None:
    problem = only(refused(tmp_path, "seed: 1\n"))
    assert (problem.key, problem.where.line, problem.where.file) == ("policy", None, tmp_path / "recipe.yaml")
    assert problem.hint == "add `policy: …` (section): What learns."


@pytest.mark.parametrize(
    ("text", "key", "message", "hint"),
    [
        ('grpo: {max_num_steps: "3"}', "grpo.max_num_steps", 'given "3" (a string), wanted int', "without quotes"),
        ("grpo: {max_num_steps: 1e3}", "grpo.max_num_steps", "given 1000.0, wanted int", "write 1000"),
        ("grpo: {shuffle: yes}", "grpo.shuffle", 'given "yes" (a string), wanted bool', "write true or false"),
        ("grpo: null", "grpo", "given null, wanted section", "write {} for its defaults, or delete the line"),
        ("evaluation: true", "evaluation", "given true, wanted section | null", "Off by default."),
        ("tags: a", "tags", 'given "a" (a string), wanted list[str]', "Words."),
        ("tags: [a, 1]", "tags.1", "given 1, wanted str", "write it in quotes"),
        ("names: 3", "names", "given 3, wanted str | tuple[str, ...]", "write it in quotes"),
        ("names: [a, 3]", "names.1", "given 3, wanted str", "write it in quotes"),
        ("seed: [1]", "seed", "given [1] (a list), wanted int | str | null", "Where randomness starts."),
    ],
)
def test_a_wrong_type_says_what_was_given_and_what_is_wanted(
    tmp_path: Path, text: str, key: str, message: str, hint: str
) -> None:
    problem = only(refused(tmp_path, GOOD + text))
    assert (problem.key, problem.message) == (key, message)
    assert hint in problem.hint
    assert problem.where.line == 2


def test_a_wrong_choice_names_the_nearest(tmp_path: Path) -> None:
    problem = only(refused(tmp_path, "policy: {model_name: a, precision: bfloat61}"))
    assert problem.message == 'given "bfloat61" (a string), wanted "bfloat16" | "float32"'
    assert problem.hint == 'did you mean "bfloat16"?'


@pytest.mark.parametrize("betas", ["[1]", "[1, 2, 3]"])
def test_a_tuple_of_another_length_is_a_wrong_type(tmp_path: Path, betas: str) -> None:
    problem = only(refused(tmp_path, f"policy: {{model_name: a, optimizer: {{betas: {betas}}}}}"))
    assert problem.key == "policy.optimizer.betas"
    assert problem.message == f"given {betas} (a list), wanted tuple[float, float]"


@pytest.mark.parametrize(("line", "key"), [("clip_low: 0.5", "grpo.clip_low"), ("clip_high: 0.1", "grpo.clip_high")])
def test_a_broken_rule_points_at_the_first_named_key_that_was_written(tmp_path: Path, line: str, key: str) -> None:
    problem = only(refused(tmp_path, GOOD + f"grpo:\n  shuffle: true\n  {line}\n"))
    assert (problem.key, problem.where.line) == (key, 4)
    assert re.fullmatch(r"clip_low 0\.\d+ must not exceed clip_high 0\.\d+", problem.message)
    assert problem.hint in {"Lower clip.", "Upper clip."}


def test_a_broken_rule_that_names_no_key_points_at_the_section(tmp_path: Path) -> None:
    problem = only(refused(tmp_path, GOOD + "\ngrpo:\n  max_num_steps: 13\n"))
    assert (problem.key, problem.where.line, problem.message) == ("grpo", 3, "thirteen is not a number of steps")


def test_an_override_does_not_move_its_section(tmp_path: Path) -> None:
    problem = only(refused(tmp_path, GOOD + "\ngrpo:\n  shuffle: false\n", "grpo.max_num_steps=13"))
    assert problem.where.line == 3


def test_a_wrong_value_below_its_key_is_shown_with_the_key(tmp_path: Path) -> None:
    problem = only(refused(tmp_path, GOOD + "grpo:\n  shuffle:\n    - 1\n"))
    assert (problem.where.line, problem.where.source) == (3, "  shuffle:")


def test_rules_are_checked_behind_other_mistakes(tmp_path: Path) -> None:
    error = refused(tmp_path, GOOD + "grpo:\n  shufle: 1\n  shuffle: 3\n  clip_low: 0.5\n")
    assert [problem.key for problem in error.problems] == ["grpo.shufle", "grpo.shuffle", "grpo.clip_low"]


def test_a_rule_about_a_key_that_is_wrong_itself_is_left_out(tmp_path: Path) -> None:
    error = refused(tmp_path, GOOD + "grpo:\n  clip_high: x\n  clip_low: 0.5\n")
    assert [problem.key for problem in error.problems] == ["grpo.clip_high"]


def test_all_problems_are_collected_and_one_screen_is_shown(tmp_path: Path) -> None:
    keys = "".join(f"  key_{index}: {'x' * 200}\n" for index in range(12))
    error = refused(tmp_path, f"seed: [1]\ngrpo:\n{keys}", "nonsense")
    assert len(error.problems) == 15
    lines = str(error).splitlines()
    assert lines[0] == f"recipe {tmp_path / 'recipe.yaml'} is refused: 15 problems"
    assert lines[-1] == "… and 7 more"
    assert len(lines) <= 26
    assert all(len(line) <= 120 for line in lines if "xxx" in line)


def test_a_problem_reads_from_place_to_remedy(tmp_path: Path) -> None:
    error = refused(tmp_path, GOOD + "grpo:\n  shufle: true # no\n")
    assert str(error).splitlines() == [
        f"recipe {tmp_path}/recipe.yaml is refused: 1 problem",
        f"{tmp_path}/recipe.yaml:3:3: grpo.shufle: unknown key in section grpo",
        "    3 |   shufle: true # no",
        "    did you mean grpo.shuffle? valid keys here: max_num_steps, clip_low, clip_high, shuffle",
    ]
