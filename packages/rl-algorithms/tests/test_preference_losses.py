"""Claims about the losses of a pair."""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_algorithms.preferences.losses import (
    PairLossConfig,
    aot,
    formula,
    hinge,
    ipo,
    known_reference,
    pair_delta,
    pair_loss,
    robust,
    sigmoid,
)

CONFIGS = [
    PairLossConfig(loss="sigmoid", beta=0.3),
    PairLossConfig(loss="sigmoid", beta=0.3, label_smoothing=0.2),
    PairLossConfig(loss="sigmoid_norm", beta=3.0),
    PairLossConfig(loss="robust", beta=0.3, label_smoothing=0.2),
    PairLossConfig(loss="hinge", beta=0.3),
    PairLossConfig(loss="ipo", beta=0.4),
    PairLossConfig(loss="simpo", beta=2.0, gamma=0.7),
    PairLossConfig(loss="simpo", beta=2.0, gamma=0.7, label_smoothing=0.1),
]
every_loss = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.loss}-{config.label_smoothing}")


def as_written(delta, config):
    """The table of the module, in Python's own floats."""

    def log_s(x):
        return -math.log1p(math.exp(-x))

    b, e, gamma = config.beta, config.label_smoothing, config.gamma
    return {
        "sigmoid": -(1 - e) * log_s(b * delta) - e * log_s(-b * delta),
        "sigmoid_norm": -(1 - e) * log_s(b * delta) - e * log_s(-b * delta),
        "robust": (-(1 - e) * log_s(b * delta) + e * log_s(-b * delta)) / (1 - 2 * e),
        "hinge": max(0.0, 1 - b * delta),
        "ipo": (delta - 1 / (2 * b)) ** 2,
        "simpo": -(1 - e) * log_s(b * delta - gamma) - e * log_s(gamma - b * delta),
    }[config.loss]


@every_loss
def test_each_loss_is_its_formula(config):
    points = [-7.0, -1.25, 0.0, 0.5, 2.0, 9.0]
    expected = torch.tensor([as_written(point, config) for point in points], dtype=torch.float64)
    torch.testing.assert_close(pair_loss(torch.tensor(points, dtype=torch.float64), config), expected)


@every_loss
def test_gradients_are_finite_differences(config):
    delta = torch.tensor([-3.0, -0.4, 0.3, 1.7, 6.0], dtype=torch.float64, requires_grad=True)  # none at hinge's kink
    assert torch.autograd.gradcheck(lambda each: pair_loss(each, config), delta)


@every_loss
def test_a_hopeless_margin_gives_a_finite_loss_and_gradient(config):
    delta = torch.tensor([-1e4, 0.0, 1e4], requires_grad=True)
    loss = pair_loss(delta, config)
    loss.sum().backward()
    assert loss.isfinite().all()
    assert delta.grad.isfinite().all()


def test_an_impossible_answer_costs_nothing_when_it_was_rejected():
    assert sigmoid(torch.tensor([torch.inf]), beta=0.1).tolist() == [0.0]


def test_without_a_margin_the_sigmoid_losses_are_log_two():
    zero = torch.zeros(1, dtype=torch.float64)
    assert sigmoid(zero, beta=0.1).item() == pytest.approx(math.log(2))
    assert sigmoid(zero, beta=0.1, label_smoothing=0.3).item() == pytest.approx(math.log(2))
    assert robust(zero, beta=0.1, label_smoothing=0.3).item() == pytest.approx(math.log(2))


def minimum_at(loss, where):
    at = torch.tensor([where], dtype=torch.float64, requires_grad=True)
    around = loss(torch.tensor([where - 0.1, where, where + 0.1], dtype=torch.float64))
    (slope,) = torch.autograd.grad(loss(at).sum(), at)
    return abs(slope.item()) < 1e-12 and around[1] < around[0] and around[1] < around[2]


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_smoothed_labels_are_content_with_a_finite_margin(share):
    """The optimum says what is believed: sigmoid(beta delta) = 1 - label_smoothing."""
    best = math.log((1 - share) / share) / 0.4
    assert minimum_at(lambda delta: sigmoid(delta, beta=0.4, label_smoothing=share), best)


def test_ipo_is_content_at_half_over_beta():
    assert minimum_at(lambda delta: ipo(delta, beta=0.25), 2.0)


def test_hinge_has_no_gradient_beyond_its_margin():
    delta = torch.tensor([2.1, 1.9], requires_grad=True)
    hinge(delta, beta=0.5).sum().backward()
    assert delta.grad.tolist() == [0.0, -0.5]


@given(delta=st.floats(-30, 30), share=st.floats(0.01, 0.45))
def test_the_robust_loss_is_unbiased_over_swapped_labels(delta, share):
    delta = torch.tensor([delta], dtype=torch.float64)
    right, swapped = (robust(each, beta=0.3, label_smoothing=share) for each in (delta, -delta))
    torch.testing.assert_close((1 - share) * right + share * swapped, sigmoid(delta, beta=0.3), rtol=1e-6, atol=1e-9)


@given(
    logratio=st.lists(st.floats(-5, 5), min_size=4, max_size=4),
    lengths=st.lists(st.integers(1, 6), min_size=4, max_size=4),
)
@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_delta_compares_sums_or_means_and_a_swap_flips_it(logratio, lengths, loss):
    config = PairLossConfig(loss=loss)
    logratio, lengths = torch.tensor(logratio, dtype=torch.float64), torch.tensor(lengths)
    trainable = torch.arange(6) < lengths[:, None]
    each = logratio / lengths if loss == "ipo" else logratio
    delta = pair_delta(logratio, trainable, config)
    torch.testing.assert_close(delta, torch.stack([each[0] - each[1], each[2] - each[3]]))
    swap = torch.tensor([1, 0, 3, 2])
    torch.testing.assert_close(pair_delta(logratio[swap], trainable[swap], config), -delta)


