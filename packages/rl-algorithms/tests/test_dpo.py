"""Claims about DPO."""

import dataclasses
import math

import pytest
import torch

from rl_algorithms import dpo
from rl_algorithms.padding import take_rows
from rl_algorithms.rollouts import Rollouts

PAIRS = [
    dpo.Pair(chosen=(2, 3, 1), rejected=(2, 4, 4, 1), prompt_length=1),
    dpo.Pair(chosen=(3, 3, 3, 3, 1), rejected=(3, 5, 1), prompt_length=1),
    dpo.Pair(chosen=(2, 5, 1), rejected=(2, 1), prompt_length=1),
]
PLAIN = dpo.DPOConfig(max_num_steps=1, beta=0.3, nll_weight=0.0)


def referenced(table):
    return dpo.with_reference(table, dpo.prepare(PAIRS))


def test_before_training_the_loss_is_log_two_and_the_margin_zero(make_table):
    table = make_table()
    metrics = dpo.step(table, referenced(table), PLAIN)
    assert metrics["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert metrics["margin"] == pytest.approx(0.0, abs=1e-6)


def test_the_gradient_is_the_closed_form(make_table):
    """dL/d(answer logp) = -+ beta sigmoid(-beta delta) / pairs (arXiv:2305.18290, section 4)."""
    table, other = make_table(seed=0), make_table(seed=0)
    examples = referenced(make_table(seed=5))  # a reference that is not the policy
    dpo.step(table, examples, PLAIN)
    answers = other.token_logp(examples).sum(dim=1)
    logratio = (answers - examples.logp_ref).detach()
    weight = PLAIN.beta * torch.sigmoid(-PLAIN.beta * (logratio[0::2] - logratio[1::2])) / len(PAIRS)
    (answers[0::2] * -weight + answers[1::2] * weight).sum().backward()
    torch.testing.assert_close(table.grad, other.logits.grad)


def test_swapping_chosen_and_rejected_flips_the_margin(make_table):
    table, reference = make_table(seed=0), make_table(seed=5)
    examples = referenced(reference)
    swapped = take_rows(examples, torch.tensor([1, 0, 3, 2, 5, 4]))
    margin = dpo.margins(table, examples, beta=1.0)
    assert dpo.margins(table, swapped, beta=1.0)["margin"] == pytest.approx(-margin["margin"])


@pytest.mark.parametrize("nll_weight", [0.0, 1.0])
def test_the_gradient_does_not_depend_on_the_cut(make_table, nll_weight):
    config = dataclasses.replace(PLAIN, nll_weight=nll_weight)
    tables = [make_table(cut=cut) for cut in (2, 4, 6)]
    logs = [dpo.step(table, referenced(make_table(seed=5)), config) for table in tables]
    for table, log in zip(tables[1:], logs[1:], strict=True):
        torch.testing.assert_close(tables[0].grad, table.grad)
        assert log == pytest.approx(logs[0])


def test_the_nll_term_is_the_mean_over_chosen_tokens(make_table):
    table = make_table()
    examples = referenced(table)
    chosen = table.logp(examples)[0::2].sum() / examples.trainable[0::2].sum()
    metrics = dpo.step(table, examples, dataclasses.replace(PLAIN, nll_weight=2.0))
    assert metrics["nll"] == pytest.approx(-chosen.item())
    assert metrics["loss"] == pytest.approx(math.log(2) + 2.0 * metrics["nll"])


def test_a_table_learns_to_prefer(make_table):
    table = make_table(lr=1.0)
    config = dpo.DPOConfig(max_num_steps=40, batch_size=3, beta=0.5, nll_weight=1.0)
    log = list(dpo.train(policy=table, examples=referenced(table), config=config, version=7))
    assert log[-1]["margin"] > 1.0
    assert log[-1]["pair_accuracy"] == 1.0
    assert log[-1]["chosen_logratio"] > 0.0
    assert log[-1]["version"] == 47


def make_rollouts(rewards):
    rewards = torch.tensor(rewards)
    rows = rewards.numel()
    tokens = torch.arange(rows)[:, None].repeat(1, 4)
    return Rollouts(
        tokens=tokens,
        lengths=torch.full((rows,), 3),
        response=torch.tensor([False, True, True, False]).repeat(rows, 1),
        logp_old=torch.zeros(rows, 4),
        rewards=rewards,
        truncated=torch.zeros(rows, dtype=torch.bool),
        answers=("",) * rows,
    )


def test_pairs_join_the_best_with_the_worst_of_each_group_that_differs():
    rollouts = make_rollouts([[0.0, 1.0, 0.0, 0.5], [1.0, 1.0, 1.0, 1.0]])
    pairs = dpo.pairs_from_rollouts(rollouts, pairs_per_prompt=2)
    assert [(pair.chosen[0], pair.rejected[0]) for pair in pairs] == [(1, 0), (1, 2)]
    assert all(len(pair.chosen) == 3 and pair.prompt_length == 1 for pair in pairs)


@pytest.mark.parametrize("options", [{"beta": 0.0}, {"nll_weight": -1.0}, {"batch_size": 0}, {"max_num_steps": 0}])
def test_an_impossible_configuration_is_named(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        dpo.DPOConfig(**{"max_num_steps": 1, **options})
