"""Advantages against brute force, and what must hold of them whatever the rewards are."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_algorithms import advantages

REWARDS = st.floats(-100, 100, allow_nan=False).map(lambda value: round(value, 3))


@st.composite
def grouped(draw, min_size=1):
    """Rewards and group numbers: groups of several sizes, their rows in any order, their names any integers."""
    sizes = draw(st.lists(st.integers(min_size, 5), min_size=1, max_size=4))
    names = draw(st.lists(st.integers(-50, 50), min_size=len(sizes), max_size=len(sizes), unique=True))
    groups = [name for name, size in zip(names, sizes, strict=True) for _ in range(size)]
    rewards = [draw(REWARDS) for _ in groups]
    order = draw(st.permutations(range(len(groups))))
    return (
        torch.tensor([rewards[index] for index in order], dtype=torch.float64),
        torch.tensor([groups[index] for index in order]),
    )


def by_hand(rewards, groups, *, leave_one_out=False, std=False, epsilon=1e-6):
    """The formulas of the papers, row by row."""
    found = []
    for index, group in enumerate(groups.tolist()):
        mine = [reward for reward, other in zip(rewards.tolist(), groups.tolist(), strict=True) if other == group]
        mean = sum(mine) / len(mine)
        baseline = mean
        if leave_one_out:
            others = len(mine) - 1
            baseline = (sum(mine) - rewards[index].item()) / others if others else rewards[index].item()
        advantage = 0.0 if len(set(mine)) == 1 else rewards[index].item() - baseline
        if std:
            spread = math.sqrt(sum((reward - mean) ** 2 for reward in mine) / max(len(mine) - 1, 1))
            advantage /= spread + epsilon
        found.append(advantage)
    return torch.tensor(found, dtype=torch.float64)


@given(grouped(), st.booleans(), st.booleans())
def test_group_advantages_are_those_of_the_papers(case, leave_one_out, std):
    rewards, groups = case
    found = advantages.group_advantage(
        rewards,
        groups,
        baseline="leave_one_out" if leave_one_out else "group_mean",
        scale="group_std" if std else "none",
    )
    expected = by_hand(rewards, groups, leave_one_out=leave_one_out, std=std)
    torch.testing.assert_close(found, expected, atol=1e-8, rtol=1e-8)


@given(grouped(), st.sampled_from(["group_mean", "leave_one_out"]), st.sampled_from(["none", "group_std"]))
def test_the_advantages_of_a_group_add_up_to_zero(case, baseline, scale):
    rewards, groups = case
    found = advantages.group_advantage(rewards, groups, baseline=baseline, scale=scale)
    for group in groups.unique():
        assert abs(found[groups == group].sum().item()) < 1e-6


@pytest.mark.parametrize("reward", [0.1, 0.3, 0.7, 1e9 + 0.1, -3.3])
@pytest.mark.parametrize("scale", ["none", "group_std"])
def test_equal_rewards_have_advantage_exactly_zero(reward, scale):
    """Their std is not 0 in floating point, and a small epsilon would blow the rounding up."""
    rewards, groups = torch.full((8,), reward, dtype=torch.float64), torch.zeros(8, dtype=torch.int64)
    assert not advantages.has_signal(rewards, groups).any()
    for epsilon in (0.0, 1e-12):
        found = advantages.group_advantage(rewards, groups, scale=scale, epsilon=epsilon)
        assert found.tolist() == [0.0] * 8
    found = advantages.group_advantage(rewards, groups, baseline="none", scale=scale, epsilon=0.0)
    assert found.tolist() == [reward if scale == "none" else 0.0] * 8
    of_each = advantages.gdpo(rewards[:, None], groups, weights=[2.0], epsilon=0.0)
    assert of_each.tolist() == [0.0] * 8


def test_groups_are_told_apart_by_number_and_not_by_place():
    rewards, groups = torch.tensor([1.0, 5.0, 0.0, 5.0]), torch.tensor([2, 7, 2, 7])
    assert advantages.group_advantage(rewards, groups).tolist() == [0.5, 0.0, -0.5, 0.0]
    assert advantages.has_signal(rewards, groups).tolist() == [True, False, True, False]


def test_a_lone_success_of_eight_keeps_its_weight_when_it_is_left_out_of_its_baseline():
    rewards, groups = torch.tensor([1.0] + [0.0] * 7), torch.zeros(8, dtype=torch.int64)
    found = advantages.group_advantage(rewards, groups, baseline="leave_one_out", scale="group_std", epsilon=0.0)
    assert found[0].item() == pytest.approx(8 / 7 * 0.875 / math.sqrt(0.125))  # 2.83, and not 1


@given(grouped(min_size=2))
def test_leaving_one_out_is_centering_times_n_over_n_minus_one(case):
    rewards, groups = case
    size = torch.tensor([(groups == group).sum().item() for group in groups])
    centered = advantages.group_advantage(rewards, groups)
    left_out = advantages.group_advantage(rewards, groups, baseline="leave_one_out")
    torch.testing.assert_close(left_out, centered * size / (size - 1))


@given(grouped(), st.floats(0.1, 10), st.floats(-10, 10))
def test_a_scaled_advantage_does_not_know_the_units_of_the_reward(case, factor, shift):
    rewards, groups = case
    options = {"scale": "group_std", "epsilon": 0.0}
    signal = advantages.has_signal(rewards, groups)
    moved = rewards * factor + shift
    assert (advantages.has_signal(moved, groups) <= signal).all()
    kept = signal & advantages.has_signal(moved, groups)
    before, after = (advantages.group_advantage(each, groups, **options)[kept] for each in (rewards, moved))
    torch.testing.assert_close(after, before, atol=1e-6, rtol=1e-6)


@given(st.data())
def test_gdpo_lets_no_reward_drown_another_and_constants_say_nothing(data):
    rewards, groups = data.draw(grouped())
    small = torch.tensor([data.draw(st.sampled_from([0.0, 1.0])) for _ in rewards], dtype=torch.float64)
    constant = torch.full_like(small, 0.7)
    parts = [by_hand(rewards, groups, std=True), by_hand(small, groups, std=True)]
    found = advantages.gdpo(torch.stack([rewards, small, constant], 1), groups, weights=[1.0, 0.5, 3.0])
    torch.testing.assert_close(found, parts[0] + 0.5 * parts[1], atol=1e-8, rtol=1e-8)


@given(st.lists(st.lists(st.tuples(REWARDS, st.booleans()), min_size=3, max_size=3), min_size=1, max_size=5))
def test_whitening_has_mean_zero_and_variance_one_on_the_mask_alone(rows):
    values = torch.tensor([[value for value, _ in row] for row in rows], dtype=torch.float64)
    mask = torch.tensor([[held for _, held in row] for row in rows])
    with_nonsense = torch.where(mask, values, math.nan)
    found = advantages.whiten(with_nonsense, mask)
    assert (found[~mask] == 0).all()
    kept = found[mask]
    if len(set(values[mask].tolist())) > 1:
        assert abs(kept.mean().item()) < 1e-9
        assert kept.var().item() == pytest.approx(1.0, abs=0.02)
    else:
        assert (kept.abs() < 1e-6).all()  # the mean of equal numbers is one of them but for rounding


@given(st.lists(REWARDS, min_size=1, max_size=6), st.sampled_from([1.0, 0.9, 0.0]))
def test_returns_to_go_are_discounted_sums(rewards, gamma):
    found = advantages.returns_to_go(torch.tensor([rewards], dtype=torch.float64), gamma=gamma)[0]
    for start in range(len(rewards)):
        expected = sum(reward * gamma**step for step, reward in enumerate(rewards[start:]))
        assert found[start].item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("tokens", "penalty"), [(0, 0.0), (15, 0.0), (16, 0.0), (18, -0.5), (20, -1.0), (40, -1.0)])
def test_the_penalty_of_length_grows_over_the_buffer_and_no_further(tokens, penalty):
    assert advantages.overlong_penalty(torch.tensor([tokens]), max_length=20, buffer=4).item() == penalty


# -- Generalised advantage estimation --------------------------------------------------------------------------------


@pytest.mark.parametrize("buffer", [0, -1, 21])
def test_a_penalty_that_grows_over_nothing_is_refused(buffer):
    with pytest.raises(ValueError, match=f"buffer={buffer} must be from 1 to max_length=20"):
        advantages.overlong_penalty(torch.tensor([5]), max_length=20, buffer=buffer)


@st.composite
def episodes(draw):
    size = draw(st.integers(1, 7))
    rewards, values = (draw(st.lists(REWARDS, min_size=size, max_size=size)) for _ in range(2))
    mask = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    return rewards, values, mask, draw(REWARDS)


def double_sum(rewards, values, *, gamma, lam, last):
    """A_t = sum_l (gamma lambda)^l delta_{t+l}, as the paper defines it."""
    after = [*values, last][1:]
    deltas = [reward + gamma * later - value for reward, value, later in zip(rewards, values, after, strict=True)]
    return [
        sum((gamma * lam) ** step * delta for step, delta in enumerate(deltas[start:])) for start in range(len(deltas))
    ]


@given(episodes(), st.sampled_from([1.0, 0.9]), st.sampled_from([0.0, 0.5, 0.95, 1.0]), st.booleans())
def test_gae_is_its_definition_over_the_tokens_of_the_policy(episode, gamma, lam, cut_off):
    rewards, values, mask, last = episode
    chosen = [index for index, held in enumerate(mask) if held]
    expected = double_sum(
        [rewards[index] for index in chosen],
        [values[index] for index in chosen],
        gamma=gamma,
        lam=lam,
        last=last if cut_off else 0.0,
    )
    held = torch.tensor([mask])
    found, returns = advantages.gae(
        torch.where(held, torch.tensor([rewards], dtype=torch.float64), math.nan),
        torch.where(held, torch.tensor([values], dtype=torch.float64), math.nan),
        held,
        gamma=gamma,
        lam=lam,
        last_values=torch.tensor([last], dtype=torch.float64) if cut_off else None,
    )
    assert found[0, chosen].tolist() == pytest.approx(expected, abs=1e-6)
    assert returns[0, chosen].tolist() == pytest.approx(
        [advantage + values[index] for advantage, index in zip(expected, chosen, strict=True)], abs=1e-6
    )
    assert not found[~held].any()
    assert not returns[~held].any()


def test_a_lambda_of_one_gives_returns_less_values_and_of_zero_one_step_differences():
    rewards = torch.tensor([[1.0, 2.0, 3.0]])
    values = torch.tensor([[0.5, 0.25, 0.125]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    full, returns = advantages.gae(rewards, values, mask, lam=1.0)
    assert returns.tolist() == [[6.0, 5.0, 3.0]]
    assert full.tolist() == (returns - values).tolist()
    one_step, _ = advantages.gae(rewards, values, mask, lam=0.0)
    assert one_step.tolist() == [[0.75, 1.875, 2.875]]


@pytest.mark.parametrize(("of_rewards", "of_values"), [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_gae_is_of_the_dtype_of_the_rewards(of_rewards, of_values):
    rewards, values = torch.tensor([[0.0, 0.1, 0.7]]), torch.tensor([[0.3, 0.2, 0.9]])
    mask = torch.tensor([[False, True, True]])
    found = advantages.gae(rewards.to(of_rewards), values.to(of_values), mask, lam=0.5)
    expected = advantages.gae(rewards.to(of_rewards), values.to(of_rewards), mask, lam=0.5)
    for each, other in zip(found, expected, strict=True):
        torch.testing.assert_close(each, other)
        assert each.dtype == of_rewards


def test_every_subset_of_a_groups_rows_keeps_its_own_mean():
    """A failed row leaves its group, and the others are compared among themselves."""
    rewards = torch.tensor([3.0, 1.0, 2.0, 9.0], dtype=torch.float64)
    for kept in itertools.combinations(range(4), 3):
        found = advantages.group_advantage(rewards[list(kept)], torch.zeros(3, dtype=torch.int64))
        assert found.sum().item() == pytest.approx(0.0)
