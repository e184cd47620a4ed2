"""Objectives are open: a piece is a name, a function in a file or a function, and everything sees which one it is."""

import dataclasses
import hashlib
import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_algorithms import advantages, grpo, losses, presets
from rl_algorithms.corrections import CorrectionConfig
from rl_algorithms.losses import Counts
from rl_algorithms.objective import AdvantageConfig, KLConfig, Objective, RatioConfig, SelectionConfig
from rl_algorithms.pieces import KINDS, find, piece, registered, source_digest
from rl_algorithms.policy_gradient import Examples, loss, select_tokens

GMPO = '''"""GMPO (arXiv:2507.20673): the geometric mean of a response's clipped ratios."""

import torch


def gmpo(log_ratio, advantage, mask, *, clip_low, clip_high, power=1.0):
    """-A times the geometric mean of the clipped ratio"""
    held = log_ratio.clamp(-clip_low, clip_high)
    kept = torch.where(advantage > 0, torch.minimum(log_ratio, held), torch.maximum(log_ratio, held))
    mean = torch.where(mask, kept, 0.0).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return -advantage * (power * mean).exp()


def scaled(rewards, groups):
    """R / 2"""
    return rewards.double() / 2


def square(logp, logp_ref):
    """(logp - logp_ref)^2"""
    return (logp - logp_ref) ** 2


def every_token(mask, counts):
    """sum_i sum_t l"""
    return mask.double()


def half(log_weight):
    """sqrt(w)"""
    return (log_weight / 2).exp()


def first_three(mask):
    """the first three"""
    return mask.cumsum(1) <= 3


def length_ratio(log_ratio, mask):
    """exp(sum / sqrt(T))"""
    mean = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1).sqrt()
    return torch.where(mask, mean, 0.0).exp()


def misspelt(ratio, advantages):
    """no such input"""
'''


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "gmpo.py"
    path.write_text(GMPO)
    return str(path)


def own_everything(file):
    """An objective whose every piece is of the user's file."""
    return Objective(
        advantage=AdvantageConfig(estimator=f"{file}:scaled"),
        ratio=RatioConfig(surrogate="clip", level=f"{file}:length_ratio", proximal="recomputed"),
        correction=CorrectionConfig(weight=f"{file}:half", high=1.5),
        kl=KLConfig(weight=0.1, estimator=f"{file}:square"),
        selection=SelectionConfig(tokens=f"{file}:first_three"),
        aggregation=f"{file}:every_token",
    )


def make_step(seed, *, rows=5, tokens=6):
    generator = torch.Generator().manual_seed(seed)

    def noise():
        return torch.randn(rows, tokens, generator=generator, dtype=torch.float64)

    trainable = torch.rand(rows, tokens, generator=generator) < 0.6
    trainable[:, 0] = False
    trainable[1] = False  # an empty response
    logp, hidden = -1.0 - noise().abs(), torch.where(trainable, 0.0, torch.nan)
    examples = Examples(
        tokens=torch.zeros(rows, tokens, dtype=torch.int64),
        lengths=torch.full((rows,), tokens),
        trainable=trainable,
        advantage=noise()[:, :1] + hidden,
        logp_old=logp + 0.3 * noise() + hidden,
        logp_proximal=logp + 0.3 * noise() + hidden,
        logp_ref=logp + 0.3 * noise() + hidden,
    )
    return logp, noise().abs(), examples


def evaluate(objective, logp, entropy, examples, counts):
    leaf = logp.clone().requires_grad_()
    output = torch.stack([leaf, entropy], -1) if objective.needs_entropy else leaf
    total, sums = loss(output, examples, objective=objective, counts=counts)
    (total + 0.0 * leaf.sum()).backward()
    return total.detach(), leaf.grad, sums


def taken(examples, rows):
    return type(examples)(**{f.name: getattr(examples, f.name)[rows] for f in dataclasses.fields(examples)})


def padded(examples, left, right):
    def pad(tensor):
        if tensor.ndim == 1:
            return tensor
        value = torch.nan if tensor.is_floating_point() else 0
        return torch.nn.functional.pad(tensor, (left, right), value=value)

    return type(examples)(**{f.name: pad(getattr(examples, f.name)) for f in dataclasses.fields(examples)})


