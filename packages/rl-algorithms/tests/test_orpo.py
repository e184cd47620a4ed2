"""Claims about ORPO."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_algorithms import orpo
from rl_algorithms.preferences.pairs import Pair
from rl_algorithms.stepping import take_rows

PAIRS = [
    Pair(chosen=(2, 3, 1), rejected=(2, 4, 4, 1), prompt_length=1),
    Pair(chosen=(3, 3, 3, 3, 1), rejected=(3, 5, 1), prompt_length=1),
    Pair(chosen=(2, 5, 1), rejected=(2, 1), prompt_length=1),
]
CONFIG = orpo.ORPOConfig(max_num_steps=1, odds_ratio_weight=0.5)
EXAMPLES = orpo.prepare(PAIRS)


def test_the_loss_is_its_formula(make_table):
    table = make_table()
    logp, n = table.logp(EXAMPLES).sum(dim=1), EXAMPLES.trainable.sum(dim=1)
    probability = (logp / n).exp()
    odds = probability / (1 - probability)
    ratio = (odds[0::2] / odds[1::2]).log()
    separation = -torch.sigmoid(ratio).log()
    metrics = orpo.step(table, EXAMPLES, CONFIG)
    nll = -logp[0::2].sum() / n[0::2].sum()
    assert metrics["nll"] == pytest.approx(nll.item())
    assert metrics["odds_ratio_loss"] == pytest.approx(separation.mean().item())
    assert metrics["log_odds_ratio"] == pytest.approx(ratio.mean().item())
    assert metrics["pair_accuracy"] == pytest.approx((ratio > 0).double().mean().item())
    assert metrics["loss"] == pytest.approx((nll + 0.5 * separation.mean()).item())


def test_the_gradient_is_the_finite_difference(make_table):
    table = make_table(lr=0.0)
    orpo.step(table, EXAMPLES, CONFIG)
    for place in [(1, 3), (1, 5), (2, 4)]:
        losses = []
        for change in (1e-5, -1e-5):
            moved = make_table(lr=0.0)
            with torch.no_grad():
                moved.logits[place] += change
            losses.append(orpo.step(moved, EXAMPLES, CONFIG)["loss"])
        assert (losses[0] - losses[1]) / 2e-5 == pytest.approx(table.grad[place].item(), rel=1e-5, abs=1e-9)


def test_nothing_depends_on_the_cut_the_padding_or_the_order(make_table):
    wide = dataclasses.replace(
        EXAMPLES, **{name: torch.nn.functional.pad(getattr(EXAMPLES, name), (0, 3)) for name in ("tokens", "trainable")}
    )
    turned = take_rows(EXAMPLES, torch.tensor([4, 5, 0, 1, 2, 3]))
    cases = [(6, EXAMPLES), (2, EXAMPLES), (4, EXAMPLES), (6, wide), (2, turned)]
    tables = [make_table(cut=cut) for cut, _ in cases]
    logs = [orpo.step(table, given, CONFIG) for table, (_, given) in zip(tables, cases, strict=True)]
    for table, log in zip(tables[1:], logs[1:], strict=True):
        torch.testing.assert_close(table.grad, tables[0].grad, rtol=1e-9, atol=1e-12)
        assert log == pytest.approx(logs[0])


@given(mean=st.floats(-30, -1e-5))
def test_log_odds_are_those_of_the_probability(mean):
    odds = orpo.log_odds(torch.tensor([mean], dtype=torch.float64))
    assert odds.item() == pytest.approx(mean - math.log(-math.expm1(mean)), abs=1e-12)


@given(probability=st.floats(0.01, 0.99))
def test_opposite_probabilities_have_opposite_log_odds(probability):
    means = torch.tensor([math.log(probability), math.log1p(-probability)], dtype=torch.float64)
    right, wrong = orpo.log_odds(means).tolist()
    assert right == pytest.approx(-wrong, abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_certainty_and_impossibility_stay_finite_or_honest(dtype):
    means = torch.tensor([0.0, -1e-12, -1e-6, -1e-3, -80.0, -1e4], dtype=dtype, requires_grad=True)
    odds = orpo.log_odds(means)
    odds.sum().backward()
    assert odds.isfinite().all()
    assert odds[:3].tolist() == pytest.approx([-math.log(1e-6)] * 3, rel=1e-4)
    assert means.grad.isfinite().all()
    assert means.grad[:2].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("x", [-1e-7, -1e-3, -0.5, -3.0])
def test_log1mexp_in_single_precision_is_that_in_double(x):
    single = orpo.log1mexp(torch.tensor(x)).item()
    exact = math.log(-math.expm1(torch.tensor(x).item()))
    assert single == pytest.approx(exact, rel=1e-6, abs=1e-7)


def test_a_policy_that_is_certain_of_an_answer_still_has_a_gradient_to_take(make_table):
    table = make_table()
    with torch.no_grad():
        for place, token in ((1, 3), (2, 1)):
            table.logits[place, token] = 1e3
    metrics = orpo.step(table, EXAMPLES, CONFIG)
    assert all(math.isfinite(value) for value in metrics.values())
    assert table.grad.isfinite().all()


def test_with_no_weight_on_the_odds_it_is_imitation_of_the_chosen(make_table):
    config = dataclasses.replace(CONFIG, odds_ratio_weight=0.0)
    table = make_table()
    metrics = orpo.step(table, EXAMPLES, config)
    assert metrics["loss"] == pytest.approx(metrics["nll"])


def test_a_table_learns_to_prefer_without_a_reference(make_table):
    config = orpo.ORPOConfig(max_num_steps=40, batch_size=3, odds_ratio_weight=0.5)
    log = list(orpo.train(policy=make_table(lr=1.0), examples=EXAMPLES, config=config, version=7))
    assert log[-1]["log_odds_ratio"] > log[0]["log_odds_ratio"] + 1.0
    assert log[-1]["pair_accuracy"] == 1.0
    assert log[-1]["nll"] < log[0]["nll"]
    assert log[-1]["version"] == 47


def test_a_resumed_run_is_the_same_run(make_table):
    whole, halves = make_table(), make_table()
    config = orpo.ORPOConfig(max_num_steps=6, batch_size=2)
    list(orpo.train(policy=whole, examples=EXAMPLES, config=config, seed=3))
    first = dataclasses.replace(config, max_num_steps=3)
    list(orpo.train(policy=halves, examples=EXAMPLES, config=first, seed=3))
    list(orpo.train(policy=halves, examples=EXAMPLES, config=config, seed=3, steps_taken=3))
    assert torch.equal(whole.logits, halves.logits)


@pytest.mark.parametrize("options", [{"odds_ratio_weight": -0.1}, {"batch_size": 0}, {"max_num_steps": 0}])
def test_an_impossible_configuration_is_named(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        orpo.ORPOConfig(**{"max_num_steps": 1, **options})


def test_an_answer_without_tokens_is_named(make_table):
    empty = dataclasses.replace(EXAMPLES, trainable=EXAMPLES.trainable.clone())
    empty.trainable[4] = False
    with pytest.raises(ValueError, match="the chosen answer of pair 2 has no trainable token"):
        orpo.step(make_table(), empty, CONFIG)


def test_a_configuration_explains_itself():
    assert "chosen tokens + 0.5 * mean over the step's pairs of -log sigmoid(log odds" in orpo.explain(CONFIG)
