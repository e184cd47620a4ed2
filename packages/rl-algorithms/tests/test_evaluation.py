"""Claims about held-out accuracy: which rows count, how often each prompt does, and what is refused."""

import dataclasses
import math

import pytest
import torch

from rl_algorithms import dpo, sft
from rl_algorithms.contracts import EnvironmentReturn
from rl_algorithms.data import DataError
from rl_algorithms.estimates import majority_at_k, pass_at_k
from rl_algorithms.evaluation import EvaluationConfig, Figures, HeldOut, Outcome, demonstration_nll, evaluate, judge
from rl_algorithms.preferences.dpo_pairs import DPOPairs, sample_pairs
from rl_algorithms.reward_trial import try_reward


@dataclasses.dataclass(frozen=True)
class Span:
    version: int
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class Said:
    tokens: tuple
    logp: tuple
    truncated: bool
    versions: tuple


class Script:
    """An engine that says these digits, one a row, and then stops."""

    def __init__(self, digits):
        self.digits = iter(digits)

    def generate(self, prompts, sampling):
        return [
            Said((2 + int(next(self.digits)), 1), (-0.1, -0.1), truncated=False, versions=(Span(0, 0, 2),))
            for _ in prompts
        ]


class Judge:
    """Right is the digit 3; the digit 0 breaks the sandbox; the reward is `right` or 0."""

    def __init__(self, right=1.0):
        self.right = right

    def step(self, conversations):
        return [self._one(each.answer) for each in conversations]

    def _one(self, answer):
        if answer == "0":
            return EnvironmentReturn(reward=0.0, terminated=True, failed="the sandbox died")
        return EnvironmentReturn(reward=self.right * (answer == "3"), terminated=True)


class Twice:
    """An environment that asks again after the first answer, and rewards each."""

    def step(self, conversations):
        return [
            EnvironmentReturn(
                reward=0.5 * (each.answer == "3"),
                terminated=each.turn == 1,
                observations=() if each.turn else ({"role": "user", "content": "4"},),
            )
            for each in conversations
        ]


def ask(chat, rows, digits, *, environment=None, samples_per_prompt=1, **options):
    return evaluate(
        [chat.prompt(row) for row in rows],
        engine=Script(digits),
        sampling=None,
        environment=environment or Judge(),
        chat=chat,
        samples_per_prompt=samples_per_prompt,
        **options,
    )


def test_accuracy_comes_with_its_standard_error_and_the_answers(chat, rows):
    accuracy = ask(chat, rows, "3453")
    assert accuracy.mean == 0.5
    assert accuracy.standard_error == pytest.approx(math.sqrt(1 / 3) / 2)
    assert 0.0 < accuracy.reward.low < 0.5 < accuracy.reward.high < 1.0
    assert accuracy.rollouts.answers == ("3", "4", "5", "3")
    assert accuracy.pass_at[1] == accuracy.reward
    assert accuracy.num_failed == 0


def test_the_standard_error_is_over_prompts_not_over_answers(chat, rows):
    """Four prompts, always or never right: sixteen answers are no surer than four."""
    once = ask(chat, rows, "3434")
    often = ask(chat, rows, "3333444433334444", samples_per_prompt=4)
    assert often.mean == once.mean == 0.5
    assert often.standard_error == pytest.approx(once.standard_error)


def test_pass_and_cons_are_means_over_prompts_of_the_exact_ones(chat, rows):
    figures = Figures(pass_at=(1, 2, 4), cons_at=(1, 3, 4))
    digits = "3345" + "3444" + "5678" + "3333"
    accuracy = ask(chat, rows, digits, samples_per_prompt=4, extract=str, figures=figures)
    for k in figures.pass_at:
        each = [pass_at_k(4, num_passed=passed, k=k) for passed in (2, 1, 0, 4)]
        assert accuracy.pass_at[k].mean == pytest.approx(sum(each) / 4)
    for k in figures.cons_at:
        each = [
            majority_at_k(list(said), passed=[c == "3" for c in said], k=k)
            for said in (digits[i : i + 4] for i in (0, 4, 8, 12))
        ]
        assert accuracy.cons_at[k].mean == pytest.approx(sum(each) / 4)
    assert accuracy.cons_at[4].mean == 0.5
    log = accuracy.metrics()
    assert log["pass@4"] == 0.75
    assert log["pass@4/low"] < 0.75 < log["pass@4/high"]
    assert log["failed"] == 0.0