FIELD = {name: presets.preset(name) for name in presets.preset_names() if name != "dr_grpo"}
FIELD["veto"] = Objective(
    ratio=RatioConfig(proximal="recomputed"), correction=CorrectionConfig(weight="geometric", veto=0.7)
)
FIELD["clip_cov"] = presets.preset("clip_cov", share=0.2, low=0.0)
FIELD["kl_cov"] = presets.preset("kl_cov", share=0.2)


@pytest.mark.parametrize("name", [*FIELD, "own"])
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_no_cut_order_or_padding_changes_any_objective(name, tmp_path_factory, data):
    """Packing too: to the loss a packed row's other responses are tokens off the mask."""
    if name == "own":
        path = tmp_path_factory.getbasetemp() / "own_pieces.py"
        path.write_text(GMPO)
    objective = own_everything(path) if name == "own" else FIELD[name]
    logp, entropy, examples = make_step(data.draw(st.integers(0, 10**6)))
    counts = Counts.of(examples.trainable)
    whole = select_tokens(examples, objective)
    total, gradient, sums = evaluate(objective, logp, entropy, whole, counts)

    parts = torch.arange(len(logp)).split(data.draw(st.integers(1, 4)))
    cut = [evaluate(objective, logp[rows], entropy[rows], taken(whole, rows), counts) for rows in parts]
    close = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(sum(part[0] for part in cut), total, **close)
    torch.testing.assert_close(torch.cat([part[1] for part in cut]), gradient, **close)
    for key, value in sums.items():
        torch.testing.assert_close(sum(part[2][key] for part in cut), value, **close)

    order = data.draw(st.permutations(range(len(logp))))
    moved = evaluate(objective, logp[order], entropy[order], select_tokens(taken(examples, order), objective), counts)
    torch.testing.assert_close(moved[0], total, **close)
    torch.testing.assert_close(moved[1], gradient[order], **close)

    left, right = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    wide = [torch.nn.functional.pad(each, (left, right), value=torch.nan) for each in (logp, entropy)]
    wider = evaluate(objective, *wide, select_tokens(padded(examples, left, right), objective), counts)
    torch.testing.assert_close(wider[0], total, **close)
    torch.testing.assert_close(wider[1][:, left : left + logp.shape[1]].nan_to_num(), gradient, **close)


# -- How a piece is named ------------------------------------------------------------------------------------------


def test_a_surrogate_of_the_users_file_is_computed_explained_and_recorded(file):
    own = Objective(ratio=RatioConfig(surrogate=f"{file}:gmpo", clip_low=0.4, clip_high=0.4), selection=KEEP)
    shipped = presets.preset("gmpo", aggregation="token-mean")
    logp, entropy, examples = make_step(0)
    counts = Counts.of(examples.trainable)
    for one, other in zip(
        evaluate(own, logp, entropy, examples, counts)[:2],
        evaluate(shipped, logp, entropy, examples, counts)[:2],
        strict=True,
    ):
        torch.testing.assert_close(one, other)
    said = "l = gmpo(log_ratio, advantage, mask, clip_low=0.4, clip_high=0.4, power=1): -A times the geometric mean"
    assert said in own.explain()
    assert own.named_code() == {"ratio.surrogate": f"{file}:gmpo"}
    assert source_digest(f"{file}:gmpo") == hashlib.sha256(GMPO.encode()).hexdigest()


KEEP = SelectionConfig(groups_without_signal="keep")


def test_every_part_of_an_objective_may_be_of_the_users_file(file):
    objective = own_everything(file)
    assert set(objective.named_code()) == {
        "advantage.estimator", "ratio.level", "correction.weight", "kl.estimator", "selection.tokens", "aggregation",
    }  # fmt: skip
    text = objective.explain()
    for formula in (
        "R / 2",
        "exp(sum / sqrt(T))",
        "sqrt(w)",
        "(logp - logp_ref)^2",
        "the first three",
        "sum_i sum_t (l + 0.1 *",
    ):
        assert formula in text


def test_a_function_itself_is_a_piece_and_its_options_are_set_by_name(file):
    def mine(ratio, advantage, *, power=2.0):
        """-rho^power A"""
        return -(ratio**power) * advantage

    objective = Objective(ratio=RatioConfig(surrogate=mine, options={"power": 3.0}), selection=KEEP)
    logp, entropy, examples = make_step(1)
    total, _, _ = evaluate(objective, logp, entropy, examples, Counts.of(examples.trainable))
    mask = examples.trainable
    ratio = (logp - examples.logp_old)[mask].exp()
    torch.testing.assert_close(total, -(ratio**3 * examples.advantage[mask]).mean())
    assert "mine(ratio, advantage, power=3): -rho^power A" in objective.explain()


