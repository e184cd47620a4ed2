"""Advantages: how much better an answer, or a token, was than expected.

    group mean       r_i - mean_g r                                      GRPO, Dr.GRPO (arXiv:2402.03300, 2503.20783)
    leave one out    r_i - mean of the others = n/(n-1) (r_i - mean_g r)    RLOO (arXiv:2402.14740)
    group std        ... / (std_g r + epsilon), Bessel's n - 1
    whitening        (A - mean A) / sqrt(var A + 1e-8) over a batch      REINFORCE++ (arXiv:2501.03262)
    each reward      sum_k w_k (r_k - mean_g r_k) / (std_g r_k + epsilon)    GDPO (arXiv:2601.05242)
    OPO              r_i - sum_g(T r) / sum_g T                          arXiv:2505.23585; T tokens of a response
    optimal baseline G_t - sum_g(W_t G_t) / sum_g W_t                    W_t the squared score, added up: see there
    pass@k           of a right and a wrong response to a group's pass@k     arXiv:2508.10751 sec. 2.4
    best - second    max_g r - second largest, for the best alone        arXiv:2503.19595
    ReMax            r - r of the greedy response                        arXiv:2310.10505
    GAE              delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lambda A_{t+1}    arXiv:1506.02438

A group is named by an integer, the same for all of its rows; prompts are never compared. Where all rewards of a group
are equal but for rounding, its advantages are exactly 0: where the largest and the smallest differ by no more than
`SIGNAL_TOLERANCE` times the largest magnitude among them, or times 1 if that is less. So they are for a group of one,
whose raw reward verl returns. A reward that is not a finite number is refused by every function here.

Where implementations differ: epsilon is 1e-6 in verl and NeMo-RL, 1e-4 in TRL (its GDPO too), and an argument here;
NeMo-RL's leave-one-out also leaves the row out of the std, and divides by none that is 0, which makes a lone success of
eight 1 where it is 2.83 with leave-one-out and the group's std, as here, and the group's sum negative; NeMo-RL whitens
REINFORCE++ by the population's variance. Rewards are taken in float64.

Axes: B rows, T tokens, K named rewards.
"""

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rl_algorithms.pieces import piece

__all__ = [
    "SIGNAL_TOLERANCE",
    "Baseline",
    "Scale",
    "best_minus_second",
    "gae",
    "gdpo",
    "group_advantage",
    "has_signal",
    "opo",
    "optimal_baseline",
    "overlong_penalty",
    "pass_at_k_advantage",
    "remax",
    "returns_to_go",
    "whiten",
]

Baseline: TypeAlias = Literal["none", "group_mean", "leave_one_out"]
Scale: TypeAlias = Literal["none", "group_std"]

SIGNAL_TOLERANCE = 1e-6
"""Rewards of a group that differ by no more, relative to the largest or to 1, differ by rounding: float32 scores have
seven digits. DAPO's reference asks for a std above 1e-6."""


def has_signal(rewards: Float[Tensor, " B"], groups: Int[Tensor, " B"]) -> Bool[Tensor, " B"]:
    """Whether the rewards of the group that each row is of differ by more than rounding; see `SIGNAL_TOLERANCE`.

    Raises:
        ValueError: a reward is not a finite number.

    >>> has_signal(torch.tensor([0.7, 0.7, 1.0, 0.0]), torch.tensor([4, 4, 9, 9]))
    tensor([False, False,  True,  True])
    >>> has_signal(torch.tensor([0.1 + 0.2, 0.3], dtype=torch.float64), torch.tensor([4, 4]))
    tensor([False, False])
    """
    _check_rewards(rewards)
    names, index = torch.unique(groups, return_inverse=True)
    empty = torch.empty(len(names), dtype=rewards.dtype, device=rewards.device)
    largest = empty.scatter_reduce(0, index, rewards, "amax", include_self=False)
    smallest = empty.scatter_reduce(0, index, rewards, "amin", include_self=False)
    tolerance = SIGNAL_TOLERANCE * torch.maximum(largest.abs(), smallest.abs()).clamp(min=1.0)
    return (largest - smallest > tolerance)[index]


