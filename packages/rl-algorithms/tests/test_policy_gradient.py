"""The loss under every preset: no cut of a step changes it, nothing off the mask does, and its gradient is its own."""

import dataclasses
import functools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_algorithms import grpo, presets
from rl_algorithms.corrections import CorrectionConfig
from rl_algorithms.losses import Counts
from rl_algorithms.objective import AdvantageConfig, KLConfig, Objective, OverlongConfig, RatioConfig, SelectionConfig
from rl_algorithms.policy_gradient import Examples, loss

RECOMPUTED = RatioConfig(proximal="recomputed")
OBJECTIVES = {
    "default": Objective(),
    "deepseek_grpo": presets.deepseek_grpo(),
    "leave_one_out_grpo": presets.leave_one_out_grpo(),
    "dr_grpo": presets.dr_grpo(max_length=7),
    "dapo": presets.dapo(),
    "gspo": presets.gspo(clip_low=0.2, clip_high=0.3),
    "cispo": presets.cispo(clip_high=0.3),
    "rloo": presets.rloo(),
    "reinforce_plus_plus": presets.reinforce_plus_plus(),
    "reinforce_plus_plus_baseline": presets.reinforce_plus_plus_baseline(),
    "gdpo": presets.gdpo(),
    "ppo": presets.ppo(),
    "dual clip": Objective(ratio=RatioConfig(dual_clip=1.1)),
    "on-policy ratio": Objective(ratio=RatioConfig(proximal="current")),
    "k1": Objective(kl=KLConfig(weight=0.1, estimator="k1")),
    "k3 unbiased": Objective(kl=KLConfig(weight=0.1, estimator="k3_unbiased")),
    "entropy": Objective(entropy_weight=0.1),
    "token TIS": Objective(ratio=RECOMPUTED, correction=CorrectionConfig(weight="token", high=1.2)),
    "token MIS": Objective(
        ratio=RECOMPUTED, correction=CorrectionConfig(weight="token", low=0.8, high=1.2, outside="mask")
    ),
    "sequence TIS": Objective(ratio=RECOMPUTED, correction=CorrectionConfig(weight="sequence", high=1.2)),
    "sequence MIS": Objective(ratio=RECOMPUTED, correction=CorrectionConfig(weight="sequence", outside="mask")),
    "geometric": Objective(ratio=RECOMPUTED, correction=CorrectionConfig(geometric_low=0.8, geometric_high=1.1)),
    "sequence error": Objective(ratio=RECOMPUTED, correction=CorrectionConfig(sequence_error_threshold=1.3)),
    "on-policy ratio with TIS": Objective(
        ratio=RatioConfig(proximal="current"), correction=CorrectionConfig(weight="token")
    ),
}
STOPPED = {"cispo", "on-policy ratio", "rloo", "on-policy ratio with TIS"}
"""Objectives whose value is not what their gradient is of: a factor is taken as constant."""

every_objective = pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES.keys())


def make_examples(seed, *, rows=5, tokens=6, density=0.6):
    """Random rows in float64 with log-probabilities that differ by up to some tenths, and ragged masks."""
    generator = torch.Generator().manual_seed(seed)

    def noise():
        return torch.randn(rows, tokens, generator=generator, dtype=torch.float64)

    trainable = torch.rand(rows, tokens, generator=generator) < density
    trainable[:, 0] = False
    logp = -1.0 - noise().abs()
    examples = Examples(
        tokens=torch.randint(0, 9, (rows, tokens), generator=generator),
        lengths=torch.full((rows,), tokens),
        trainable=trainable,
        advantage=noise(),
        logp_old=logp + 0.2 * noise(),
        logp_proximal=logp + 0.2 * noise(),
        logp_ref=logp + 0.2 * noise(),
    )
    return logp, noise().abs(), examples


def output_of(logp, entropy, objective):
    return torch.stack([logp, entropy], -1) if objective.entropy_weight else logp


def evaluate(logp, entropy, examples, objective, counts):
    """Loss, its gradient in log-probabilities and entropies, and sums."""
    logp, entropy = logp.clone().requires_grad_(), entropy.clone().requires_grad_()
    total, sums = loss(output_of(logp, entropy, objective), examples, objective=objective, counts=counts)
    (total + 0.0 * (logp[:0].sum() + entropy[:0].sum())).backward()
    return total.detach(), torch.stack([_grad(logp), _grad(entropy)]), sums


