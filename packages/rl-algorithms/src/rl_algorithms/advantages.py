"""Advantages: how much better an answer, or a token, was than expected.

    group mean       r_i - mean_g r                                      GRPO, Dr.GRPO (arXiv:2402.03300, 2503.20783)
    leave one out    r_i - mean of the others = n/(n-1) (r_i - mean_g r)    RLOO (arXiv:2402.14740)
    group std        ... / (std_g r + epsilon), Bessel's n - 1
    whitening        (A - mean A) / sqrt(var A + 1e-8) over a batch      REINFORCE++ (arXiv:2501.03262)
    each reward      sum_k w_k (r_k - mean_g r_k) / (std_g r_k + epsilon)    GDPO (arXiv:2601.05242)
    GAE              delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lambda A_{t+1}    arXiv:1506.02438

A group is named by an integer, the same for all of its rows; prompts are never compared. Where all rewards of a group
are equal, found exactly and not by a std that rounding keeps from 0, its advantages are exactly 0; so they are for a
group of one, whose raw reward verl returns. Where implementations differ: epsilon is 1e-6 in verl and NeMo-RL, 1e-4 in
TRL (its GDPO too), and an argument here; NeMo-RL's leave-one-out also leaves the row out of the std, and divides by
none that is 0, which makes a lone success of eight 1 where it is 2.83 with leave-one-out and the group's std, as here,
and the group's sum negative; NeMo-RL whitens REINFORCE++ by the population's variance. Rewards are taken in float64.

Axes: B rows, T tokens, K named rewards.
"""

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

__all__ = [
    "Baseline",
    "Scale",
    "gae",
    "gdpo",
    "group_advantage",
    "has_signal",
    "overlong_penalty",
    "returns_to_go",
    "whiten",
]

Baseline: TypeAlias = Literal["none", "group_mean", "leave_one_out"]
Scale: TypeAlias = Literal["none", "group_std"]


def has_signal(rewards: Float[Tensor, " B"], groups: Int[Tensor, " B"]) -> Bool[Tensor, " B"]:
    """Whether the rewards of the group that each row is of differ. Exact: a std of equal floats need not be 0.

    >>> has_signal(torch.tensor([0.7, 0.7, 1.0, 0.0]), torch.tensor([4, 4, 9, 9]))
    tensor([False, False,  True,  True])
    """
    names, index = torch.unique(groups, return_inverse=True)
    empty = torch.empty(len(names), dtype=rewards.dtype, device=rewards.device)
    largest = empty.scatter_reduce(0, index, rewards, "amax", include_self=False)
    smallest = empty.scatter_reduce(0, index, rewards, "amin", include_self=False)
    return (largest != smallest)[index]


def group_advantage(
    rewards: Float[Tensor, " B"],
    groups: Int[Tensor, " B"],
    *,
    baseline: Baseline = "group_mean",
    scale: Scale = "none",
    epsilon: float = 1e-6,
) -> Float[Tensor, " B"]:
    """Compare each row's reward with those of its group; float64.

    With `scale="group_std"` a group without a signal gets 0, whatever the baseline: there is no std to divide by.

    >>> group_advantage(torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([7, 7, 7, 7]))
    tensor([ 0.5000, -0.5000, -0.5000,  0.5000], dtype=torch.float64)
    """
    rewards = rewards.double()
    names, index = torch.unique(groups, return_inverse=True)
    zeros = rewards.new_zeros(len(names))  # sums over groups are added up here, then read in the place of each row
    size = zeros.index_add(0, index, torch.ones_like(rewards))[index]
    centered = rewards - zeros.index_add(0, index, rewards)[index] / size
    signal = has_signal(rewards, groups)
    centered = torch.where(signal, centered, 0.0)
    others = (size - 1).clamp(min=1)
    advantage = {"none": rewards, "group_mean": centered, "leave_one_out": centered * size / others}[baseline]
    if scale == "none":
        return advantage
    divisor = (zeros.index_add(0, index, centered.square())[index] / others).sqrt() + epsilon
    return torch.where(signal & (divisor > 0), advantage / divisor, 0.0)