def test_a_decorated_piece_has_a_name_a_formula_with_its_numbers_and_refusals():
    @piece(
        "surrogate",
        "test_only_flat",
        formula="-{scale:g} A rho",
        source="nowhere",
        refuse=lambda scale: None if scale > 0 else f"scale={scale} must be > 0",
    )
    def flat(ratio, advantage, *, scale=1.0):
        return -scale * advantage * ratio

    objective = Objective(ratio=RatioConfig(surrogate="test_only_flat", options={"scale": 3.0}))
    assert "l = -3 A rho" in objective.explain()
    with pytest.raises(ValueError, match=r"scale=-1.0 must be > 0"):
        RatioConfig(surrogate="test_only_flat", options={"scale": -1.0})
    assert find("surrogate", flat) is registered("surrogate")["test_only_flat"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda file: RatioConfig(surrogate="clpi"), "'clpi' is no surrogate; did you mean 'clip'.*file.py:function"),
        (lambda file: RatioConfig(surrogate=f"{file}:gmp"), "no function 'gmp'; did you mean 'gmpo'"),
        (
            lambda file: RatioConfig(surrogate=f"{file[:-3]}s.py:gmpo"),
            "there is no file gmpos.py in .*did you mean gmpo.py",
        ),
        (lambda file: RatioConfig(surrogate="no_such_package:f"), "there is no module no_such_package"),
        (lambda file: RatioConfig(surrogate=f"{file}:misspelt"), "asks for 'advantages'; did you mean 'advantage'"),
        (lambda file: RatioConfig(options={"tau": 1.0}), "'tau' is no option of surrogate 'clip'.*it has none"),
        (
            lambda file: RatioConfig(surrogate="sapo", options={"tau_negativ": 1.0}),
            "did you mean 'tau_negative'.*it has tau_positive, tau_negative",
        ),
        (lambda file: RatioConfig(surrogate="sapo", clip_high=0.3), "clip_high=0.3 has no effect.*'sapo'"),
        (lambda file: RatioConfig(surrogate="sapo", options={"tau_positive": 0.0}), "tau_positive=0.0 must be > 0"),
        (lambda file: RatioConfig(surrogate="gmpo", level="sequence"), "makes its own of the log-probabilities"),
        (lambda file: RatioConfig(level="tokens"), "level='tokens': 'tokens' is no ratio; did you mean 'token'"),
        (lambda file: AdvantageConfig(estimator="opo", scale="none"), "scale=none has no effect: estimator='opo'"),
        (lambda file: AdvantageConfig(estimator="pass_at_k", options={"k": 1.5}), "k=1.5 must be a whole number"),
        (lambda file: KLConfig(estimator="k4"), "'k4' is no kl"),
        (lambda file: CorrectionConfig(weight="tokens"), "weight='tokens': .*did you mean 'token'"),
        (lambda file: CorrectionConfig(veto=2.0), "veto=2.0 must be between 0 and 1"),
        (lambda file: SelectionConfig(token_options={"share": 0.1}), "of tokens, which is null"),
        (lambda file: Objective(ratio=RatioConfig(surrogate="kl_cov")), "does not say which; set it to 'top_cov'"),
        (lambda file: Objective(aggregation="token_mean"), "'token_mean' is no aggregation; did you mean 'token-mean'"),
        (lambda file: Objective(preset="gspo"), "call rl_algorithms.presets.preset"),
        (lambda file: presets.preset("gspoo"), "there is no preset 'gspoo'; did you mean 'gspo'"),
        (lambda file: presets.preset("gspo", clip_hihg=1.0), "there is no 'clip_hihg'; did you mean 'clip_high'"),
        (lambda file: presets.preset("gspo", kl={"wieght": 1.0}), "there is no 'wieght'; did you mean 'weight'"),
        (lambda file: presets.preset("dr_grpo"), "preset 'dr_grpo' needs max_length"),
        (
            lambda file: grpo.GRPOConfig(max_num_steps=2, steps_per_generation=2, objective=presets.preset("gpg")),
            "objective.ratio.surrogate='reinforce' takes no notice",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(make, words, file):
    with pytest.raises(ValueError, match=words):
        make(file)


def test_a_file_that_raises_names_itself(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("1 / 0")
    with pytest.raises(ValueError, match=r"importing .*bad.py raised ZeroDivisionError"):
        RatioConfig(surrogate=f"{bad}:f")


def test_a_loss_of_a_loop_of_ones_own_is_given_to_the_step():
    """`loss=` replaces the objective's whole."""
    logp, _, examples = make_step(3)
    seen = {}

    class Policy:
        def logp(self, examples):
            raise NotImplementedError

        def forward_backward(self, examples, bound):
            value, sums = bound(logp, examples)
            seen["value"] = value
            return sums

        def optim_step(self):
            return 1.0

    def mine(logp, examples, *, objective, counts):
        total = -torch.where(examples.trainable, logp, 0.0).sum() / counts.tokens
        return total, {"loss": total}

    metrics = grpo.step(Policy(), examples, Objective(), loss=mine)
    torch.testing.assert_close(seen["value"], -logp[examples.trainable].mean())
    assert metrics == {"grad_norm": 1.0, "loss": pytest.approx(seen["value"].item())}


def test_a_piece_that_looks_at_the_step_is_not_asked_about_a_part_of_it():
    logp, entropy, examples = make_step(4)
    with pytest.raises(ValueError, match="give the step's examples to select_tokens"):
        evaluate(FIELD["clip_cov"], logp, entropy, examples, Counts.of(examples.trainable))


def test_every_kind_has_pieces_with_a_formula_and_a_source():
    for kind in KINDS:
        assert registered(kind)
        assert all(each.source for each in registered(kind).values() if "test_only" not in each.name)


# -- Closed forms --------------------------------------------------------------------------------------------------


def row(*values):
    return torch.tensor([values], dtype=torch.float64)


ALL = torch.ones(1, 2, dtype=torch.bool)


def test_the_gate_of_sapo_at_ratio_one_is_reinforce():
    ratio = row(1.0, 1.0).requires_grad_()
    per_token = losses.sapo(ratio, row(2.0, -3.0), tau_positive=1.0, tau_negative=2.0)
    assert per_token.tolist() == [[-4.0, 3.0]]  # 4 / tau * s(0) = 2 / tau
    (gradient,) = torch.autograd.grad(per_token.sum(), ratio)
    assert gradient.tolist() == [[-2.0, 3.0]]


def test_gmpo_is_the_geometric_mean_of_ratios_clipped_on_the_side_that_the_advantage_pushes():
    log_ratio = row(0.2, 0.9)
    assert losses.gmpo(log_ratio, row(1.0, 1.0), ALL)[0][0, 0].item() == pytest.approx(-math.exp((0.2 + 0.4) / 2))
    assert losses.gmpo(log_ratio, row(-1.0, -1.0), ALL)[0][0, 0].item() == pytest.approx(math.exp((0.2 + 0.9) / 2))
    assert losses.gmpo(-log_ratio, row(-1.0, -1.0), ALL)[0][0, 0].item() == pytest.approx(math.exp(-(0.2 + 0.4) / 2))


def test_vespo_weighs_by_the_ratio_of_the_whole_row_and_by_one_on_policy():
    logp = row(-1.0, -2.0)
    assert losses.vespo(logp, row(0.0, 0.0), row(1.0, 1.0)).tolist() == [[1.0, 2.0]]
    w = math.exp(0.3)
    expected = math.exp(3.0 - 3.0 * w) * w**2
    found = losses.vespo(logp, row(0.1, 0.2), row(1.0, 1.0))
    torch.testing.assert_close(found, row(expected, 2 * expected))


def test_dppo_stops_a_token_whose_probability_moved_too_far_the_way_it_is_pushed():
    new, old = row(0.9, 0.1).log(), row(0.1, 0.9).log()
    ratio = (new - old).exp()
    per_token, stopped = losses.dppo_tv(new, old, ratio=ratio, advantage=row(1.0, 1.0))
    assert stopped.tolist() == [[True, False]]
    torch.testing.assert_close(per_token, row(0.0, -(0.1 / 0.9) * math.log(0.1)))
    assert losses.dppo_tv(new, old, ratio=ratio, advantage=row(-1.0, -1.0))[1].tolist() == [[False, True]]


def test_the_covariance_pieces_take_the_tokens_of_largest_covariance():
    logp, advantage = row(-1.0, -2.0, -3.0, -4.0), row(3.0, 0.0, 0.0, -3.0)
    mask = torch.ones(1, 4, dtype=torch.bool)  # covariances 4.5, 0, 0, 4.5: equal ones are taken together
    assert losses.top_cov(logp, advantage, mask, share=0.25).tolist() == [[True, False, False, True]]
    assert losses.clip_cov(logp, advantage, mask, share=0.25).tolist() == [[False, True, True, False]]
    assert losses.clip_cov(logp, advantage, mask, share=0.25, high=4.0).all()
    found = losses.kl_cov(
        row(0.5, 0.5), row(2.0, 2.0), row(1.0, 1.0), selected=torch.tensor([[True, False]]), kl_weight=3.0
    )
    assert found.tolist() == [[-0.5, -2.0]]


def test_the_tokens_of_highest_entropy_are_taken_in_each_row():
    entropy = torch.tensor([[0.1, 0.9, 0.5, 0.7], [0.2, 0.1, 9.0, 9.0]])
    mask = torch.tensor([[True] * 4, [True, True, False, False]])
    assert losses.high_entropy(entropy, mask, share=0.5).tolist() == [
        [False, True, False, True],
        [True, False, False, False],
    ]


GROUPS = torch.tensor([0, 0, 0, 0])


def test_opo_weighs_the_baseline_by_length():
    found = advantages.opo(torch.tensor([1.0, 0.0, 0.0, 1.0]), GROUPS, torch.tensor([1, 2, 3, 4]))
    assert found.tolist() == pytest.approx([0.5, -0.5, -0.5, 0.5])
    found = advantages.opo(torch.tensor([1.0, 0.0, 0.0, 0.0]), GROUPS, torch.tensor([4, 2, 1, 1]))
    assert found.tolist() == pytest.approx([0.5, -0.5, -0.5, -0.5])


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_pass_at_k_is_the_mean_advantage_over_all_subsets(k):
    """By enumeration: each subset is rewarded if one of it is right, all of its members get that, normalised."""
    import itertools

    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 1.0])
    groups = torch.zeros(6, dtype=torch.int64)
    subsets = list(itertools.combinations(range(6), k))
    passed = torch.tensor([float(rewards[list(subset)].any()) for subset in subsets], dtype=torch.float64)
    scores = (passed - passed.mean()) / passed.std(correction=0)
    expected = [
        scores[[index for index, subset in enumerate(subsets) if i in subset]].mean().item()
        for i in range(len(rewards))
    ]
    found = advantages.pass_at_k_advantage(rewards, groups, k=float(k))
    assert found.tolist() == pytest.approx(expected)