def test_what_answers_are_compared_with():
    logp_ref = torch.tensor([-1.0, -2.0, torch.nan, -1.0])
    assert known_reference(logp_ref, PairLossConfig(loss="simpo")).tolist() == [0.0] * 4
    assert known_reference(logp_ref[:2], PairLossConfig()).tolist() == [-1.0, -2.0]
    with pytest.raises(ValueError, match=r"logp_ref of pair 1 is nan, and loss='sigmoid' .* with_reference"):
        known_reference(logp_ref, PairLossConfig())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"beta": 0.0}, "beta=0.0 must be > 0"),
        ({"beta": math.nan}, "beta=nan must be a finite number"),
        ({"label_smoothing": 0.5}, "label_smoothing=0.5 must be"),
        ({"loss": "ipo", "label_smoothing": 0.1}, "label_smoothing=0.1 is not defined for loss='ipo'"),
        ({"loss": "hinge", "label_smoothing": 0.1}, "label_smoothing=0.1 is not defined for loss='hinge'"),
        ({"loss": "robust"}, "label_smoothing=0.0 makes loss='robust'"),
        ({"gamma": 0.5}, "gamma=0.5 is a margin of loss='simpo', and loss='sigmoid' has none"),
        ({"loss": "simpo", "gamma": -0.5}, "gamma=-0.5 must be >= 0"),
    ],
)
def test_options_that_a_loss_would_not_look_at_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        PairLossConfig(**options)


@every_loss
def test_the_formula_that_is_printed_is_the_loss(config):
    pair, delta = formula(config).split("\n")
    code = re.sub(r"([\d.]+) (?=[a-z])", r"\1 * ", pair.replace("log sigmoid", "log_s").replace("^", "**"))
    names = {"log_s": lambda x: -math.log1p(math.exp(-x)), "max": max}
    for point in (-2.0, 0.4, 3.0):
        computed = eval(code, names, {"delta": point})  # our own formula, read as Python
        assert computed == pytest.approx(pair_loss(torch.tensor([point], dtype=torch.float64), config).item())
    assert ("mean of" in delta) == config.per_token
    assert ("logp_ref" in delta) != config.reference_free


# -- Losses of each answer, and other functions of the margin --------------------------------------------------------

CHOSEN, REJECTED = torch.tensor([0.7, -0.4], dtype=torch.float64), torch.tensor([-0.2, 0.9], dtype=torch.float64)


def logistic(value):
    return 1 / (1 + math.exp(-value))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"loss": "bco"}, lambda c, r, b: -math.log(logistic(b * c)) - math.log(logistic(-b * r))),
        (
            {"loss": "nca"},
            lambda c, r, b: (
                -math.log(logistic(b * c)) - math.log(logistic(-b * c)) / 2 - math.log(logistic(-b * r)) / 2
            ),
        ),
        ({"loss": "sppo"}, lambda c, r, b: (c - 1 / (2 * b)) ** 2 + (r + 1 / (2 * b)) ** 2),
        ({"loss": "apo_zero"}, lambda c, r, b: 1 - logistic(b * c) + logistic(b * r)),
        ({"loss": "apo_down"}, lambda c, r, b: logistic(b * c) + 1 - logistic(b * (c - r))),
        (
            {"loss": "exo", "label_smoothing": 0.1},
            lambda c, r, b: sum(
                q * math.log(q / p) for q, p in ((logistic(b * (c - r)), 0.9), (logistic(-b * (c - r)), 0.1))
            ),
        ),
        (
            {"loss": "discopop", "discopop_tau": 0.5},
            lambda c, r, b: (
                -math.log(logistic(b * (c - r))) * (1 - logistic(b * (c - r) / 0.5))
                + math.exp(-b * (c - r)) * logistic(b * (c - r) / 0.5)
            ),
        ),
    ],
    ids=lambda value: value["loss"] if isinstance(value, dict) else "",
)
def test_the_losses_of_the_field_are_their_formulas(config, expected):
    config = PairLossConfig(beta=0.3, **config)
    found = pair_loss(CHOSEN - REJECTED, config, chosen=CHOSEN, rejected=REJECTED)
    by_hand = [expected(c, r, 0.3) for c, r in zip(CHOSEN.tolist(), REJECTED.tolist(), strict=True)]
    assert found.tolist() == pytest.approx(by_hand, rel=1e-12)
    assert formula(config).count("\n") == 1


def test_optimal_transport_compares_sorted_values():
    better, worse = torch.tensor([3.0, 1.0]), torch.tensor([0.0, 2.0])
    expected = [-math.log(logistic(0.5 * (1.0 - 0.0))), -math.log(logistic(0.5 * (3.0 - 2.0)))]
    assert aot(better, worse, beta=0.5).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"loss": "exo"}, "makes loss='exo' infinite"),
        ({"loss": "sigmoid", "discopop_tau": 0.1}, "of loss='discopop'"),
        ({"loss": "bco", "label_smoothing": 0.1}, "not defined for loss='bco'"),
    ],
)
def test_numbers_that_these_losses_do_not_look_at_are_refused(choices, words):
    with pytest.raises(ValueError, match=words):
        PairLossConfig(**choices)
    with pytest.raises(ValueError, match="give chosen= and rejected="):
        pair_loss(CHOSEN - REJECTED, PairLossConfig(loss="sppo"))