def gdpo(
    components: Float[Tensor, "B K"],
    groups: Int[Tensor, " B"],
    *,
    weights: Sequence[float],
    epsilon: float = 1e-6,
) -> Float[Tensor, " B"]:
    """Normalise each of several rewards within its group, then add them up, so that none drowns another; float64.

    The paper then whitens over the batch: `whiten`, over rows as TRL and NeMo-RL do; verl weighs rows by their tokens.
    A reward that is constant within a group adds exactly 0 there, and so does one of weight 0.
    """
    parts = [
        weight * group_advantage(component, groups, baseline="group_mean", scale="group_std", epsilon=epsilon)
        for weight, component in zip(weights, components.unbind(1), strict=True)
    ]
    return torch.stack(parts).sum(dim=0)


def whiten(values: Float[Tensor, "*axes"], mask: Bool[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
    """Mean 0 and variance 1 (Bessel's) over what the mask holds; 0 elsewhere, and everywhere where it holds one.

    Taken over [B, T] every token counts the same, and long answers more than short ones.
    """
    number = mask.sum()
    values = torch.where(mask, values, 0.0)
    centered = torch.where(mask, values - values.sum() / number.clamp(min=1), 0.0)
    variance = centered.square().sum() / (number - 1).clamp(min=1)
    return centered * (variance + 1e-8).rsqrt()


def returns_to_go(rewards: Float[Tensor, "B T"], *, gamma: float = 1.0) -> Float[Tensor, "B T"]:
    """The discounted sum of the rewards from each token on.

    >>> returns_to_go(torch.tensor([[0.0, 1.0, 2.0]]), gamma=0.5)
    tensor([[1., 2., 2.]])
    """
    if gamma == 1.0:
        return rewards.flip(1).cumsum(dim=1).flip(1)
    returns, last = torch.empty_like(rewards), torch.zeros_like(rewards[:, 0])
    for token in reversed(range(rewards.shape[1])):
        last = rewards[:, token] + gamma * last
        returns[:, token] = last
    return returns


def overlong_penalty(num_tokens: Int[Tensor, " B"], *, max_length: int, buffer: int) -> Float[Tensor, " B"]:
    """DAPO's soft punishment of length (arXiv:2503.14476 eq. 13): 0, then down to -1 over the last `buffer` tokens.

    Beyond `max_length` it stays at -1, as in the paper; verl's and NeMo-RL's go on falling there.

    Raises:
        ValueError: `buffer` is not from 1 to `max_length`.

    >>> overlong_penalty(torch.tensor([5, 8, 10, 12]), max_length=10, buffer=4)
    tensor([ 0.0000, -0.5000, -1.0000, -1.0000], dtype=torch.float64)
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer={buffer} must be from 1 to max_length={max_length}: the penalty grows over it")
    return 0.0 - ((num_tokens.double() - (max_length - buffer)) / buffer).clamp(0.0, 1.0)  # and no -0


def gae(
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    last_values: Float[Tensor, " B"] | None = None,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Generalised advantage estimation over the tokens that the policy chose: advantages, and returns = A + V.

    Tokens off the mask (tool output, prompts, padding) are no steps: the next token of a token is the next one on the
    mask. Their rewards and values are not looked at, not even for NaN, and their advantages and returns are 0. Both are
    computed in the dtype of `rewards`, whatever that of the values: give float64 where rows are long.

    Args:
        rewards: of each token.
        values: of the state before each token.
        mask: the policy's tokens.
        gamma: discount of a step.
        lam: lambda; 1 gives returns less values, 0 one-step differences.
        last_values: of the state after the last token, for answers that were cut off; 0, as for ended ones, if None.
    """
    values = values.to(rewards.dtype)
    value = rewards.new_zeros(len(rewards)) if last_values is None else last_values.to(rewards.dtype)
    advantage = torch.zeros_like(value)
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for token in reversed(range(rewards.shape[1])):
        chosen = mask[:, token]
        delta = rewards[:, token] + gamma * value - values[:, token]
        advantage = torch.where(chosen, delta + gamma * lam * advantage, advantage)
        value = torch.where(chosen, values[:, token], value)
        advantages[:, token] = torch.where(chosen, advantage, 0.0)
        returns[:, token] = torch.where(chosen, advantage + value, 0.0)
    return advantages, returns
