"""Claims about what is logged: rollouts as they are, figures that no cut changes, failures apart."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_algorithms.rollouts import Rollouts, concatenate, describe
from rl_algorithms.stepping import effective_sample_size, figures, mean_of_steps


def make_rollouts(rewards, groups, *, failed=None, lengths=None, versions=None, turns=None):
    """One row a reward; a prompt of one token, answers of `lengths`."""
    rows = len(rewards)
    lengths = torch.tensor(lengths or [2] * rows)
    place = torch.arange(1 + int(lengths.max()))
    response = (place >= 1) & (place <= lengths[:, None])
    turns = torch.tensor(turns or [1] * rows)[:, None] - 1
    return Rollouts(
        tokens=response.long(),
        lengths=lengths + 1,
        response=response,
        logp_old=torch.zeros(response.shape),
        versions=torch.where(response, torch.tensor(versions or [0] * rows)[:, None], -1),
        turns=torch.where(response, torch.minimum(turns, place - 1), -1),
        token_rewards=torch.zeros(response.shape, dtype=torch.float64),
        rewards=torch.tensor(rewards, dtype=torch.float64),
        components=torch.tensor([[reward, 1.0] for reward in rewards], dtype=torch.float64),
        component_names=("right", "polite"),
        groups=torch.tensor(groups),
        truncated=lengths == lengths.max(),
        failed=torch.tensor(failed or [False] * rows),
        answers=("",) * rows,
        failures=(None,) * rows,
        metrics={"tool_calls": 1.5},
    )


def test_rollouts_are_described_as_they_are():
    rollouts = make_rollouts(
        [1.0, 0.0, 0.5, 0.5], [7, 7, -2, -2], lengths=[1, 2, 2, 3], versions=[5, 4, 5, 5], turns=[1, 2, 1, 3]
    )
    found = describe(rollouts, version=6)
    assert found == pytest.approx(
        {
            "reward": 0.5,
            "reward_std": (0.5 / 3) ** 0.5,
            "reward/right": 0.5,
            "reward/polite": 1.0,
            "groups_with_signal": 0.5,
            "response_tokens": 2.0,
            "response_tokens_max": 3.0,
            "sampled_tokens": 8.0,
            "turns": (1 + 2 + 1 + 3) / 4,
            "truncated": 0.25,
            "failed": 0.0,
            "staleness": (1 + 2 * 2 + 2 + 3) / 8,
            "staleness_max": 2.0,
            "environment/tool_calls": 1.5,
        }
    )


def test_rewards_that_are_equal_have_no_signal_even_where_rounding_gives_them_a_std():
    assert describe(make_rollouts([0.1] * 3, [0] * 3), version=0)["groups_with_signal"] == 0.0
    assert describe(make_rollouts([0.1, 0.1, 0.1 + 1e-16], [0] * 3), version=0)["groups_with_signal"] == 0.0
    assert describe(make_rollouts([0.1, 0.1, 0.101], [0] * 3), version=0)["groups_with_signal"] == 1.0


@given(
    rows=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 2), st.integers(1, 4)), min_size=1, max_size=6),
    broken=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 2), st.integers(1, 4)), min_size=1, max_size=3),
)
def test_failed_rows_change_nothing_but_how_many_failed_and_were_sampled(rows, broken):
    rewards, groups, lengths = (list(each) for each in zip(*rows, strict=True))
    more = [list(each) for each in zip(*broken, strict=True)]
    longest = max(lengths)
    clean = make_rollouts(rewards, groups, lengths=lengths)
    both = make_rollouts(
        rewards + more[0],
        groups + more[1],
        lengths=lengths + [min(length, longest) for length in more[2]],
        failed=[False] * len(rows) + [True] * len(broken),
    )
    alone, together = describe(clean, version=3), describe(both, version=3)
    assert together["failed"] == pytest.approx(len(broken) / (len(rows) + len(broken)))
    same = [name for name in alone if name not in ("failed", "sampled_tokens")]
    assert {name: together[name] for name in same} == pytest.approx({name: alone[name] for name in same})


def test_the_order_of_rows_does_not_matter():
    rollouts = make_rollouts([1.0, 0.0, 0.5, 0.5], [7, 7, -2, -2], lengths=[1, 2, 2, 3])
    moved = rollouts.take(torch.tensor([2, 0, 3, 1]))
    assert describe(moved, version=1) == pytest.approx(describe(rollouts, version=1))


def test_where_every_row_failed_only_that_is_said():
    found = describe(make_rollouts([0.0, 0.0], [0, 0], failed=[True, True]), version=0)
    assert found == {"failed": 1.0, "sampled_tokens": 4.0, "environment/tool_calls": 1.5}


def test_one_row_has_no_spread():
    assert describe(make_rollouts([0.5], [0]), version=0)["reward_std"] == 0.0


def test_batches_that_are_put_together_are_described_as_one():
    parts = [make_rollouts([1.0, 0.0], [0, 0]), make_rollouts([0.0, 0.0], [0, 0])]
    assert describe(concatenate(parts), version=0)["groups_with_signal"] == 0.5


@given(weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=12), cut=st.integers(1, 12))
def test_effective_sample_size_comes_from_sums_whatever_the_cut(weights, cut):
    weights = torch.tensor(weights, dtype=torch.float64)
    parts = weights.split(cut)
    total, squares = (sum(part.pow(power).sum().item() for part in parts) for power in (1, 2))
    found = effective_sample_size(total, squares, number=len(weights))
    assert found == pytest.approx((weights.mean() ** 2 / weights.square().mean()).item())
    assert 1 / len(weights) - 1e-9 <= found <= 1 + 1e-9
    scaled = effective_sample_size(3 * total, 9 * squares, number=len(weights))
    assert scaled == pytest.approx(found)


def test_effective_sample_size_of_equal_and_of_no_weights():
    assert effective_sample_size(6.0, 12.0, number=3) == 1.0
    assert effective_sample_size(0.0, 0.0, number=3) == 0.0


def test_sums_become_means_over_tokens_and_weights_an_effective_sample_size():
    weights = torch.tensor([1.0, 1.0, 2.0, 0.0])
    sums = {
        "loss": torch.tensor(0.25),  # divided already
        "clip_fraction": torch.tensor(3),
        "importance_weight": weights.sum(),
        "importance_weight_squared": weights.square().sum(),
    }
    found = figures(sums, num_tokens=4)
    assert found == pytest.approx(
        {"loss": 0.25, "clip_fraction": 0.75, "importance_weight": 1.0, "effective_sample_size": 16 / 6 / 4}
    )
    assert "importance_weight_squared" in sums  # the caller's own


def test_several_steps_are_their_mean_and_agreement_is_that_of_the_first():
    steps = [{"loss": 1.0, "kl_engine": 0.0}, {"loss": 3.0, "kl_engine": 0.5, "value_loss": 2.0}]
    assert mean_of_steps(steps) == {"loss": 2.0, "kl_engine": 0.0, "value_loss": 2.0}
    assert mean_of_steps([]) == {}
