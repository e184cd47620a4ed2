"""Claims about errors in the user's code: its place is on the screen, the traceback in a file, bugs are not hidden."""

import json
from pathlib import Path

import pytest

from rl_algorithms.data import DataError
from rl_launcher.errors import Refusal, RunStoppedError, is_refusal, user_frames, user_location
from rl_launcher.recipe_files import load_recipe
from rl_launcher.run import resume, run
from rl_launcher.schema import Recipe
from rl_observe import RunDirectory, read_events


def run_with(recipe, *overrides):
    return run(load_recipe(recipe, schema=Recipe, overrides=["sft=null", "evaluation.every=0", *overrides]))


@pytest.fixture
def reward(recipe, tmp_path):
    """Replaces the recipe's reward by these lines; its second line is what they begin with."""

    def write(line):
        (tmp_path / "reward.py").write_text(f"def score(completions, answer):\n    {line}\n")
        return f"{tmp_path}/reward.py:2"

    return write


def test_a_reward_that_raises_is_shown_with_file_line_and_source(recipe, tmp_path, reward):
    place = reward("return [{}[text] for text in completions]")
    with pytest.raises(RunStoppedError) as stopped:
        run_with(recipe)
    message = str(stopped.value)
    assert f"  {place} in " in message
    assert "return [{}[text] for text in completions]" in message
    assert "  KeyError: " in message
    assert "rl_algorithms" not in message  # our frames are in the file
    whole = (tmp_path / "run" / "error.txt").read_text()
    assert "Traceback (most recent call last)" in whole
    assert "rl_algorithms" in whole
    assert place.replace(":2", '", line 2') in whole
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["error_at"] == place
    assert "the reward function score cannot judge prompt" in summary["error"]
    event = read_events(RunDirectory.open(tmp_path / "run"))[-1]
    assert event["name"] == "failed"
    assert event["message"].endswith(f"({place})")


def test_a_reward_that_exits_does_not_end_the_run_without_a_word(recipe, tmp_path, reward):
    place = reward("import sys; sys.exit(3)")
    with pytest.raises(RunStoppedError, match=r"it raised SystemExit\(3\)") as stopped:
        run_with(recipe)
    assert stopped.value.exit_code == 1
    assert place in str(stopped.value)
    assert (tmp_path / "run" / "summary.json").exists()


def test_an_environment_that_cannot_be_called_is_refused_with_its_place_before_training(recipe, tmp_path):
    (tmp_path / "env.py").write_text(
        "class Env:\n"
        "    def reset(self, rows):\n        return []\n"
        "    def step(self, conversations):\n        return []\n"
    )
    with pytest.raises(Refusal, match=r"Env\.reset \(.*env\.py:2\) cannot be called as reset\(rows, \*, seeds\)"):
        run_with(recipe, "env.reward=null", f"env.environment={tmp_path}/env.py:Env")
    assert not (tmp_path / "run").exists()


def test_a_bug_of_ours_shows_its_traceback(recipe, tmp_path, monkeypatch):
    def broken(*_arguments, **_named):
        return {}["no such key"]

    monkeypatch.setattr("rl_algorithms.grpo.describe", broken)
    broken.__globals__["__name__"], name = "rl_algorithms.broken", broken.__globals__["__name__"]
    try:
        with pytest.raises(RunStoppedError, match=r"(?s)failed: KeyError.*Traceback \(most recent call last\)"):
            run_with(recipe)
    finally:
        broken.__globals__["__name__"] = name


def test_a_run_that_was_mended_and_resumed_leaves_no_error_behind(recipe, tmp_path):
    (tmp_path / "reward.py").write_text(
        "from pathlib import Path\n"
        "def score(completions):\n"
        "    if Path(__file__).with_name('away').exists():\n"
        "        raise OSError('the judge is away')\n"
        "    return [float(len(set(text))) for text in completions]\n"
    )
    (tmp_path / "away").touch()
    with pytest.raises(RunStoppedError, match="the judge is away"):
        run_with(recipe)
    (tmp_path / "away").unlink()
    assert resume(tmp_path / "run")["steps"] == 8
    assert not (tmp_path / "run" / "error.txt").exists()


def raised(action):
    try:
        action()
    except Exception as error:  # noqa: BLE001
        return error


def test_named_errors_files_and_stated_values_are_refusals_and_the_rest_are_bugs():
    assert is_refusal(Refusal("no"))
    assert is_refusal(DataError("no rows"))
    assert is_refusal(raised(Path("/no/such/file").read_text))
    from rl_algorithms.grpo import GRPOConfig

    assert is_refusal(raised(lambda: GRPOConfig(max_num_steps=0)))
    assert not is_refusal(raised(lambda: int("x")))
    assert not is_refusal(KeyError("x"))
    assert not is_refusal(TypeError("x"))
    assert not is_refusal(raised(lambda: (_ for _ in ()).throw(ValueError("not of our code"))))


def test_an_error_outside_of_the_users_code_has_no_place_there():
    error = raised(lambda: int("x"))  # this test called it, and is above our first frame
    assert user_frames(error) == ""
    assert user_location(error) is None
