"""KL estimates and importance weights by enumeration: expectations over a small vocabulary, exactly."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_algorithms import corrections
from rl_algorithms.kl import kl_estimate
from rl_algorithms.losses import Counts, token_weights
from rl_algorithms.objective import KLConfig, Objective

VOCABULARY = 7
LOGP = st.floats(-30, 0, allow_nan=False)


def two_policies(seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits, reference = torch.randn(2, VOCABULARY, generator=generator, dtype=torch.float64)
    return logits.requires_grad_(), reference.log_softmax(-1)


def gradient(value, logits):
    return torch.autograd.grad(value, logits, allow_unused=True, retain_graph=True)[0]


def forward_kl(logits, reference):
    logp = logits.log_softmax(-1)
    return (logp.exp() * (logp - reference)).sum()


def backward_kl(logits, reference):
    return (reference.exp() * (reference - logits.log_softmax(-1))).sum()


@pytest.mark.parametrize("estimator", ["k1", "k3", "k3_unbiased"])
def test_unbiased_estimates_have_the_kl_as_their_mean(estimator):
    logits, reference = two_policies()
    logp = logits.log_softmax(-1).detach()
    mean = (logp.exp() * kl_estimate(logp, reference, estimator=estimator)).sum()
    torch.testing.assert_close(mean, forward_kl(logits, reference).detach())


@pytest.mark.parametrize(
    ("estimator", "of"), [("k1", None), ("k2", forward_kl), ("k3", backward_kl), ("k3_unbiased", forward_kl)]
)
def test_the_mean_gradient_of_an_estimate_in_the_loss(estimator, of):
    """k1's is 0, k3's that of the other direction: the two traps of the field."""
    logits, reference = two_policies()
    logp = logits.log_softmax(-1)
    mean = (logp.detach().exp() * kl_estimate(logp, reference, estimator=estimator)).sum()
    expected = torch.zeros(VOCABULARY, dtype=torch.float64) if of is None else gradient(of(logits, reference), logits)
    torch.testing.assert_close(gradient(mean, logits), expected)


def test_k1_in_the_reward_has_the_gradient_of_the_kl():
    logits, reference = two_policies()
    logp = logits.log_softmax(-1)
    reward = -kl_estimate(logp.detach(), reference, estimator="k1")
    mean = (logp.detach().exp() * -reward * logp).sum()
    torch.testing.assert_close(gradient(mean, logits), gradient(forward_kl(logits, reference), logits))


@given(st.lists(st.tuples(LOGP, LOGP), min_size=1, max_size=8))
def test_k2_and_k3_are_never_negative(pairs):
    logp, reference = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    for estimator in ("k2", "k3", "k3_unbiased"):
        assert (kl_estimate(logp, reference, estimator=estimator) >= 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("estimator", "value", "slope"), [("k1", 25.0, 1.0), ("k2", 312.5, 25.0), ("k3", 24.0, 1.0)])
def test_a_token_that_the_reference_rules_out_pushes_back(estimator, value, slope, dtype):
    """Its d is -25: what holds the policy most is not bounded away."""
    logp = torch.tensor([-1.0], dtype=dtype, requires_grad=True)
    found = kl_estimate(logp, torch.tensor([-26.0], dtype=dtype), estimator=estimator)
    found.sum().backward()
    assert found.item() == pytest.approx(value)
    assert logp.grad.item() == pytest.approx(slope)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("difference", [-25.0, -4.0, 0.5, 2.0, 21.0])
def test_within_limits_a_kl_is_that_of_nemo_rl(estimator, difference):
    """Theirs, in a line: the difference within 20, the estimate of it within 10; a token beyond has no gradient."""
    reference = torch.tensor([-30.0], dtype=torch.float64)
    logp, theirs = ((reference - difference).requires_grad_() for _ in range(2))
    held = (reference - theirs).clamp(-20.0, 20.0)
    expected = {"k1": -held, "k2": held.square() / 2, "k3": held.exp() - 1 - held}[estimator].clamp(-10.0, 10.0)
    found = KLConfig(estimator=estimator, log_ratio_limit=20.0, limit=10.0).estimate(
        {"logp": logp, "logp_ref": reference, "ratio": None, "mask": torch.ones(1, dtype=torch.bool)}
    )
    torch.testing.assert_close(found, expected)
    for value in (found, expected):
        value.sum().backward()
    torch.testing.assert_close(logp.grad, theirs.grad)


def test_a_token_beyond_the_limit_gives_its_ratio_no_gradient_either():
    logp = torch.tensor([-1.0, -1.0], requires_grad=True)
    ratio = torch.exp(logp - logp.detach())
    known = {"logp": logp, "logp_ref": torch.tensor([-26.0, -1.5]), "ratio": ratio, "mask": torch.ones(2).bool()}
    found = KLConfig(estimator="k3_unbiased", log_ratio_limit=20.0).estimate(known)
    found.sum().backward()
    assert found[0].item() == pytest.approx(19.0)
    assert logp.grad[0].item() == 0.0
    assert logp.grad[1].item() != 0.0


def test_a_limit_is_in_the_formula_and_must_be_positive():
    text = Objective(kl=KLConfig(weight=0.01, limit=10.0, log_ratio_limit=20.0)).explain()
    assert "0.01 * clip((exp(logp_ref - logp) - (logp_ref - logp) - 1), -10, 10)" in text
    assert "logp_ref - logp is within +-20" in text
    with pytest.raises(ValueError, match=r"limit=0.0 must be > 0"):
        KLConfig(limit=0.0)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3_unbiased"])
@pytest.mark.parametrize("difference", [-1000.0, -60.0, -3.0, 3.0, 60.0, 1000.0])
def test_no_difference_is_infinite_or_pushes_the_wrong_way(estimator, difference):
    logp = torch.tensor([-1.0], requires_grad=True)
    found = kl_estimate(logp, torch.tensor([-1.0 + difference]), estimator=estimator)
    found.sum().backward()
    assert found.isfinite().all()
    assert logp.grad.isfinite().all()
    if estimator in {"k2", "k3"}:  # those whose own minimum is where the two agree
        assert logp.grad.item() * difference <= 0.0


def test_untruncated_weights_have_mean_one_and_make_the_gradient_unbiased():
    logits, sampler = two_policies(3)
    logp = logits.log_softmax(-1)
    mask = torch.ones(1, VOCABULARY, dtype=torch.bool)
    weight = corrections.importance_weight(logp.detach()[None], sampler[None], mask, level="token")[0]
    assert (sampler.exp() * weight).sum().item() == pytest.approx(1.0)
    rewards = torch.arange(VOCABULARY, dtype=torch.float64)
    corrected = (sampler.exp() * weight * -rewards * logp).sum()
    on_policy = (logp.detach().exp() * -rewards * logp).sum()
    torch.testing.assert_close(gradient(corrected, logits), gradient(on_policy, logits))


def test_a_sequences_weight_is_the_product_of_its_tokens_and_has_mean_one():
    logits, sampler = two_policies(4)
    logp = logits.log_softmax(-1).detach()
    pairs = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=2)))
    mask = torch.ones(len(pairs), 2, dtype=torch.bool)
    weight = corrections.importance_weight(logp[pairs], sampler[pairs], mask, level="sequence")
    torch.testing.assert_close(weight[:, 0], (logp[pairs] - sampler[pairs]).sum(1).exp())
    torch.testing.assert_close(weight[:, 0], weight[:, 1])
    assert (sampler[pairs].sum(1).exp() * weight[:, 0]).sum().item() == pytest.approx(1.0)


def weigh(gaps):
    gap = torch.tensor([gaps], dtype=torch.float64).log()
    return gap, torch.zeros_like(gap), torch.ones_like(gap, dtype=torch.bool)


def test_truncation_holds_and_masking_takes_away():
    weight = corrections.importance_weight(*weigh([0.25, 1.0, 4.0]), level="token")
    assert corrections.truncate(weight, low=0.5, high=2.0).tolist()[0] == pytest.approx([0.5, 1.0, 2.0])
    assert corrections.mask_outside(weight, low=0.5, high=2.0).tolist()[0] == pytest.approx([0.0, 1.0, 0.0])


def test_the_typical_token_of_an_answer_does_not_know_its_length():
    assert corrections.geometric_mean(*weigh([2.0] * 40)).item() == pytest.approx(2.0)
    assert corrections.importance_weight(*weigh([2.0] * 40), level="sequence")[0, 0].item() == pytest.approx(
        math.exp(20)  # the product is 2 ** 40, and held
    )


def test_disagreement_counts_in_both_directions():
    assert corrections.sequence_error(*weigh([2.0, 0.5])).item() == pytest.approx(2.0)
    nothing = (*weigh([2.0, 0.5])[:2], torch.zeros(1, 2, dtype=torch.bool))
    assert corrections.sequence_error(*nothing).item() == 1.0
    assert corrections.geometric_mean(*nothing).item() == 1.0


@pytest.mark.parametrize(
    "config", [{"geometric_low": 0.9}, {"geometric_high": 1.1}, {"sequence_error_threshold": 1.05}]
)
def test_an_answer_that_is_rejected_counts_nothing_and_its_neighbour_as_ever(config):
    gap = torch.tensor([[0.0, 0.0], [0.0, -1.0] if "geometric_low" in config else [0.0, 1.0]], dtype=torch.float64)
    mask = torch.ones_like(gap, dtype=torch.bool)
    found = corrections.token_factors(gap, torch.zeros_like(gap), mask, config=corrections.CorrectionConfig(**config))
    assert found.tolist() == [[1.0, 1.0], [0.0, 0.0]]


# -- Aggregation -----------------------------------------------------------------------------------------------------

MASK = torch.tensor([[True, True, True, False], [True, False, False, False], [False] * 4])
LOSSES = torch.tensor([[1.0, 2.0, 3.0, 9.0], [10.0, 9.0, 9.0, 9.0], [9.0] * 4])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", (6 + 10) / 4),
        ("seq-mean-token-mean", (2 + 10) / 2),
        ("seq-mean-token-sum", (6 + 10) / 2),
        ("seq-mean-token-sum-norm", (6 + 10) / (2 * 8)),
    ],
)
def test_modes_of_aggregation(mode, expected):
    length = 8 if mode.endswith("norm") else None
    weights = token_weights(MASK, mode, Counts.of(MASK), max_length=length)
    assert (weights * LOSSES).sum().item() == pytest.approx(expected)
    assert not weights[~MASK].any()


def test_a_constant_length_that_is_missing_is_asked_for():
    with pytest.raises(ValueError, match="max_length is None"):
        token_weights(MASK, "seq-mean-token-sum-norm", Counts.of(MASK))