def test_what_cannot_be_extracted_does_not_vote(chat, rows):
    def only_threes_and_fours(answer):
        return answer if answer in "34" else None

    figures = Figures(cons_at=(4,))
    asked = {"samples_per_prompt": 4, "extract": only_threes_and_fours, "figures": figures}
    assert ask(chat, rows[:1], "3555", **asked).cons_at[4].mean == 1.0
    assert ask(chat, rows[:1], "3455", **asked).cons_at[4].mean == 0.5
    assert ask(chat, rows[:1], "5555", **asked).cons_at[4].mean == 0.0


def test_failed_rows_are_counted_and_in_no_figure(chat, rows):
    """Of "300" one answer is left, of "000" none, and that prompt with it."""
    accuracy = ask(chat, rows, "300" + "000" + "334" + "444", samples_per_prompt=3, figures=Figures(pass_at=(1, 2)))
    assert accuracy.num_failed == 5
    assert accuracy.mean == pytest.approx((1 + 2 / 3 + 0) / 3)
    assert accuracy.reward.num_prompts == 3
    assert accuracy.pass_at[2].num_prompts == 2
    assert accuracy.pass_at[2].mean == pytest.approx((1.0 + 0.0) / 2)
    assert len(accuracy.rollouts.answers) == 12
    assert accuracy.metrics()["failed"] == pytest.approx(5 / 12)


def test_if_everything_failed_the_first_reason_is_told(chat, rows):
    with pytest.raises(ValueError, match=r"all 4 rows failed.*the sandbox died"):
        ask(chat, rows, "0000")


def test_which_reward_passes_is_asked_and_not_guessed(chat, rows):
    half = Judge(right=0.5)
    assert ask(chat, rows, "3344", environment=half).pass_at[1].mean == 0.0
    accuracy = ask(chat, rows, "3344", environment=half, figures=Figures(pass_reward=0.5))
    assert accuracy.pass_at[1].mean == 0.5
    assert accuracy.mean == 0.25


def test_conversations_of_several_turns_are_one_answer_each(chat, rows):
    accuracy = ask(chat, rows, "3333" + "3434", environment=Twice(), max_turns=2)
    assert accuracy.rollouts.rewards.tolist() == [1.0, 0.5, 1.0, 0.5]
    assert accuracy.mean == 0.75
    assert accuracy.pass_at[1].mean == 0.5


def test_rollouts_that_are_there_can_be_judged_again(chat, rows):
    accuracy = ask(chat, rows, "3434" * 2, samples_per_prompt=2)
    again = judge(accuracy.rollouts, extract=str, figures=Figures(pass_at=(2,), cons_at=(2,)))
    assert again.mean == accuracy.mean
    assert again.pass_at[2].mean == 1.0
    assert again.cons_at[2].mean == 0.5  # a tie in each


def test_one_prompt_has_an_accuracy_and_no_error(chat, rows):
    accuracy = ask(chat, rows[:1], "3")
    assert accuracy.mean == 1.0
    assert math.isnan(accuracy.standard_error)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"figures": Figures(pass_at=(1, 8))}, "look at up to 8 answers to a prompt, and samples_per_prompt=2"),
        ({"figures": Figures(cons_at=(2,))}, "cons_at=.* counts votes for answers, and extract is None"),
    ],
)
def test_figures_that_cannot_be_made_are_refused_before_anything_is_sampled(chat, rows, options, message):
    with pytest.raises(ValueError, match=message):
        ask(chat, rows, "", samples_per_prompt=2, **options)


def test_no_prompts_are_refused(chat):
    with pytest.raises(ValueError, match="there are no prompts to evaluate on"):
        ask(chat, [], "")


@pytest.mark.parametrize(
    "options", [{"pass_at": (0,)}, {"cons_at": (2, -1)}, {"pass_reward": math.inf}, {"confidence": 1.0}]
)
def test_impossible_figures_are_named(options):
    ((name, _),) = options.items()
    with pytest.raises(ValueError, match=f"{name}="):
        Figures(**options)