def _grad(leaf):
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def rows_of(examples, rows):
    return Examples(**{f.name: getattr(examples, f.name)[rows] for f in dataclasses.fields(examples)})


def assert_same(one, other):
    torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-10)


@every_objective
@given(seed=st.integers(0, 10**6), cut=st.integers(1, 5), density=st.sampled_from([0.1, 0.6, 1.0]))
def test_no_cut_of_a_step_changes_it(objective, seed, cut, density):
    """Microbatches and data-parallel ranks are both a cut by rows; the parts add up."""
    logp, entropy, examples = make_examples(seed, density=density)
    counts = Counts.of(examples.trainable)
    total, gradient, sums = evaluate(logp, entropy, examples, objective, counts)
    parts = [
        evaluate(logp[rows], entropy[rows], rows_of(examples, rows), objective, counts)
        for rows in torch.arange(len(logp)).split(cut)
    ]
    assert_same(sum(part[0] for part in parts), total)
    assert_same(torch.cat([part[1] for part in parts], dim=1), gradient)
    for name, value in sums.items():
        assert_same(sum(part[2][name] for part in parts), value)


@every_objective
@given(seed=st.integers(0, 10**6), order=st.permutations(range(5)))
def test_the_order_of_rows_does_not_matter(objective, seed, order):
    logp, entropy, examples = make_examples(seed)
    counts = Counts.of(examples.trainable)
    total, gradient, _ = evaluate(logp, entropy, examples, objective, counts)
    moved, moved_gradient, _ = evaluate(logp[order], entropy[order], rows_of(examples, order), objective, counts)
    assert_same(moved, total)
    assert_same(moved_gradient, gradient[:, order])


@every_objective
@given(seed=st.integers(0, 10**6), left=st.integers(0, 3), right=st.integers(0, 3))
def test_padding_on_either_side_does_not_matter(objective, seed, left, right):
    """Nor does packing: to the loss, a packed row's other answers are tokens off the mask."""
    logp, entropy, examples = make_examples(seed)
    counts = Counts.of(examples.trainable)
    total, gradient, sums = evaluate(logp, entropy, examples, objective, counts)

    def padded(tensor, value):
        return torch.nn.functional.pad(tensor, (left, right), value=value)

    wide = Examples(
        tokens=padded(examples.tokens, 0),
        lengths=examples.lengths,
        trainable=padded(examples.trainable, value=False),
        **{
            name: padded(getattr(examples, name), math.nan)
            for name in ("advantage", "logp_old", "logp_proximal", "logp_ref")
        },
    )
    found = evaluate(padded(logp, math.nan), padded(entropy, math.nan), wide, objective, counts)
    assert_same(found[0], total)
    assert_same(found[1][..., left : left + logp.shape[1]], gradient)
    assert not found[1][..., :left].any()
    for name, value in sums.items():
        assert_same(found[2][name], value)