def _check_rewards(rewards: Tensor) -> None:
    """Refuse rewards that are not numbers: a comparison with one of them would say nothing, and say it silently."""
    wrong = (~rewards.isfinite()).nonzero()
    if len(wrong):
        place = wrong[0].tolist()
        where = f"row {place[0]}" + (f", column {place[1]}" if len(place) > 1 else "")
        raise ValueError(
            f"the reward of {where} is {rewards[tuple(place)].item()}, and {len(wrong)} of {rewards.numel()} rewards "
            f"are not finite numbers; leave failed rollouts out, or count them as 0"
        )
    largest = rewards.abs().max().item() if rewards.numel() else 0.0
    if largest > LARGEST_REWARD:
        raise ValueError(
            f"a reward of magnitude {largest:g} overflows when a group is compared; scale the rewards down"
        )


LARGEST_REWARD = 1e100
"""Above it, squares of float64 overflow, and the loss would be nan without a word about the reward."""


def _groups(groups: Tensor, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The index of each row's group, zeros to add up over groups, and the size of each row's group."""
    names, index = torch.unique(groups, return_inverse=True)
    zeros = like.new_zeros(len(names))
    return index, zeros, zeros.index_add(0, index, torch.ones_like(like))[index]


def _group_formula(baseline: Baseline, scale: Scale, epsilon: float) -> str:
    centered = {
        "none": "R[t..]",
        "group_mean": "R - mean(R of the group)",
        "leave_one_out": "R - mean(R of the others of the group)",
    }[baseline]
    return f"({centered}) / (std(R of the group) + {epsilon:g})" if scale == "group_std" else centered


@piece("advantage", "group", formula=_group_formula, source="arXiv:2402.03300, 2503.20783, 2402.14740")
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

    Raises:
        ValueError: a reward is not a finite number.

    >>> group_advantage(torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([7, 7, 7, 7]))
    tensor([ 0.5000, -0.5000, -0.5000,  0.5000], dtype=torch.float64)
    """
    signal = has_signal(rewards, groups)  # before they are float64, whose digits a float32 reward does not have
    rewards = rewards.double()
    index, zeros, size = _groups(groups, rewards)  # sums over groups are added up, then read in the place of each row
    centered = rewards - zeros.index_add(0, index, rewards)[index] / size
    centered = torch.where(signal, centered, 0.0)
    others = (size - 1).clamp(min=1)
    advantage = {"none": rewards, "group_mean": centered, "leave_one_out": centered * size / others}[baseline]
    if scale == "none":
        return advantage
    divisor = (zeros.index_add(0, index, centered.square())[index] / others).sqrt() + epsilon
    return torch.where(signal & (divisor > 0), advantage / divisor, 0.0)


@piece("advantage", formula="R - sum(T R of the group) / sum(T of the group), T tokens", source="OPO, arXiv:2505.23585")
def opo(rewards: Float[Tensor, " B"], groups: Int[Tensor, " B"], num_tokens: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Weigh the baseline by length: the least variance if a response's squared gradient grows as its tokens.

    `num_tokens` counts the tokens that the policy chose. A group without a signal gets 0, and so does a group of one,
    whose raw reward verl returns.
    """
    signal = has_signal(rewards, groups)
    rewards, length = rewards.double(), num_tokens.double()
    index, zeros, _ = _groups(groups, rewards)
    total = zeros.index_add(0, index, length)[index].clamp(min=1)
    return torch.where(signal, rewards - zeros.index_add(0, index, length * rewards)[index] / total, 0.0)


@piece(
    "advantage",
    formula="R[t..] - sum(W_t R[t..] of the group) / sum(W_t of the group), W_t = sum over s <= t of "
    "(1 - exp(logp_old[s]))",
    source="Greensmith et al. 2004 (JMLR 5); by token as in verl",
)
def optimal_baseline(
    token_rewards: Float[Tensor, "B T"],
    groups: Int[Tensor, " B"],
    *,
    logp_old: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
) -> Float[Tensor, "B T"]:
    """The baseline of least variance at each token: rewards to come, weighed by the squared score so far.

    The squared score of a token in logit space is 1 - 2 pi + sum pi^2 over the vocabulary, as in verl's
    `optimal_token_baseline`; of the sum this takes pi of the sampled token, whose mean it is, so it needs no logits.
    Responses are lined up by how many of their tokens came before, whatever lies between these. Where only one row of a
    group is left, its baseline is its own reward and its advantage 0, as in verl; a group of one gets 0 throughout.
    """
    _check_rewards(token_rewards)
    returns = returns_to_go(torch.where(mask, token_rewards.double(), 0.0))
    weight = torch.where(mask, 1.0 - logp_old.double().exp(), 0.0).cumsum(dim=1)
    place = (mask.cumsum(dim=1) - 1).clamp(min=0)  # the token's number among those that the policy chose
    index, _, _ = _groups(groups, returns[:, 0])
    number, width = int(index.max()) + 1 if len(index) else 0, mask.shape[1]
    cell = (index[:, None] * width + place)[mask]
    sums = returns.new_zeros(number * width)
    weighed, total = (sums.index_add(0, cell, each[mask]) for each in (weight * returns, weight))
    advantage = torch.zeros_like(returns)
    advantage[mask] = returns[mask] - (weighed / (total + 1e-8))[cell]
    return advantage


def _pass_at_k_formula(k: float) -> str:
    rest = f"C(wrong - 1, {k:g} - 1) / C(n - 1, {k:g} - 1)"
    return (
        f"(1 - P) / S if right, else (1 - P - {rest}) / S; P = 1 - C(wrong, {k:g}) / C(n, {k:g}), S = sqrt(P (1 - P))"
    )


@piece(
    "advantage",
    "pass_at_k",
    formula=_pass_at_k_formula,
    source="Pass@k training, arXiv:2508.10751 sec. 2.4",
    refuse=lambda k: None if k >= 1 and k == int(k) else f"k={k} must be a whole number >= 1",
)
def pass_at_k_advantage(
    rewards: Float[Tensor, " B"], groups: Int[Tensor, " B"], *, k: float = 4
) -> Float[Tensor, " B"]:
    """The advantage of a response in the average subset of `k` of its group, when a subset is rewarded for one success.

    Exact over all subsets. Right is a reward above 0. k = 1 is the group mean and the population's std.

    Raises:
        ValueError: a reward is not finite, rewards are neither 0 nor 1, or a group has fewer than `k` rows.
    """
    _check_rewards(rewards)
    if len(odd := rewards[(rewards != 0) & (rewards != 1)]):
        raise ValueError(f"pass@k is of responses that are right or wrong, rewards 1 or 0; found {odd[0].item()}")
    advantage, k = torch.zeros_like(rewards, dtype=torch.float64), int(k)
    for name in torch.unique(groups):
        rows = groups == name
        number, wrong = int(rows.sum()), int((rewards[rows] == 0).sum())
        if number < k:
            raise ValueError(f"pass@{k} needs {k} responses a prompt, and group {int(name)} has {number}")
        passed = 1.0 - math.comb(wrong, k) / math.comb(number, k)
        if not 0.0 < passed < 1.0:
            continue  # every subset passes, or none does
        others = math.comb(wrong - 1, k - 1) / math.comb(number - 1, k - 1)
        scores = torch.where(rewards[rows] > 0, 1.0 - passed, 1.0 - passed - others)
        advantage[rows] = scores.double() / math.sqrt(passed * (1.0 - passed))
    return advantage


@piece(
    "advantage",
    formula="(max R - second largest R of the group) / (std(R of the group) + {epsilon:g}) for the best, else 0",
    source="arXiv:2503.19595; verl's grpo_passk",
)
def best_minus_second(
    rewards: Float[Tensor, " B"], groups: Int[Tensor, " B"], *, epsilon: float = 1e-6
) -> Float[Tensor, " B"]:
    """What the best response of a group adds to the best of all others. 0 for every row where two are best."""
    signal = has_signal(rewards, groups)
    rewards = rewards.double()
    advantage = torch.zeros_like(rewards)
    for name in torch.unique(groups[signal]):
        rows = (groups == name).nonzero()[:, 0]
        best, second = rewards[rows].topk(2).values.tolist()
        std = rewards[rows].std().item()
        advantage[rows[rewards[rows].argmax()]] = (best - second) / (std + epsilon)
    return advantage


@piece("advantage", formula="R - R of the greedy response to the same prompt", source="ReMax, arXiv:2310.10505")
def remax(rewards: Float[Tensor, " B"], greedy_rewards: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Compare with what the policy would have said at temperature 0; `greedy_rewards` has that reward for each row."""
    _check_rewards(rewards)
    _check_rewards(greedy_rewards)
    return rewards.double() - greedy_rewards.double()


@piece(
    "advantage",
    formula="sum_k w_k (R_k - mean(R_k of the group)) / (std(R_k of the group) + {epsilon:g})",
    source="GDPO, arXiv:2601.05242",
)
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


@piece("advantage", "returns", formula="R[t..]", source="arXiv:2501.03262")
def _returns(token_rewards: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    _check_rewards(token_rewards)
    return returns_to_go(token_rewards)  # what is rewarded from each token on


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
