"""Claims about reward functions: how they are called, and what becomes of those that fail."""

import math

import pytest
import torch

from rl_algorithms.contracts import Conversation
from rl_algorithms.environments import RewardError, RewardFunctionEnvironment


def ask(reward, answers=("4", "5"), *, on_error="stop", **columns):
    environment = RewardFunctionEnvironment(reward=reward, on_error=on_error)
    conversations = [
        Conversation(
            messages=({"role": "user", "content": "2+2="},),
            answer=answer,
            row={"prompt": "2+2=", "answer": "4", **columns},
        )
        for answer in answers
    ]
    return environment, [item.reward for item in environment.step(conversations)]


def test_it_is_called_with_the_arguments_that_it_names():
    def reward(completions, answer):
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]

    assert ask(reward)[1] == [1.0, 0.0]


def test_keyword_arguments_get_every_column():
    seen = {}

    def reward(**columns):
        seen.update(columns)
        return [0, torch.tensor(0.5)]

    assert ask(reward, level=3)[1] == [0.0, 0.5]
    assert seen["prompts"] == ["2+2=", "2+2="]
    assert seen["completions"] == ["4", "5"]
    assert seen["level"] == [3, 3]


def test_a_column_that_it_requires_and_the_data_lack_is_named():
    with pytest.raises(
        RewardError, match="requires solution, and the data rows have answer, completions, prompt, prompts"
    ):
        ask(lambda completions, solution: [0.0] * len(completions))


def fails_on_five(completions):
    if "5" in completions:
        raise KeyError("five")
    return [1.0] * len(completions)


def test_one_that_raises_stops_the_run_and_names_the_sample():
    with pytest.raises(
        RewardError, match=r"fails_on_five .*prompt '2\+2=', answer '5': it raised KeyError: 'five'"
    ) as caught:
        ask(fails_on_five)
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "1", 10**400, torch.ones(2)])
def test_a_reward_that_is_no_finite_number_stops_the_run_and_names_the_sample(value):
    with pytest.raises(RewardError, match=r"(?s)answer '5': it returned .*not a finite number"):
        ask(lambda completions: [1.0, value])


def test_another_number_of_rewards_than_answers_is_refused():
    with pytest.raises(RewardError, match="returned 1 rewards for 2 answers"):
        ask(lambda completions: [1.0])


@pytest.mark.parametrize(
    "reward", [fails_on_five, lambda completions: [math.nan if c == "5" else 1.0 for c in completions]]
)
def test_when_asked_for_failures_count_as_zero_and_are_counted(reward):
    environment, rewards = ask(reward, on_error="zero")
    assert rewards == [1.0, 0.0]
    assert environment.errors == 1


async def in_the_future(completions):
    return [1.0] * len(completions)


@pytest.mark.parametrize(
    ("reward", "kind"),
    [
        (lambda completions: dict.fromkeys(completions, 1.0), "dict"),
        (lambda completions: "12", "str"),
        (in_the_future, "coroutine"),
    ],
)
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_what_is_no_list_of_numbers_is_refused(reward, kind):
    with pytest.raises(RewardError, match=f"it returned a {kind}, and must return a list"):
        ask(reward)
