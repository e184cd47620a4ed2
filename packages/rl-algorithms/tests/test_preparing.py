"""What becomes of rollouts before the loss: who leaves, what is compared, what is refused."""

import math
from dataclasses import replace

import pytest
import torch

from rl_algorithms import grpo, presets
from rl_algorithms.objective import AdvantageConfig, KLConfig, Objective, OverlongConfig, RatioConfig, SelectionConfig
from rl_algorithms.policy_gradient import prepare, reward_tokens
from rl_algorithms.rollouts import Rollouts

KEEP = SelectionConfig(groups_without_signal="keep")


def make_rollouts(rewards, *, groups, lengths=None, failed=(), truncated=(), components=None):
    """Rows of a one-token prompt and an answer of some tokens; the whole reward at the answer's end."""
    size = len(rewards)
    lengths = torch.tensor(lengths or [3] * size)
    position = torch.arange(int(lengths.max()))
    response = (position > 0) & (position < lengths[:, None])
    rewards = torch.tensor(rewards, dtype=torch.float64)
    token_rewards = torch.zeros(response.shape, dtype=torch.float64)
    token_rewards[torch.arange(size), lengths - 1] = rewards
    names = tuple(components or ())
    return Rollouts(
        tokens=torch.ones(response.shape, dtype=torch.int64),
        lengths=lengths,
        response=response,
        logp_old=torch.where(response, -0.5, 0.0),
        versions=torch.where(response, 0, -1),
        turns=torch.where(response, 0, -1),
        token_rewards=token_rewards,
        rewards=rewards,
        components=torch.tensor([components[name] for name in names], dtype=torch.float64).T
        if names
        else torch.zeros(size, 0, dtype=torch.float64),
        component_names=names,
        groups=torch.tensor(groups),
        truncated=torch.tensor([index in truncated for index in range(size)]),
        failed=torch.tensor([index in failed for index in range(size)]),
        answers=("",) * size,
        failures=tuple("died" if index in failed else None for index in range(size)),
    )


class Frozen:
    """A reference, or a policy to be recomputed, that gives every trainable token the same log-probability."""

    def __init__(self, logp):
        self.value = logp

    def logp(self, examples):
        return torch.where(examples.trainable, self.value, 0.0)


def of_rows(examples):
    """The advantage of each row's trainable tokens, which are all alike."""
    rows = [set(row[mask].tolist()) for row, mask in zip(examples.advantage, examples.trainable, strict=True)]
    assert all(len(row) == 1 for row in rows)
    return [row.pop() for row in rows]


def test_groups_without_a_signal_leave_or_stay_as_asked():
    rollouts = make_rollouts([1, 0, 0.3, 0.3], groups=[0, 0, 1, 1])
    assert len(prepare(rollouts, Objective()).tokens) == 2
    kept = prepare(rollouts, Objective(selection=KEEP))
    assert of_rows(kept)[2:] == [0.0, 0.0]


def test_a_failed_rollout_is_in_no_baseline_and_is_not_trained_on():
    rollouts = make_rollouts([1, 0, 0], groups=[0, 0, 0], failed=[2])
    examples = prepare(rollouts, Objective(advantage=AdvantageConfig(scale="none")))
    assert of_rows(examples) == [0.5, -0.5]
    lonely = make_rollouts([1, 0], groups=[0, 0], failed=[1])
    assert len(prepare(lonely, Objective()).tokens) == 0


def test_a_cut_off_answer_is_compared_and_not_trained_on():
    rollouts = make_rollouts([1, 0, 0], groups=[0, 0, 0], truncated=[2])
    objective = Objective(advantage=AdvantageConfig(scale="none"), selection=SelectionConfig(mask_truncated=True))
    examples = prepare(rollouts, objective)
    assert examples.trainable.any(1).tolist() == [True, True, False]
    assert examples.advantage[0, 1].item() == pytest.approx(2 / 3)


def test_the_penalty_of_length_is_compared_and_does_not_make_a_signal():
    objective = Objective(
        advantage=AdvantageConfig(scale="none"), selection=KEEP, overlong=OverlongConfig(max_length=4, buffer=2)
    )
    rollouts = make_rollouts([1, 1], groups=[0, 0], lengths=[3, 5])  # answers of 2 and 4 tokens
    assert of_rows(prepare(rollouts, objective)) == [0.5, -0.5]
    dropping = Objective(overlong=OverlongConfig(max_length=4, buffer=2))
    assert len(prepare(rollouts, dropping).tokens) == 0


def test_kl_in_the_reward_is_summed_over_the_answer_before_it_is_compared():
    objective = Objective(
        advantage=AdvantageConfig(scale="none"), selection=KEEP, kl=KLConfig(weight=0.1, estimator="k1", place="reward")
    )
    rollouts = make_rollouts([1, 1], groups=[0, 0], lengths=[3, 5])
    examples = prepare(rollouts, objective, reference=Frozen(-1.5))  # k1 = -0.5 + 1.5 = 1 a token
    assert of_rows(examples) == pytest.approx([0.1, -0.1])  # 1 - 0.2 and 1 - 0.4