def test_the_best_gets_what_it_adds_to_the_second_best():
    rewards = torch.tensor([0.0, 1.0, 0.25, 0.25], dtype=torch.float64)
    expected = 0.75 / (rewards.std().item() + 1e-6)
    assert advantages.best_minus_second(rewards, GROUPS).tolist() == pytest.approx([0.0, expected, 0.0, 0.0])
    assert not advantages.best_minus_second(torch.tensor([1.0, 1.0, 0.0, 0.0]), GROUPS).any()


def test_the_optimal_baseline_has_the_least_variance_of_the_first_tokens_gradient():
    """One token, two equally likely answers to score 1 - pi: the baseline is the mean of rewards weighed by that."""
    logp_old = torch.tensor([[0.9], [0.5]], dtype=torch.float64).log()
    found = advantages.optimal_baseline(
        torch.tensor([[1.0], [0.0]], dtype=torch.float64),
        torch.tensor([3, 3]),
        logp_old=logp_old,
        mask=torch.ones(2, 1).bool(),
    )
    baseline = 0.1 * 1.0 / (0.1 + 0.5)
    assert found[:, 0].tolist() == pytest.approx([1 - baseline, -baseline], abs=1e-6)


def test_a_piece_that_returns_another_shape_is_refused_and_not_broadcast():
    def summed(ratio, advantage):
        """sum"""
        return (ratio * advantage).sum()

    logp, entropy, examples = make_step(0)
    objective = Objective(ratio=RatioConfig(surrogate=summed))
    with pytest.raises(ValueError, match=r"surrogate 'summed' returned a tensor of shape \[\]; .* rows by tokens"):
        evaluate(objective, logp, entropy, examples, Counts.of(examples.trainable))


