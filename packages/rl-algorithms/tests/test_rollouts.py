"""Claims about rollouts: what the engine sampled is what will be trained on, and nothing broken passes."""

import dataclasses
import math

import pytest
import torch

from rl_algorithms.environments import RewardFunctionEnvironment
from rl_algorithms.evaluation import evaluate
from rl_algorithms.phases import PhaseTimer
from rl_algorithms.rollouts import collect


class Script:
    """An engine that says what it is told to."""

    def __init__(self, *rollouts):
        self.rollouts = rollouts

    def generate(self, prompts, sampling):
        return list(self.rollouts[: len(prompts)])


@dataclasses.dataclass(frozen=True)
class Said:
    tokens: tuple
    logp: tuple
    truncated: bool = False
    version: int = 0


def length(completions):
    return [float(len(completion)) for completion in completions]


def collect_from(engine, chat, rows, group_size=1):
    return collect(
        [chat.prompt(row) for row in rows],
        group_size=group_size,
        engine=engine,
        sampling=None,
        environment=RewardFunctionEnvironment(reward=length),
        chat=chat,
        timer=PhaseTimer(),
    )


def test_tokens_and_log_probabilities_stand_where_they_were_sampled(chat, rows):
    engine = Script(Said((5, 1), (-0.1, -0.2)), Said((4, 4, 4), (-0.3, -0.4, -0.5), truncated=True))
    rollouts = collect_from(engine, chat, rows[:1], group_size=2)
    assert rollouts.tokens.tolist() == [[2, 5, 1, 0], [2, 4, 4, 4]]
    assert rollouts.response.tolist() == [[False, True, True, False], [False, True, True, True]]
    torch.testing.assert_close(rollouts.logp_old, torch.tensor([[0, -0.1, -0.2, 0], [0, -0.3, -0.4, -0.5]]))
    assert rollouts.answers == ("3", "222")
    assert rollouts.rewards.tolist() == [[1.0, 3.0]]
    assert rollouts.truncated.tolist() == [False, True]


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        (Said((5, 1), (-0.1,)), "rollout 0 has 2 tokens and 1 log-probabilities"),
        (Said((), ()), "rollout 0 has 0 tokens"),
        (Said((5, 1), (-0.1, math.nan)), "rollout 0 has a log-probability that is not finite"),
    ],
)
def test_a_lost_log_probability_is_an_error_never_a_zero(chat, rows, rollout, message):
    with pytest.raises(ValueError, match=message):
        collect_from(Script(rollout), chat, rows[:1])


def test_a_lost_rollout_is_an_error(chat, rows):
    with pytest.raises(ValueError, match="returned 1 rollouts for 2 prompts"):
        collect_from(Script(Said((1,), (0.0,))), chat, rows[:2])


def test_accuracy_comes_with_its_standard_error(chat, rows):
    engine = Script(*(Said((5,) * n + (1,), (-0.1,) * (n + 1)) for n in (0, 1, 1, 2)))
    accuracy = evaluate(
        [chat.prompt(row) for row in rows],
        engine=engine,
        sampling=None,
        environment=RewardFunctionEnvironment(reward=length),
        chat=chat,
    )
    assert accuracy.mean == 1.0
    assert accuracy.standard_error == pytest.approx(math.sqrt(2 / 3) / 2)
