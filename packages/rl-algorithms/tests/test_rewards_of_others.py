"""Reward functions of TRL and verl work as they are: TRL's own are run, with the arguments that its trainer gives."""

import asyncio
import time

import pytest

from rl_algorithms.contracts import Conversation
from rl_algorithms.environments import RewardError, RewardFunctionEnvironment
from rl_algorithms.environments.math import math_match

QUESTION = [{"role": "system", "content": "Box it."}, {"role": "user", "content": "1/3?"}]


def said(text, *, prompt=QUESTION, tokens=(5, 6, 1), version=7, **columns):
    messages = tuple(prompt) if isinstance(prompt, list) else ({"role": "user", "content": prompt},)
    return Conversation(
        messages=messages, answer=text, row={"prompt": prompt, **columns}, tokens=tokens, version=version
    )


def rewards(reward, *conversations, **options):
    return [each.reward for each in RewardFunctionEnvironment(reward=reward, **options).step(conversations)]


def trl_rewards():
    return pytest.importorskip("trl.rewards", reason="trl is of the test group, and not installed here")


def test_trls_accuracy_reward_is_what_trl_computes():
    function = trl_rewards().accuracy_reward
    answers = [r"It is \boxed{\frac{1}{3}}", r"It is \boxed{\frac{1}{2}}", "a third"]
    direct = function([[{"role": "assistant", "content": each}] for each in answers], [r"\frac{1}{3}"] * 3)
    assert rewards(function, *(said(each, solution=r"\frac{1}{3}") for each in answers)) == direct == [1.0, 0.0, 0.0]


def test_trls_think_format_reward_is_what_trl_computes():
    function = trl_rewards().think_format_reward
    answers = ["<think>\nso\n</think>\n3", "<think>\nso 3", "3"]
    direct = function([[{"role": "assistant", "content": each}] for each in answers])
    assert rewards(function, *(said(each) for each in answers)) == direct == [1.0, 0.0, 0.0]


def test_trls_soft_overlong_punishment_counts_tokens():
    function = trl_rewards().get_soft_overlong_punishment(max_completion_len=10, soft_punish_cache=4)
    lengths = [6, 8, 10, 12]
    direct = function([[1] * length for length in lengths])
    assert rewards(function, *(said("x", tokens=(1,) * length) for length in lengths)) == direct
    assert direct == [0.0, -0.5, -1.0, -1.0]


def test_several_of_trls_at_once_have_its_names():
    trl = trl_rewards()
    functions = [trl.think_format_reward, trl.get_soft_overlong_punishment(10, 4)]
    environment = RewardFunctionEnvironment(reward=functions)
    (judged,) = environment.step([said("<think>a</think> b", tokens=(1,) * 8)])
    assert judged.rewards == {"think_format_reward": 1.0, "soft_overlong_punishment_reward": -0.5}


def test_prompts_and_completions_have_the_form_of_the_data():
    seen = {}

    def reward(prompts, completions, completion_ids, trainer_state, level, log_extra, **columns):
        log_extra("level", level)
        seen.update(
            columns, prompts=prompts, completions=completions, ids=completion_ids, step=trainer_state.global_step
        )
        return [1.0] * len(prompts)

    assert rewards(reward, said("3", level=2)) == [1.0]
    assert seen["prompts"] == [QUESTION]
    assert seen["completions"] == [[{"role": "assistant", "content": "3"}]]
    assert seen["ids"] == [[5, 6, 1]]
    assert seen["step"] == 7
    assert rewards(reward, said("3", prompt="1/3?", level=2)) == [1.0]
    assert (seen["prompts"], seen["completions"]) == (["1/3?"], ["3"])


def test_a_conversation_of_several_turns_is_the_prompt_and_all_behind_it():
    seen = {}
    behind = ({"role": "assistant", "content": "call"}, {"role": "tool", "content": "9"})

    def reward(prompts, completions):
        seen.update(prompts=prompts, completions=completions)
        return [1.0]

    conversation = Conversation(messages=(*QUESTION, *behind), answer="3", row={"prompt": QUESTION}, turn=1)
    rewards(reward, conversation)
    assert seen["prompts"] == [QUESTION]
    assert seen["completions"] == [[*behind, {"role": "assistant", "content": "3"}]]


def test_our_own_verifiers_are_given_text_whatever_the_form():
    assert rewards(math_match, said("#### 3", answer=3), said("#### 4", answer=3)) == [1.0, 0.0]
    assert rewards(math_match, said("#### 0", answer=0)) == [1.0]


VERL = {"data_source": "gsm8k", "reward_model": {"style": "rule", "ground_truth": "3"}, "extra_info": {"index": 4}}


def test_verls_compute_score_is_called_as_verl_calls_it():
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        assert (data_source, extra_info["index"]) == ("gsm8k", 4)
        return {"score": float(solution_str == ground_truth), "length": len(solution_str)}

    async def compute_score_later(data_source, solution_str, ground_truth, **_):
        await asyncio.sleep(0)
        return float(solution_str == ground_truth)

    for function in (compute_score, compute_score_later):
        assert rewards(function, said("3", **VERL), said("44", **VERL)) == [1.0, 0.0]
    environment = RewardFunctionEnvironment(reward=compute_score)
    assert environment.step([said("44", **VERL)])[0].metrics == {"length": 2.0}
    with pytest.raises(RewardError, match="requires data_source, reward_model"):
        rewards(compute_score, said("3"))


@pytest.mark.parametrize("slow", [True, False])
def test_a_failing_reward_is_called_again_row_by_row_only_if_it_is_fast(slow, monkeypatch):
    calls = []
    monkeypatch.setattr("rl_algorithms.environments.reward_function.FAST_S", 0.0 if slow else 3600.0)

    def reward(completions):
        calls.append(len(completions))
        time.sleep(0.001)
        if "b" in completions:
            raise OSError("no judge")
        return [1.0] * len(completions)

    environment = RewardFunctionEnvironment(reward=reward, on_error="fail")
    returns = environment.step([said(each, prompt="?") for each in "abc"])
    assert calls == ([3] if slow else [3, 1, 1, 1])
    assert [each.failed is None for each in returns] == ([False] * 3 if slow else [True, False, True])
    assert all("no judge" in each.failed for each in returns if each.failed is not None)
    if slow:
        with pytest.raises(RewardError, match="the batch as a whole"):
            rewards(reward, said("a", prompt="?"), said("b", prompt="?"))
