"""Claims about reward models."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_algorithms import reward_model
from rl_algorithms.contracts import ScoreModel
from rl_algorithms.preferences.pairs import Pair
from rl_algorithms.preferences.scored import PairExamples, ScoredAnswer, prepare_pairs, prepare_scored, score_sums
from rl_algorithms.stepping import take_rows

PAIRS = [
    Pair(chosen=(2, 3, 1), rejected=(2, 4, 4, 1), prompt_length=1),
    Pair(chosen=(3, 3, 3, 3, 1), rejected=(3, 5, 1), prompt_length=1, margin=1.5),
    Pair(chosen=(2, 5, 1), rejected=(2, 1), prompt_length=1),
]
ANSWERS = [
    ScoredAnswer(tokens=(2, 3, 1), score=1.0),
    ScoredAnswer(tokens=(2, 4, 4, 4, 1), score=-2.0),
    ScoredAnswer(tokens=(3, 5), score=0.5),
    ScoredAnswer(tokens=(5, 5, 1), score=0.0),
]
PLAIN = reward_model.RewardModelConfig(max_num_steps=1)
CASES = [
    (PLAIN, prepare_pairs(PAIRS)),
    (dataclasses.replace(PLAIN, margin_weight=0.0), prepare_pairs(PAIRS)),
    (dataclasses.replace(PLAIN, centering_weight=0.1, label_smoothing=0.2), prepare_pairs(PAIRS)),
    (dataclasses.replace(PLAIN, objective="regression"), prepare_scored(ANSWERS)),
]
every_case = pytest.mark.parametrize(("config", "examples"), CASES, ids=["plain", "no margin", "all", "regression"])


class Scorer:
    """The score of a row is the mean over its tokens of one number a word, plus a bias: linear in what is learnt."""

    def __init__(self, *, lr=1.0, cut=10**9, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.words = (0.3 * torch.randn(7, generator=generator, dtype=torch.float64)).requires_grad_()
        self.lr, self.cut, self.grad = lr, cut, None

    def scores(self, examples):
        filled = torch.arange(examples.tokens.shape[1]) < examples.lengths[:, None]
        said = torch.where(filled, self.words[examples.tokens], 0.0).sum(dim=1)
        return said / examples.lengths + self.words[6]

    @torch.no_grad()
    def score(self, examples):
        return self.scores(examples)

    def forward_backward(self, examples, loss, *, output):
        assert output == "score"
        sums = {}
        for start in range(0, len(examples.tokens), self.cut):
            rows = take_rows(examples, torch.arange(start, min(start + self.cut, len(examples.tokens))))
            value, parts = loss(self.scores(rows), rows)
            value.backward()
            sums = {name: sums.get(name, 0) + part for name, part in parts.items()}
        return sums

    def optim_step(self):
        self.grad, self.words.grad = self.words.grad, None
        with torch.no_grad():
            self.words -= self.lr * self.grad
        return self.grad.norm().item()


def test_the_toy_is_a_score_model():
    assert isinstance(Scorer(), ScoreModel)


def test_the_loss_of_pairs_is_bradley_terry(make_table):
    scorer, examples = Scorer(), prepare_pairs(PAIRS)
    scores = scorer.score(examples)
    margin = torch.tensor([0.0, 1.5, 0.0], dtype=torch.float64)
    expected = -torch.sigmoid(scores[0::2] - scores[1::2] - margin).log().mean()
    metrics = reward_model.step(scorer, examples, PLAIN)
    assert metrics["loss"] == pytest.approx(expected.item())
    assert metrics["score_margin"] == pytest.approx((scores[0::2] - scores[1::2]).mean().item())
    assert metrics["pair_accuracy"] == pytest.approx((scores[0::2] > scores[1::2]).double().mean().item())


def test_the_loss_of_scores_is_the_mean_square(make_table):
    scorer, examples = Scorer(), prepare_scored(ANSWERS)
    error = scorer.score(examples) - torch.tensor([1.0, -2.0, 0.5, 0.0], dtype=torch.float64)
    metrics = reward_model.step(scorer, examples, CASES[3][0])
    assert metrics["loss"] == pytest.approx((error**2).mean().item())
    assert metrics["loss"] == pytest.approx(metrics["squared_error"])
    assert metrics["absolute_error"] == pytest.approx(error.abs().mean().item())


scores_of_pairs = st.lists(st.floats(-10, 10), min_size=2, max_size=8).map(
    lambda each: torch.tensor(each[: len(each) // 2 * 2], dtype=torch.float64)
)


@given(scores=scores_of_pairs, shift=st.floats(-5, 5))
def test_only_differences_count_unless_scores_are_centred(scores, shift):
    margin = torch.full(scores.shape, 0.4, dtype=torch.float64)
    plain = reward_model.bradley_terry(scores, margin, PLAIN)
    torch.testing.assert_close(reward_model.bradley_terry(scores + shift, margin, PLAIN), plain, rtol=1e-6, atol=1e-9)
    centred = dataclasses.replace(PLAIN, centering_weight=0.1)
    middle = scores[0::2] + scores[1::2]
    torch.testing.assert_close(reward_model.bradley_terry(scores, margin, centred), plain + 0.1 * middle**2)


def test_equal_scores_cost_log_two_and_are_not_right():
    scores = torch.full((4,), 3.0)
    assert reward_model.bradley_terry(scores, torch.zeros(4), PLAIN).tolist() == pytest.approx([math.log(2)] * 2)
    examples = take_rows(prepare_pairs(PAIRS), torch.arange(4))
    assert score_sums(scores, examples)["pair_accuracy"] == 0.0


@pytest.mark.parametrize("config", [case[0] for case in CASES[:3]])
def test_gradients_are_finite_differences(config):
    scores = torch.tensor([0.3, -1.2, 2.0, 2.5], dtype=torch.float64, requires_grad=True)
    margin = torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda each: reward_model.bradley_terry(each, margin, config), scores)


@every_case
def test_the_gradient_of_a_step_is_the_finite_difference(config, examples):
    scorer = Scorer(lr=0.0)
    reward_model.step(scorer, examples, config)
    for word in (2, 4, 6):
        losses = []
        for change in (1e-5, -1e-5):
            moved = Scorer(lr=0.0)
            with torch.no_grad():
                moved.words[word] += change
            losses.append(reward_model.step(moved, examples, config)["loss"])
        assert (losses[0] - losses[1]) / 2e-5 == pytest.approx(scorer.grad[word].item(), rel=1e-5, abs=1e-9)


@every_case
def test_nothing_depends_on_the_cut_the_padding_or_the_order(config, examples):
    wide = dataclasses.replace(
        examples, **{name: torch.nn.functional.pad(getattr(examples, name), (0, 3)) for name in ("tokens", "trainable")}
    )
    order = [4, 5, 0, 1, 2, 3] if isinstance(examples, PairExamples) else [2, 0, 3, 1]
    turned = take_rows(examples, torch.tensor(order))
    cases = [(99, examples), (2, examples), (4, examples), (99, wide), (2, turned)]
    scorers = [Scorer(cut=cut) for cut, _ in cases]
    logs = [reward_model.step(scorer, given, config) for scorer, (_, given) in zip(scorers, cases, strict=True)]
    for scorer, log in zip(scorers[1:], logs[1:], strict=True):
        torch.testing.assert_close(scorer.grad, scorers[0].grad, rtol=1e-9, atol=1e-12)
        assert log == pytest.approx(logs[0])


def test_swapping_chosen_and_rejected_flips_the_margin():
    examples = prepare_pairs(PAIRS)
    swapped = take_rows(examples, torch.tensor([1, 0, 3, 2, 5, 4]))
    measured = [reward_model.evaluate(Scorer(), given) for given in (examples, swapped)]
    assert measured[0]["score_margin"] == pytest.approx(-measured[1]["score_margin"])
    assert measured[0]["pair_accuracy"] + measured[1]["pair_accuracy"] == pytest.approx(1.0)


def test_separable_pairs_are_told_apart_those_never_seen_too():
    """The better answer has more 3s; any pair of that kind separates."""

    def pairs(first, last):
        return prepare_pairs(
            [
                Pair(chosen=(2, 3, 3, 4, 1), rejected=(2, 3, *[4] * (1 + n), 1), prompt_length=1)
                for n in range(first, last)
            ]
        )

    scorer, held_out = Scorer(seed=1), pairs(3, 6)
    with torch.no_grad():
        scorer.words[3] = -1.0  # wrong to begin with
    assert reward_model.evaluate(scorer, held_out)["pair_accuracy"] == 0.0
    config = reward_model.RewardModelConfig(max_num_steps=150, batch_size=3)
    log = list(reward_model.train(model=scorer, examples=pairs(0, 3), config=config, version=7))
    assert log[-1]["pair_accuracy"] == 1.0
    assert log[-1]["loss"] < log[0]["loss"]
    assert log[-1]["version"] == 157
    after = reward_model.evaluate(scorer, held_out)
    assert after["pair_accuracy"] == 1.0
    assert after["chosen_score"] - after["rejected_score"] == pytest.approx(after["score_margin"])


def test_given_scores_are_learnt():
    scorer, examples = Scorer(lr=0.5), prepare_scored(ANSWERS)
    config = dataclasses.replace(CASES[3][0], max_num_steps=400, batch_size=4)
    log = list(reward_model.train(model=scorer, examples=examples, config=config))
    assert log[-1]["loss"] < 0.05 < log[0]["loss"]
    assert reward_model.evaluate(scorer, examples)["squared_error"] < 0.05


def test_centring_brings_scores_to_the_middle():
    examples = prepare_pairs(PAIRS)
    middles = []
    for weight in (0.0, 0.1):
        scorer = Scorer()
        with torch.no_grad():
            scorer.words[6] = 4.0
        config = reward_model.RewardModelConfig(max_num_steps=100, batch_size=3, centering_weight=weight)
        list(reward_model.train(model=scorer, examples=examples, config=config))
        measured = reward_model.evaluate(scorer, examples)
        middles.append(measured["chosen_score"] + measured["rejected_score"])
    assert middles[0] > 4.0
    assert abs(middles[1]) < 0.5


@every_case
def test_a_resumed_run_is_the_same_run(config, examples):
    config = dataclasses.replace(config, max_num_steps=6, batch_size=2)
    whole, halves = Scorer(), Scorer()
    list(reward_model.train(model=whole, examples=examples, config=config, seed=3))
    first = dataclasses.replace(config, max_num_steps=3)
    list(reward_model.train(model=halves, examples=examples, config=first, seed=3))
    list(reward_model.train(model=halves, examples=examples, config=config, seed=3, steps_taken=3))
    assert torch.equal(whole.words, halves.words)


def test_examples_of_the_wrong_kind_or_none_are_refused():
    pairs, scored = CASES[0][1], CASES[3][1]
    with pytest.raises(
        TypeError, match=r"objective='bradley-terry' learns from scored\.PairExamples, .* ScoredExamples"
    ):
        reward_model.step(Scorer(), scored, PLAIN)
    with pytest.raises(TypeError, match=r"objective='regression' learns from scored\.ScoredExamples, .* PairExamples"):
        reward_model.step(Scorer(), pairs, CASES[3][0])
    none = take_rows(pairs, torch.tensor([], dtype=torch.int64))
    for use in (lambda: reward_model.evaluate(Scorer(), none), lambda: reward_model.step(Scorer(), none, PLAIN)):
        with pytest.raises(ValueError, match="there are no examples"):
            use()
    for make in (prepare_pairs, prepare_scored):
        with pytest.raises(ValueError, match="there are no"):
            make([])


def test_what_is_no_scored_answer_is_refused():
    with pytest.raises(ValueError, match="score=nan of a row of 2 tokens must be finite"):
        ScoredAnswer(tokens=(2, 3), score=math.nan)
    with pytest.raises(ValueError, match="no tokens"):
        ScoredAnswer(tokens=(), score=1.0)


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 0},
        {"max_num_steps": 0},
        {"margin_weight": -1.0},
        {"centering_weight": math.nan},
        {"label_smoothing": 0.5},
    ],
)
def test_an_impossible_configuration_is_named(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        reward_model.RewardModelConfig(**{"max_num_steps": 1, **options})


@pytest.mark.parametrize("name", ["centering_weight", "label_smoothing"])
def test_what_regression_would_not_look_at_is_refused(name):
    with pytest.raises(ValueError, match=f"{name}=0.1 is for pairs"):
        reward_model.RewardModelConfig(**{"max_num_steps": 1, "objective": "regression", name: 0.1})


def test_a_configuration_explains_itself():
    assert "[-log sigmoid(s_c - s_r - 1 * margin)]" in reward_model.explain(PLAIN)
    assert "-0.8 log sigmoid" in reward_model.explain(CASES[2][0])
    assert "+ 0.1 (s_c + s_r)^2]" in reward_model.explain(CASES[2][0])
    assert "(s - y)^2" in reward_model.explain(CASES[3][0])
