"""Claims about a trial of a reward before training."""

import json

import pytest

from rl_launcher.errors import Refusal
from rl_launcher.recipe_files import load_recipe
from rl_launcher.run import try_reward
from rl_launcher.schema import Recipe


def trial(recipe, *overrides, **options):
    return try_reward(load_recipe(recipe, schema=Recipe, overrides=overrides), **options)


def test_a_trial_shows_responses_rewards_advantages_and_seconds(recipe, tmp_path):
    result = trial(recipe)
    assert len(result.rollouts) == 8
    assert result.exit_code == 0
    assert result.groups == 2
    assert result.reward_calls == 1
    assert result.reward_s > 0
    by_prompt = {each.prompt: [] for each in result.rollouts}
    for each in result.rollouts:
        by_prompt[each.prompt].append(each)
        assert each.reward == pytest.approx((len(set(each.response)) + (each.response[:1] == each.expected)) / 5)
    for group in by_prompt.values():
        assert len(group) == 4
        assert sum(each.advantage for each in group) == pytest.approx(0, abs=1e-5)
    text = result.text()
    assert repr(result.rollouts[0].response) in text
    assert "groups have a training signal" in text
    assert json.loads(json.dumps(result.figures()))["rollouts"][0]["reward"] == result.rollouts[0].reward
    assert not (tmp_path / "run").exists()


def test_a_reward_that_is_equal_for_all_is_told_before_training(recipe, tmp_path):
    (tmp_path / "reward.py").write_text("def score(completions):\n    return [0.0] * len(completions)\n")
    result = trial(recipe)
    assert result.exit_code == 1
    assert {each.advantage for each in result.rollouts} == {0.0}
    assert "GRPO would learn nothing" in result.text()


def test_several_rewards_are_shown_by_component(recipe, tmp_path):
    (tmp_path / "reward.py").write_text(
        "def length(completions):\n    return [float(len(c)) for c in completions]\n"
        "def variety(completions):\n    return [float(len(set(c))) for c in completions]\n"
    )
    rewards = f"env.rewards={{length: '{tmp_path}/reward.py:length', variety: '{tmp_path}/reward.py:variety'}}"
    result = trial(recipe, "env.reward=null", rewards, prompts=1, rollouts=3)
    assert len(result.rollouts) == 3
    for each in result.rollouts:
        assert each.components == {"length": len(each.response), "variety": len(set(each.response))}
    assert "variety" in result.text()


def test_an_environment_of_several_turns_can_be_tried(recipe, tmp_path):
    (tmp_path / "env.py").write_text(
        "from rl_algorithms.contracts import EnvironmentReturn\n"
        "class Length:\n"
        "    def step(self, conversations):\n"
        "        return [EnvironmentReturn(reward=float(len(c.answer)), terminated=True) for c in conversations]\n"
    )
    result = trial(recipe, "env.reward=null", f"env.environment={tmp_path}/env.py:Length", "grpo.max_turns=2")
    assert [each.reward for each in result.rollouts] == [len(each.response) for each in result.rollouts]


def test_a_trial_without_an_env_or_without_a_group_is_refused(recipe):
    with pytest.raises(Refusal, match="rollouts=1"):
        trial(recipe, rollouts=1)
    with pytest.raises(Refusal, match="the recipe has no env"):
        trial(recipe, "env=null", "grpo=null")