def test_held_out_figures_are_told_with_intervals_and_with_what_failed(chat, rows):
    sampled = ask(chat, rows, "33303333", samples_per_prompt=2, figures=Figures(pass_at=(1, 2)))
    held_out = HeldOut(sampled=sampled, greedy=ask(chat, rows, "3034"))
    metrics = held_out.metrics()
    assert metrics["held_out_sampled"] == sampled.mean == 1.0
    assert metrics["held_out_greedy/low"] < metrics["held_out_greedy"] < metrics["held_out_greedy/high"]
    assert "held_out_pass@2" in metrics
    assert "2 responses could not be judged" in held_out.table()
    outcome = Outcome(answers=held_out, figures={"held_out_loss": 0.5})
    assert outcome.describe().endswith("loss 0.5")
    assert Outcome(answers=None, figures={}).describe() == "nothing was measured"


def test_a_trial_of_a_reward_shows_each_rollout_and_whether_there_is_anything_to_learn(chat, rows):
    prompts = [chat.prompt(row) for row in rows[:2]]
    shared = {"sampling": None, "environment": Judge(), "chat": chat, "group_size": 2}
    result = try_reward(prompts, engine=Script("3455"), **shared)
    assert [each.reward for each in result.rollouts] == [1.0, 0.0, 0.0, 0.0]
    assert result.rollouts[0].advantage > 0 > result.rollouts[1].advantage
    assert (result.groups, result.groups_with_signal, result.exit_code) == (2, 1, 0)
    assert "1 of 2 groups have a training signal" in result.text()
    silent = try_reward(prompts, engine=Script("5555"), **shared)
    assert silent.exit_code == 1
    assert "GRPO would learn nothing" in silent.text()
    with pytest.raises(ValueError, match="a group of one has no advantage"):
        try_reward(prompts, engine=Script("5"), **{**shared, "group_size": 1})


def test_preference_pairs_of_a_run_are_found_again_from_what_a_checkpoint_keeps(chat, rows, make_table):
    prompts = [chat.prompt(row) for row in rows]
    config = dpo.DPOConfig(max_num_steps=1, num_prompts=2, num_generations_per_prompt=2)
    ask = {"sampling": None, "environment": Judge(), "chat": chat, "held_out": prompts[2:]}
    pairs = sample_pairs(config, prompts=prompts[:2], engine=Script("34433443"), **ask).compared(
        make_table(vocabulary=12)
    )
    assert pairs.describe() == "2 pairs to train on, 2 held out"
    again = DPOPairs.sampled_from(pairs.tensors(given=False))
    kept = DPOPairs.given(pairs.train, pairs.held_out, max_held_out=1, tensors={})
    assert torch.equal(again.train.logp_ref, pairs.train.logp_ref)
    assert torch.equal(again.held_out.tokens, pairs.held_out.tokens)
    assert len(kept.held_out.tokens) == 2
    assert [*pairs.tensors(given=True)] == ["train/logp_ref", "held_out/logp_ref"]
    with pytest.raises(DataError, match="no preference pairs"):
        sample_pairs(config, prompts=prompts[:2], engine=Script("4444"), **ask)


def test_an_evaluation_is_due_where_a_step_passes_its_multiple_and_impossible_ones_are_refused():
    config = EvaluationConfig(every=4)
    assert [config.due(before, before + 3) for before in (0, 3, 6, 9)] == [False, True, True, True]
    assert not EvaluationConfig().due(0, 100)
    with pytest.raises(ValueError, match="from 1 to samples_per_prompt=2"):
        EvaluationConfig(pass_at=(3,), samples_per_prompt=2)
    with pytest.raises(ValueError, match="max_prompts=0 must be >= 1"):
        EvaluationConfig(max_prompts=0)


def test_the_loss_of_demonstrations_is_a_mean_over_their_tokens(chat, rows, make_table):
    table, demonstrations = make_table(), [chat.demonstration(row) for row in rows]
    examples = sft.prepare(demonstrations)
    expected = -table.logp(examples)[examples.trainable].mean().item()
    assert demonstration_nll(table, demonstrations) == pytest.approx(expected)