def test_another_surrogate_of_a_preset_keeps_only_the_numbers_that_it_has():
    def soft(ratio, advantage, *, delta=0.2):
        """-A min(rho, 1 + delta)"""
        return -advantage * ratio.clamp(max=1 + delta)

    made = presets.preset("gspo", ratio={"surrogate": soft, "options": {"delta": 0.3}}).ratio
    assert (made.level, made.clip_low, made.options) == ("sequence", RatioConfig().clip_low, {"delta": 0.3})
    assert presets.preset("gspo", ratio={"surrogate": "cispo"}).ratio.clip_high == 4e-4


def test_remax_compares_with_the_greedy_response():
    found = advantages.remax(torch.tensor([1.0, 0.0]), torch.tensor([0.25, 0.25]))
    assert found.tolist() == [0.75, -0.25]


# -- Signal and noise ----------------------------------------------------------------------------------------------


def test_rewards_that_differ_by_rounding_are_no_signal():
    groups = torch.tensor([0, 0, 1, 1, 2, 2])
    rewards = torch.tensor([0.1 + 0.2, 0.3, 1e6, 1e6 + 0.5, 0.3, 0.3 + 2e-6], dtype=torch.float64)
    assert advantages.has_signal(rewards, groups).tolist() == [False, False, False, False, True, True]
    found = advantages.group_advantage(rewards, groups, scale="group_std")
    assert found[:4].tolist() == [0.0] * 4
    assert found[4:].abs().min() > 0.1


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    "function",
    [
        advantages.group_advantage,
        lambda r, g: advantages.group_advantage(r, g, scale="group_std"),
        lambda r, g: advantages.group_advantage(r, g, baseline="none"),
        advantages.has_signal,
        lambda r, g: advantages.gdpo(r[:, None], g, weights=[1.0]),
        lambda r, g: advantages.opo(r, g, g + 1),
        lambda r, g: advantages.pass_at_k_advantage(r, g, k=2.0),
        advantages.best_minus_second,
        lambda r, g: advantages.remax(r, r),
    ],
)
def test_a_reward_that_is_no_number_is_refused_by_every_function(function, value):
    with pytest.raises(ValueError, match=r"the reward of row 1 is (nan|inf), and 1 of 4 rewards"):
        function(torch.tensor([1.0, value, 0.0, 1.0]), GROUPS)


