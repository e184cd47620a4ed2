"""Claims about online DPO: it learns from what the policy says now, and a batch without pairs moves nothing."""

import itertools

import pytest
import torch

from rl_algorithms import dpo, online_dpo
from rl_algorithms.environments import RewardFunctionEnvironment


def share_of_threes(completions):
    return [completion.count("3") / 3 for completion in completions]


def run(table, engine, chat, rows, *, config, reward=share_of_threes, **options):
    return online_dpo.train(
        policy=table,
        engine=engine,
        weight_sync=engine,
        environment=RewardFunctionEnvironment(reward=reward),
        prompts=itertools.repeat([chat.prompt(row) for row in rows]),
        chat=chat,
        sampling=3,
        config=config,
        **options,
    )


def config(steps, **choices):
    return dpo.DPOConfig(max_num_steps=steps, num_prompts=4, num_generations_per_prompt=8, **choices)


@pytest.mark.parametrize("choices", [{"beta": 0.5}, {"loss": "simpo", "beta": 2.0}, {"loss": "aot", "beta": 0.5}])
def test_a_table_learns_from_its_newest_answers(make_table, make_engine, chat, rows, choices):
    table = make_table(lr=3.0)
    engine = make_engine(table)
    reference = None if choices.get("loss") == "simpo" else make_table()
    log = list(run(table, engine, chat, rows, config=config(60, **choices), reference=reference))
    assert log[0]["reward"] < 0.3
    assert sum(line["reward"] for line in log[-5:]) / 5 > 0.75
    assert all(line["staleness_max"] == 0.0 for line in log)
    assert engine.version == table.version == log[-1]["version"]
    torch.testing.assert_close(engine.logits, table.logits.detach())


def test_the_first_step_is_dpos_on_the_pairs_of_the_first_rollouts(make_table, make_engine, chat, rows):
    table = make_table(seed=0)
    first = next(run(table, make_engine(table), chat, rows, config=config(1), reference=make_table(seed=0)))
    assert 1 <= first["pairs"] <= 8
    assert first["loss"] == pytest.approx(torch.log(torch.tensor(2.0)).item(), abs=1e-6)  # it is its own reference
    assert first["margin"] == pytest.approx(0.0, abs=1e-6)


def test_answers_of_equal_worth_give_no_pair_and_no_step(make_table, make_engine, chat, rows):
    table = make_table()
    before = table.logits.detach().clone()
    equal = lambda completions: [0.5] * len(completions)  # noqa: E731
    log = list(run(table, make_engine(table), chat, rows, config=config(2), reference=make_table(), reward=equal))
    assert [(line["pairs"], line["version"], line["steps_taken"]) for line in log] == [(0.0, 0, 1), (0.0, 0, 2)]
    assert "loss" not in log[0]
    assert table.logits.equal(before)


def test_a_loss_that_compares_needs_a_reference(make_table, make_engine, chat, rows):
    table = make_table()
    with pytest.raises(ValueError, match="loss='sigmoid' compares with a reference"):
        next(run(table, make_engine(table), chat, rows, config=config(1)))
