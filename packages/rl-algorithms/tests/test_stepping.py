"""Claims about what all loops refuse: a run that cannot go on so, batches that end, a loss that is no number."""

import itertools
import math
import re
from types import SimpleNamespace

import pytest
import torch

from rl_algorithms import grpo, sft
from rl_algorithms.contracts import EnvironmentReturn, EpisodeStart
from rl_algorithms.environments import RewardFunctionEnvironment
from rl_algorithms.objective import Objective, SelectionConfig
from rl_algorithms.stepping import PhaseTimer, bring_weights, checked_batches, finite_step

KEEP = Objective(selection=SelectionConfig(groups_without_signal="keep"))


@pytest.fixture
def world(make_table, make_engine, chat, rows):
    def make(**choices):
        table = make_table()
        engine = make_engine(table)
        return {
            "policy": table,
            "engine": engine,
            "weight_sync": engine,
            "environment": RewardFunctionEnvironment(reward=lambda completions: [float(len(c)) for c in completions]),
            "prompts": itertools.repeat([chat.prompt(row) for row in rows]),
            "chat": chat,
            "sampling": 3,
            "config": grpo.GRPOConfig(**{"max_num_steps": 4, "num_prompts": 4, "objective": KEEP, **choices}),
        }

    return make


class Began:
    """An environment that remembers the seeds of its episodes; all rewards are equal."""

    def __init__(self):
        self.seeds = []

    def reset(self, rows, *, seeds):
        self.seeds.append(tuple(seeds[:: len(seeds) // 4]))
        return [EpisodeStart(messages=({"role": "user", "content": "1"},)) for _ in rows]

    def step(self, conversations):
        return [EnvironmentReturn(reward=1.0, terminated=True) for _ in conversations]


def seeds_of(how, **options):
    how = {**how, "environment": Began()}
    log = list(grpo.train(**how, **options))
    return how["environment"].seeds, log


def test_every_batch_begins_other_episodes_steps_taken_or_not_and_a_resumed_run_the_same(world):
    dapo = grpo.dapo(max_generation_batches=3)
    seeds, log = seeds_of(world(objective=dapo))
    assert [line["version"] for line in log] == [0] * 4  # no signal, no step
    assert len(set(itertools.chain.from_iterable(seeds))) == 4 * 3 * 4
    assert seeds_of(world(objective=dapo), steps_taken=3)[0] == seeds[9:]
    others, _ = seeds_of(world(objective=dapo), seed=1)
    assert not set(itertools.chain.from_iterable(seeds)) & set(itertools.chain.from_iterable(others))


def test_every_dict_says_the_steps_taken_those_without_a_signal_too(world):
    _, log = seeds_of(world(steps_per_generation=2, objective=Objective()))
    assert [(line["steps_taken"], line["version"]) for line in log] == [(2, 0), (4, 0)]


@pytest.mark.parametrize("taken", [-2, 3, 6])
def test_steps_that_no_run_can_have_taken_are_refused(world, taken):
    with pytest.raises(ValueError, match=f"steps_taken={taken} must be"):
        next(grpo.train(**world(steps_per_generation=2), steps_taken=taken))


def test_prompts_that_end_are_said_so(world):
    how = world()
    how["prompts"] = itertools.islice(how["prompts"], 2)
    with pytest.raises(ValueError, match="prompts ended after 2 batches, and the steps that are left want 4 or more"):
        list(grpo.train(**how))


def test_a_batch_of_another_size_is_refused(world):
    with pytest.raises(ValueError, match=r"prompts gave a batch of 4, .* the configuration says 5"):
        next(grpo.train(**world(num_prompts=5)))


def test_demonstrations_that_end_are_said_so(make_table, chat, rows):
    given = iter([[chat.demonstration(row) for row in rows]])
    loop = sft.train(policy=make_table(), demonstrations=given, config=sft.SFTConfig(max_num_steps=3, batch_size=4))
    assert next(loop)["steps_taken"] == 1
    with pytest.raises(ValueError, match=r"demonstrations ended after 1 batches, .* want 3 or more"):
        next(loop)


def test_rollouts_of_other_weights_are_refused(world):
    with pytest.raises(ValueError, match="sampled by version 0 of the weights, and this loop trains version 7"):
        next(grpo.train(**world(), version=7))


def test_a_weight_sync_that_commits_another_version_is_refused(world):
    how = world()
    how["weight_sync"] = lambda *, version: SimpleNamespace(version=version + 1)
    with pytest.raises(ValueError, match="asked for version 1 and committed version 2"):
        next(grpo.train(**how))


def test_a_conversation_has_no_more_tokens_than_it_may(world):
    how = world(max_length=2)
    start = EpisodeStart(messages=({"role": "user", "content": "123"},))
    how["prompts"] = iter([[how["chat"].start(start, row=prompt.row) for prompt in next(how["prompts"])]])
    with pytest.raises(ValueError, match="max_length=2"):
        next(grpo.train(**how))


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_the_gradient_of_a_loss_that_is_no_number_is_not_applied(make_table, loss):
    table = make_table()
    sums = {"loss": torch.tensor(loss), "ratio": torch.tensor(3.0)}
    with pytest.raises(ValueError, match=f"the loss of this step is {loss}, .* not applied; .*ratio=3"):
        finite_step(table, sums)
    assert table.version == 0


def test_a_loop_whose_loss_is_no_number_neither_steps_nor_transfers(world):
    how = world()
    with torch.no_grad():
        how["policy"].logits[:] = math.nan  # the engine has its own copy
    with pytest.raises(ValueError, match="the loss of this step is nan") as refused:
        next(grpo.train(**how))
    assert how["policy"].version == how["engine"].version == 0
    named = (
        r"In rollout \d+ of the batch, at token \d+ \(id \d+\), the policy's log-probability is nan, as of \d+ tokens"
    )
    assert re.search(named, str(refused.value))


def test_nothing_is_drawn_before_it_is_asked_for(make_engine, make_table):
    given = iter([[1], [2], [3]])
    assert next(checked_batches(given, name="rows", wanted=3)) == [1]
    assert list(given) == [[2], [3]]
    timer = PhaseTimer()
    bring_weights(make_engine(make_table()), version=3, timer=timer)
    assert list(timer.lap()) == ["phase_s/refit"]