def test_rewards_that_overflow_are_refused_by_name():
    with pytest.raises(ValueError, match=r"a reward of magnitude 1e\+308 overflows"):
        advantages.group_advantage(torch.tensor([1e308, 0.0], dtype=torch.float64), torch.tensor([0, 0]))


def test_an_empty_response_adds_nothing_to_a_loss_and_is_in_no_count():
    logp, entropy, examples = make_step(6)
    rest = torch.tensor([0, 2, 3, 4])  # make_step leaves row 1 without a trainable token
    for name in ("deepseek_grpo", "dapo", "rloo", "gspo"):
        objective = presets.preset(name)
        with_empty = evaluate(objective, logp, entropy, examples, Counts.of(examples.trainable))
        without = taken(examples, rest)
        alone = evaluate(objective, logp[rest], entropy[rest], without, Counts.of(without.trainable))
        torch.testing.assert_close(with_empty[0], alone[0])
        torch.testing.assert_close(with_empty[1][rest], alone[1])


# -- The README ----------------------------------------------------------------------------------------------------


def test_the_readmes_loss_of_ones_own_runs_as_printed(tmp_path, monkeypatch, capsys):
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    section = readme.partition("### A loss of your own")[2].partition("### A reward function")[0]
    file, program = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    (printed,) = re.findall(r"```text\n(.*?)```", section, flags=re.DOTALL)
    assert len(file.splitlines()) <= 15
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gmpo.py").write_text(file)
    exec(program, names := {})
    assert capsys.readouterr().out == printed
    logp, entropy, examples = make_step(8)
    counts = Counts.of(examples.trainable)
    own = evaluate(names["objective"], logp, entropy, examples, counts)
    shipped = evaluate(presets.preset("gmpo"), logp, entropy, examples, counts)
    for one, other in zip(own[:2], shipped[:2], strict=True):
        torch.testing.assert_close(one, other)
    preset = re.search(r'print\(presets\.preset\("gspo".*?\)\.explain\(\)\)', readme).group()
    exec(preset, {"presets": presets})
    assert "0.9997, 1.0005" in capsys.readouterr().out
    assert all(f"`{name}(" in readme for name in presets.preset_names() if not name.endswith("_baseline"))
