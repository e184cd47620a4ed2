"""Claims about observers: they see what the step computed, of every token that it trained on, and change nothing."""

import itertools
import math

import pytest
import torch

from rl_algorithms import grpo
from rl_algorithms.corrections import CorrectionConfig
from rl_algorithms.environments import RewardFunctionEnvironment
from rl_algorithms.objective import Objective, RatioConfig, SelectionConfig
from rl_algorithms.observation import ObservedPolicy


def share_of_threes(completions):
    return [completion.count("3") / 3 for completion in completions]


def run(table, engine, chat, rows, *, config, on_step=None, **options):
    return list(
        grpo.train(
            policy=table if on_step is None else ObservedPolicy(table, on_step),
            engine=engine,
            weight_sync=engine,
            environment=RewardFunctionEnvironment(reward=share_of_threes),
            prompts=itertools.repeat([chat.prompt(row) for row in rows]),
            chat=chat,
            sampling=3,
            config=config,
            **options,
        )
    )


OBJECTIVES = {
    "default": Objective(),
    "kept groups": Objective(selection=SelectionConfig(groups_without_signal="keep")),
    "whole-step selection": Objective(selection=SelectionConfig(tokens="clip_cov")),
    "entropy bonus": Objective(entropy_weight=0.01),
    "corrected": Objective(
        ratio=RatioConfig(proximal="recomputed"), correction=CorrectionConfig(weight="token", low=0.5, high=2.0)
    ),
}


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES.keys())
def test_an_observer_sees_every_trained_token_and_the_losses_add_up(make_table, make_engine, chat, rows, objective):
    """Cut into microbatches of 3 rows, which split groups and have widths of their own."""
    table, batches, steps = make_table(cut=3), [], []
    config = grpo.GRPOConfig(max_num_steps=4, steps_per_generation=2, num_prompts=4, objective=objective)
    metrics = run(
        table, make_engine(table), chat, rows, config=config, on_rollouts=batches.append, on_step=steps.append
    )
    assert len(steps) == 2 * len(batches) == 4
    for number, (batch, logged) in enumerate(zip(batches, metrics, strict=True)):
        pair = steps[2 * number : 2 * number + 2]
        for step in pair:
            assert torch.equal(step.examples.tokens, batch.tokens[step.rows][:, : step.examples.tokens.shape[1]])
            trained = step.examples.trainable
            assert step.columns["logp"][trained].isfinite().all()
            assert step.columns["loss"][trained].sum().item() == pytest.approx(step.metrics["loss"], abs=1e-6)
        assert sum(step.metrics["loss"] for step in pair) / 2 == pytest.approx(logged["loss"])
        seen = torch.cat([step.rows for step in pair])
        assert len(seen.unique()) == len(seen) <= len(batch)
    first = steps[0]  # before any update the policy is the sampler
    trained = first.examples.trainable
    assert first.columns["logp"][trained].float().allclose(first.examples.logp_old[trained], atol=1e-6)
    assert ("weight" in first.columns) == objective.correction.active
    assert ("entropy" in first.columns) == (objective.entropy_weight > 0)


def test_an_observer_changes_nothing(make_table, make_engine, chat, rows):
    logs = []
    for options in ({}, {"on_step": [].append}):
        table = make_table(cut=3)
        config = grpo.GRPOConfig(max_num_steps=4, steps_per_generation=2, num_prompts=4)
        log = run(table, make_engine(table), chat, rows, config=config, **options)
        logs.append([{k: v for k, v in line.items() if not k.startswith("phase_s")} for line in log])
    assert logs[0] == logs[1]


def test_a_step_that_is_refused_is_told_with_what_it_had_computed(make_table, make_engine, chat, rows):
    table, steps = make_table(), []
    engine = make_engine(table)
    generate = engine.generate

    def poison(prompts, sampling):
        made = generate(prompts, sampling)
        with torch.no_grad():
            table.logits[2] = math.nan  # after sampling: the trainer's log-probabilities are NaN from place 2 on
        return made

    engine.generate = poison
    config = grpo.GRPOConfig(max_num_steps=1, num_prompts=4)
    with pytest.raises(ValueError, match="the loss of this step is nan"):
        run(table, engine, chat, rows, config=config, on_step=steps.append)
    (step,) = steps
    assert "the loss of this step is nan" in step.error
    assert step.metrics == {}
    bad = step.columns["logp"].isnan() & step.examples.trainable
    assert bad[:, 2].any()
    assert not bad[:, 1].any()


def test_rollouts_name_their_data_rows(make_table, make_engine, chat, rows):
    table, batches = make_table(), []
    config = grpo.GRPOConfig(max_num_steps=1, num_prompts=4, num_generations_per_prompt=2)
    run(table, make_engine(table), chat, rows, config=config, on_rollouts=batches.append)
    assert batches[0].sources == tuple(f"row {digit}" for digit in range(4) for _ in range(2))
    assert batches[0].take(torch.tensor([3, 0])).sources == ("row 1", "row 0")