@every_objective
@given(seed=st.integers(0, 10**6), nonsense=st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
def test_nothing_off_the_mask_matters(objective, seed, nonsense):
    logp, entropy, examples = make_examples(seed)
    counts = Counts.of(examples.trainable)
    expected = evaluate(logp, entropy, examples, objective, counts)

    def spoilt(tensor):
        return torch.where(examples.trainable, tensor, nonsense)

    names = ("advantage", "logp_old", "logp_proximal", "logp_ref")
    dirty = dataclasses.replace(examples, **{name: spoilt(getattr(examples, name)) for name in names})
    found = evaluate(spoilt(logp), spoilt(entropy), dirty, objective, counts)
    assert_same(found[0], expected[0])
    assert_same(found[1], expected[1])
    assert not found[1][:, ~examples.trainable].any()


@every_objective
@given(seed=st.integers(0, 10**6), density=st.sampled_from([0.0, 0.05, 0.3]), rows=st.integers(0, 3))
def test_no_mask_makes_a_nan(objective, seed, density, rows):
    logp, entropy, examples = make_examples(seed, rows=rows, density=density)
    total, gradient, sums = evaluate(logp, entropy, examples, objective, Counts.of(examples.trainable))
    assert total.isfinite()
    assert gradient.isfinite().all()
    assert all(value.isfinite() for value in sums.values())


@pytest.mark.parametrize("name", sorted(set(OBJECTIVES) - STOPPED))
@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_is_that_of_the_value_by_finite_differences(name, seed):
    objective = OBJECTIVES[name]
    logp, entropy, examples = make_examples(seed)
    if objective.ratio.level == "sequence":  # of other advantages than the row's the ratio has another gradient
        examples = dataclasses.replace(examples, advantage=examples.advantage[:, :1].expand_as(logp))
    counts = Counts.of(examples.trainable)
    _, gradient, _ = evaluate(logp, entropy, examples, objective, counts)
    value = functools.partial(loss, examples=examples, objective=objective, counts=counts)
    for channel, row, token in torch.cartesian_prod(torch.arange(2), *map(torch.arange, logp.shape)).tolist():
        moved = []
        for sign in (1, -1):
            pair = [logp.clone(), entropy.clone()]
            pair[channel][row, token] += sign * 1e-6
            moved.append(value(output_of(*pair, objective))[0])
        measured = ((moved[0] - moved[1]) / 2e-6).item()
        assert measured == pytest.approx(gradient[channel, row, token].item(), abs=1e-8), (channel, row, token)


def test_cispo_weighs_reinforce_by_the_clipped_ratio():
    logp, entropy, examples = make_examples(3)
    objective, counts = OBJECTIVES["cispo"], Counts.of(examples.trainable)
    _, gradient, _ = evaluate(logp, entropy, examples, objective, counts)
    weight = (logp - examples.logp_old).exp().clamp(max=1.3)
    expected = torch.where(examples.trainable, -weight * examples.advantage / counts.tokens, 0.0)
    assert_same(gradient[0], expected)


@pytest.mark.parametrize("name", sorted(set(OBJECTIVES) - {"k1", "k3 unbiased", "entropy"}))
def test_the_first_step_is_on_policy(name):
    """The ratio is 1 to the last bit, nothing is clipped or corrected, and the gradient is REINFORCE's."""
    objective = dataclasses.replace(OBJECTIVES[name], kl=KLConfig())
    logp, entropy, examples = make_examples(5)
    examples = dataclasses.replace(examples, logp_old=logp, logp_proximal=logp)
    counts = Counts.of(examples.trainable)
    _, gradient, sums = evaluate(logp, entropy, examples, objective, counts)
    assert sums["ratio"].item() == counts.tokens
    assert sums["clip_fraction"].item() == 0
    assert sums["kl_engine"].item() == 0.0
    assert sums["token_mult_prob_error"].item() == counts.tokens
    if objective.correction.active:
        assert sums["importance_weight"].item() == counts.tokens
        assert sums["rejected_fraction"].item() == 0
    plain = dataclasses.replace(
        objective, ratio=RatioConfig(surrogate="reinforce", proximal="recomputed"), correction=CorrectionConfig()
    )
    assert_same(gradient, evaluate(logp, entropy, examples, plain, counts)[1])


@pytest.mark.parametrize(
    ("advantage", "ratio", "free"),
    [(1.0, 1.5, False), (1.0, 0.5, True), (-1.0, 0.5, False), (-1.0, 1.5, True), (1.0, 1.1, True), (-1.0, 0.9, True)],
)
def test_a_clipped_token_has_no_gradient(advantage, ratio, free):
    """A good token that is likely enough, a bad one that is unlikely enough; the clip keeps none from coming back."""
    logp = torch.full((1, 2), math.log(ratio), dtype=torch.float64)
    _, _, examples = make_examples(0, rows=1, tokens=2)
    examples = dataclasses.replace(
        examples,
        trainable=torch.tensor([[False, True]]),
        advantage=torch.full_like(logp, advantage),
        logp_old=torch.zeros_like(logp),
    )
    _, gradient, sums = evaluate(logp, logp, examples, Objective(), Counts(tokens=1, sequences=1))
    assert gradient[0, 0, 1].item() == pytest.approx(-advantage * ratio if free else 0.0)
    assert sums["clip_fraction"].item() == (0 if free else 1)


def test_dual_clip_bounds_what_a_bad_token_that_became_likely_weighs():
    logp = torch.full((1, 2), math.log(12.0), dtype=torch.float64)
    _, _, examples = make_examples(0, rows=1, tokens=2)
    examples = dataclasses.replace(
        examples,
        trainable=torch.tensor([[False, True]]),
        advantage=torch.full_like(logp, -1.0),
        logp_old=torch.zeros_like(logp),
    )
    counts = Counts(tokens=1, sequences=1)
    free, steep, _ = evaluate(logp, logp, examples, Objective(), counts)
    held, flat, _ = evaluate(logp, logp, examples, Objective(ratio=RatioConfig(dual_clip=3.0)), counts)
    assert (free.item(), steep[0, 0, 1].item()) == (pytest.approx(12.0), pytest.approx(12.0))
    assert (held.item(), flat[0, 0, 1].item()) == (3.0, 0.0)


def test_a_rejected_token_takes_its_gradient_away_and_not_its_place_in_the_count():
    logp, entropy, examples = make_examples(4)
    strict = Objective(ratio=RECOMPUTED, correction=CorrectionConfig(sequence_error_threshold=1.0 + 1e-9))
    counts = Counts.of(examples.trainable)
    total, gradient, sums = evaluate(logp, entropy, examples, strict, counts)
    assert total.item() == 0.0
    assert not gradient.any()
    assert sums["rejected_fraction"].item() == counts.tokens


def test_gspo_is_one_ratio_for_an_answer_and_reaches_all_of_its_tokens():
    logp, entropy, examples = make_examples(6, density=1.0)
    examples = dataclasses.replace(examples, advantage=examples.advantage[:, :1].expand_as(logp))
    counts = Counts.of(examples.trainable)
    _, gradient, _ = evaluate(logp, entropy, examples, presets.gspo(clip_low=0.9, clip_high=9.0), counts)
    ratio = (logp - examples.logp_old)[:, 1:].mean(1).exp()
    expected = -ratio * examples.advantage[:, 0] / 5 / counts.sequences
    assert_same(gradient[0, :, 1:], expected[:, None].expand(-1, 5))


def test_a_token_of_a_sequence_ratio_has_its_own_advantage_and_correction():
    """GSPO-token: a token of advantage 0, or of weight 0, has no gradient of its neighbours'."""
    logp, entropy, examples = make_examples(6, density=1.0)
    advantage = torch.where(torch.arange(6) == 2, 0.0, examples.advantage)
    examples = dataclasses.replace(examples, advantage=advantage)
    counts = Counts.of(examples.trainable)
    _, gradient, _ = evaluate(logp, entropy, examples, presets.gspo(clip_low=0.9, clip_high=9.0), counts)
    ratio = (logp - examples.logp_old)[:, 1:].mean(1, keepdim=True).exp()
    assert_same(gradient[0, :, 1:], (-ratio * advantage / 5 / counts.sequences)[:, 1:])
    assert not gradient[0, :, 2].any()


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_the_entropy_bonus_is_of_the_mean_over_tokens_whatever_the_aggregation(aggregation):
    logp, entropy, examples = make_examples(2)
    counts = Counts.of(examples.trainable)
    plain = Objective(aggregation=aggregation)
    with_bonus = dataclasses.replace(plain, entropy_weight=0.1)
    total, gradient, _ = evaluate(logp, entropy, examples, with_bonus, counts)
    mean = entropy[examples.trainable].mean()
    assert_same(total, evaluate(logp, entropy, examples, plain, counts)[0] - 0.1 * mean)
    assert_same(gradient[1], examples.trainable * torch.tensor(-0.1 / counts.tokens, dtype=torch.float64))
    assert "- 0.1 * sum_i sum_t H / N_tok" in with_bonus.explain()
    assert "N_tok trainable tokens" in with_bonus.explain()


def test_what_a_correction_rejects_may_be_infinite():
    logp, entropy, examples = make_examples(4, density=1.0)
    logp[0, 2] = -math.inf  # the policy now rules out what was sampled
    strict = Objective(ratio=RECOMPUTED, correction=CorrectionConfig(sequence_error_threshold=1.0 + 1e-9))
    reinforce = dataclasses.replace(strict, ratio=RatioConfig(surrogate="reinforce", proximal="recomputed"))
    total, gradient, _ = evaluate(logp, entropy, examples, reinforce, Counts.of(examples.trainable))
    assert total.item() == 0.0
    assert not gradient.any()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: RatioConfig(clip_low=1.5), "clip_low=1.5 must be between 0 and 1"),
        (lambda: RatioConfig(clip_high=0.0), "clip_high=0.0 must be > 0"),
        (lambda: RatioConfig(surrogate="reinforce", dual_clip=3.0), "dual_clip=3.0 bounds surrogate='clip'"),
        (lambda: RatioConfig(dual_clip=1.0), "dual_clip=1.0 must be > 1"),
        (lambda: RatioConfig(surrogate="reinforce", level="sequence"), "level='sequence' is of a ratio"),
        (lambda: KLConfig(weight=-1.0), "weight=-1.0 must be >= 0"),
        (lambda: KLConfig(place="reward", estimator="k3_unbiased"), "differs from 'k3' in its gradient alone"),
        (lambda: CorrectionConfig(weight="token", low=3.0), "low=3.0 and high=2.0"),
        (lambda: CorrectionConfig(geometric_low=1.1), "on either side of 1"),
        (lambda: CorrectionConfig(sequence_error_threshold=1.0), "must be > 1, full agreement"),
        (lambda: Objective(correction=CorrectionConfig(weight="token")), "every weight would be 1"),
        (lambda: Objective(aggregation="seq-mean-token-sum-norm"), "max_length=None"),
        (lambda: Objective(max_length=5), "belongs to 'seq-mean-token-sum-norm'"),
        (lambda: Objective(entropy_weight=-0.1), "entropy_weight=-0.1"),
        (
            lambda: Objective(advantage=AdvantageConfig(baseline="none", scale="none")),
            "throw away those of equal ones",
        ),
        (lambda: AdvantageConfig(baseline="none"), "equal rewards would be divided by a std of 0"),
        (
            lambda: AdvantageConfig(baseline="none", scale="none", whiten="sequences"),
            "whiten='sequences' is of one number for each answer",
        ),
        (lambda: AdvantageConfig(reward_weights={"a": 1.0}), "normalize_each_reward is false"),
        (lambda: AdvantageConfig(normalize_each_reward=True, scale="none"), "is GDPO"),
        (lambda: SelectionConfig(groups_without_signal="keep", max_generation_batches=2), "ask once"),
        (lambda: grpo.GRPOConfig(max_num_steps=3, steps_per_generation=2), "must be a multiple of"),
        (lambda: grpo.GRPOConfig(max_num_steps=1, num_generations_per_prompt=1), "a group of one has advantage 0"),
        (
            lambda: grpo.GRPOConfig(
                max_num_steps=2, steps_per_generation=2, objective=Objective(ratio=RatioConfig(proximal="current"))
            ),
            "takes no notice",
        ),
        (
            lambda: grpo.GRPOConfig(max_num_steps=4, steps_per_generation=4, objective=presets.rloo()),
            "of which objective.ratio.surrogate='reinforce' takes no notice",
        ),
    ],
)
def test_what_means_nothing_is_refused_by_name(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@every_objective
def test_explain_says_the_formula(objective):
    text = objective.explain()
    assert all(len(line) < 160 for line in text.splitlines())
    assert "L = " in text
    assert ("logp_ref" in text) == (objective.kl.weight > 0)
    assert ("min(rho A" in text) == (objective.ratio.surrogate == "clip")
    assert ("correction" in text) == objective.correction.active


def test_explain_says_what_k1_in_the_loss_is_worth_and_what_gdpo_does_not_scale():
    assert "the expected gradient of k1 in the loss is 0 on-policy" in OBJECTIVES["k1"].explain()
    assert "note" not in presets.rloo().explain()
    penalised = dataclasses.replace(presets.gdpo(), overlong=OverlongConfig(max_length=9, buffer=2))
    assert "+ (R - r) - mean(R - r of the group)" in penalised.explain()
    assert "R - r" not in presets.gdpo().explain()


def test_explain_of_dapo_reads_as_its_paper():
    assert presets.dapo(max_length=20480, overlong_buffer=4096).explain().splitlines() == [
        (
            "rollouts    groups with rewards that differ; the others leave the batch and its counts; up to 10 "
            "batches of prompts are asked to find enough"
        ),
        "reward      R = r - 1 * clip((tokens - 16384) / 4096, 0, 1)",
        "advantage   A = (R - mean(R of the group)) / (std(R of the group) + 1e-06)",
        "ratio       rho = exp(logp - logp_old)",
        "per token   l = -min(rho A, clip(rho, 0.8, 1.28) A)",
        "loss        L = sum_i sum_t l / N_tok",
        "counts      N_tok trainable tokens of the whole optimizer step, over all ranks and microbatches",
    ]