def test_an_answer_that_was_cut_off_has_its_kl_where_others_are_compared_with_it():
    objective = Objective(
        advantage=AdvantageConfig(scale="none"),
        selection=SelectionConfig(groups_without_signal="keep", mask_truncated=True),
        kl=KLConfig(weight=0.1, estimator="k1", place="reward"),
    )
    rollouts = make_rollouts([1, 1], groups=[0, 0], lengths=[3, 5], truncated=[1])
    examples = prepare(rollouts, objective, reference=Frozen(-1.5))
    assert examples.trainable.any(1).tolist() == [True, False]
    assert of_rows(replace(examples, trainable=rollouts.response)) == pytest.approx([0.1, -0.1])


def test_rollouts_that_all_failed_leave_nothing_to_shape():
    rollouts = make_rollouts([1, 1], groups=[0, 0], failed=[0, 1])
    objective = Objective(overlong=OverlongConfig(max_length=4, buffer=2))
    _, _, rewards = reward_tokens(rollouts, objective)
    assert rewards.shape == (0, 0)


def test_without_a_baseline_each_token_is_worth_what_follows_it():
    objective = Objective(
        advantage=AdvantageConfig(baseline="none", scale="none"),
        selection=KEEP,
        kl=KLConfig(weight=0.1, estimator="k1", place="reward"),
    )
    examples = prepare(make_rollouts([1], groups=[0], lengths=[4]), objective, reference=Frozen(-1.5))
    assert examples.advantage[0, 1:].tolist() == pytest.approx([0.7, 0.8, 0.9])


def test_reinforce_plus_plus_is_whitened_over_tokens():
    rollouts = make_rollouts([1, 0], groups=[0, 1], lengths=[2, 4])
    examples = prepare(rollouts, presets.reinforce_plus_plus(kl_weight=0.0))
    kept = examples.advantage[examples.trainable].double()
    assert kept.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert kept.var().item() == pytest.approx(1.0, abs=1e-6)
    assert kept.tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-6)


def test_gdpo_compares_each_reward_by_itself():
    rollouts = make_rollouts(
        [101.0, 0.0, 100.0, 1.0], groups=[0] * 4, components={"big": [100, 0, 100, 0], "small": [1, 0, 0, 1]}
    )
    found = of_rows(prepare(rollouts, presets.gdpo()))
    assert found[0] == pytest.approx(-found[1])
    assert found[2:] == pytest.approx([0.0, 0.0], abs=1e-3)
    weighed = of_rows(prepare(rollouts, presets.gdpo(reward_weights={"small": 0.0})))
    assert weighed[0] == pytest.approx(weighed[2])


def test_what_gdpo_cannot_name_is_refused():
    with pytest.raises(ValueError, match="the environment names none"):
        prepare(make_rollouts([1, 0], groups=[0, 0]), presets.gdpo())
    named = make_rollouts([1, 0], groups=[0, 0], components={"format": [1, 0]})
    with pytest.raises(ValueError, match="reward_weights names fromat; the environment's rewards are format"):
        prepare(named, presets.gdpo(reward_weights={"fromat": 2.0}))


def test_what_is_needed_and_missing_is_refused():
    rollouts = make_rollouts([1, 0], groups=[0, 0])
    with pytest.raises(ValueError, match=r"kl.weight=0.1 needs a reference"):
        prepare(rollouts, Objective(kl=KLConfig(weight=0.1)))
    recomputed = Objective(ratio=RatioConfig(proximal="recomputed"))
    with pytest.raises(ValueError, match="needs the policy when a batch is begun"):
        prepare(rollouts, recomputed)
    with pytest.raises(ValueError, match="logp_proximal of row 0, token 1 is nan, and 4 tokens"):
        prepare(rollouts, recomputed, policy=Frozen(math.nan))
    assert prepare(rollouts, recomputed, policy=Frozen(-0.25)).logp_proximal[0, 1].item() == -0.25


def test_a_lost_logp_of_the_sampler_is_refused_before_a_step(make_table):
    examples = prepare(make_rollouts([1, 0], groups=[0, 0]), Objective())
    examples.logp_old[1, 2] = math.nan
    with pytest.raises(ValueError, match="logp_old of row 1, token 2 is nan"):
        grpo.step(make_table(), examples, Objective())
    examples.trainable[:] = False
    with pytest.raises(ValueError, match="none of the 6 tokens of this step is trainable"):
        grpo.step(make_table(), examples, Objective())


@pytest.mark.parametrize("name", ["opo", "optimal_baseline", "best_minus_second", "pass_at_k"])
def test_an_estimator_by_name_is_given_the_rollouts_and_fills_the_examples(name):
    made = make_rollouts([1.0, 0.0, 0.0, 1.0], groups=[5, 5, 5, 5])
    options = {"k": 2.0} if name == "pass_at_k" else {}
    objective = Objective(advantage=AdvantageConfig(estimator=name, options=options), selection=KEEP)
    advantage = prepare(made, objective).advantage
    assert advantage.shape == made.response.shape
    assert advantage.isfinite().all()
    if name != "best_minus_second":  # two are best, so none adds anything
        assert advantage[0, -1] > 0 > advantage[1, -1]
