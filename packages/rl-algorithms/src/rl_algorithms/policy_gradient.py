"""The policy gradient, from rollouts to the loss and its metrics.

`prepare` turns rollouts into `Examples`:

    1. failed rollouts leave; so do groups without a signal, where the objective says so
    2. the policy and the reference compute log-probabilities, where the objective needs them
    3. reward - penalty of length - KL in the reward
    4. advantages, whitened over all rows that are left; computed in float64, stored in float32, as losses are

A row that is truncated and therefore not trained on (`mask_truncated`) still counts in its group's baseline, with its
penalty and KL. `loss` is then, of some rows of a step:

    rho  = exp(logp - logp_proximal)                  importance ratio, of a token or an answer      losses
    l    = surrogate(rho, A)                          clip, CISPO, REINFORCE and others              losses
    l    = 0 unless the token is selected             high entropy, covariance                       losses
    l   *= f(exp(logp_proximal - logp_old))           correction of the sampler's mismatch           corrections
    l   += beta KL(logp, logp_ref)                                                                   kl
    L    = sum_t weight[t] l[t] - eta sum_t H[t] / N  weight sums to the mode's mean over the step   losses

H is the policy's entropy, N the step's trainable tokens. Every line is a pure function of the module named, or one of
yours in its place (`pieces`). Tokens off the mask contribute nothing, whatever their values are, NaN included, and
every divisor is counted over the whole step, so the parts add up to the same sum however the step is cut into
microbatches, ranks or packs.

Axes: B rows, T tokens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rl_algorithms import advantages, corrections
from rl_algorithms.contracts import Reference, Sums
from rl_algorithms.kl import LOG_RATIO_LIMIT, k3
from rl_algorithms.losses import Counts, token_weights
from rl_algorithms.objective import AdvantageConfig, Objective
from rl_algorithms.rollouts import Rollouts

__all__ = [
    "Examples",
    "LossFunction",
    "SelectedExamples",
    "check_finite",
    "kept_rows",
    "loss",
    "prepare",
    "reward_tokens",
    "select_tokens",
    "token_losses",
]

LossFunction: TypeAlias = Callable[..., tuple[Tensor, Sums]]
"""A loss that is written whole, called as `loss` below: `(logp, examples, *, objective, counts)`, on some of the rows.
It returns what they add to the step's loss, and sums of metrics over tokens, the loss as "loss" among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """Rollouts made ready for the loss. What an objective does not need is NaN."""

    rows_per_unit: ClassVar[int] = 1

    tokens: Int[Tensor, "B T"]
    """Right-padded."""

    lengths: Int[Tensor, " B"]
    """Tokens of each row that are not padding."""

    trainable: Bool[Tensor, "B T"]
    """Tokens that the policy chose and is trained on."""

    advantage: Float[Tensor, "B T"]
    """Of each token; the same for all of an answer, unless it comes from a value function."""

    logp_old: Float[Tensor, "B T"]
    """The sampler's."""

    logp_proximal: Float[Tensor, "B T"]
    """The policy's own when the batch was begun; needed where `ratio.proximal` is `recomputed`."""

    logp_ref: Float[Tensor, "B T"]
    """The reference's; needed for a KL, and to report it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedExamples(Examples):
    """Examples of one whole step, some of whose tokens were selected by looking at all of them."""

    selected: Bool[Tensor, "B T"]
    """What `objective.selection.tokens` selected."""


def prepare(
    rollouts: Rollouts,
    objective: Objective,
    *,
    policy: Reference | None = None,
    reference: Reference | None = None,
) -> Examples:
    """Make the rollouts of one batch ready for steps on them. May have no rows, where none has a signal.

    Args:
        rollouts: those of every rank.
        objective: what is minimised.
        policy: whose log-probabilities now are the proximal ones; needed where `ratio.proximal` is `recomputed`.
        reference: needed for a KL.

    Raises:
        ValueError: the objective needs a policy or a reference that was not given, greedy responses that were not
            sampled, or named rewards that the environment did not name; a log-probability that is needed, a reward or
            an advantage is not finite.
    """
    kept, examples, token_rewards = reward_tokens(rollouts, objective, policy=policy, reference=reference)
    if not len(kept.lengths):
        return examples
    config = objective.advantage
    advantage = estimate_advantage(kept, token_rewards, config)
    if advantage.ndim == 1:
        if config.whiten == "sequences":
            advantage = advantages.whiten(advantage, examples.trainable.any(dim=1))
        advantage = advantage[:, None].expand(examples.trainable.shape)
    elif config.whiten == "sequences":
        raise ValueError(f"whiten='sequences' is of one number a response, and {config.piece.name!r} gives one a token")
    if config.whiten == "tokens":
        advantage = advantages.whiten(advantage, examples.trainable)
    check_finite("advantage", advantage, examples.trainable)
    return replace(examples, advantage=advantage.float())


def estimate_advantage(
    kept: Rollouts, token_rewards: Float[Tensor, "B T"], config: AdvantageConfig
) -> Float[Tensor, "..."]:
    """What `config` makes of rewards, before anything is whitened: one number a response [B], or a token [B, T].

    Args:
        kept: rollouts that did not fail.
        token_rewards: of each token, with penalties and the KL in the reward.
        config: how rewards become advantages.

    Raises:
        ValueError: greedy or named rewards are needed and there are none, or a reward is not finite.
    """
    if config.compares_greedy and kept.greedy_rewards is None:
        raise ValueError(
            f"advantage.estimator={config.piece.name!r} compares with the greedy response to each prompt, and these "
            f"rollouts have no greedy_rewards; give collect_batch, or grpo.train, greedy= sampling options"
        )
    rewards = token_rewards.sum(dim=1)
    available: dict[str, Any] = {
        "rewards": rewards,
        "token_rewards": token_rewards,
        "groups": kept.groups,
        "num_tokens": kept.response.sum(dim=1),
        "mask": kept.response,
        "logp_old": torch.where(kept.response, kept.logp_old, 0.0),
        "greedy_rewards": kept.greedy_rewards,
    }
    if config.normalize_each_reward:
        available |= {"components": kept.components, "weights": _weights(kept.component_names, config)}
    elif "components" in config.piece.inputs:
        available |= {"components": kept.components, "weights": [1.0] * len(kept.component_names)}
    advantage: Tensor = config.piece(available, config.numbers)
    if config.normalize_each_reward:
        # What is no named reward (a penalty, a KL) is compared too, and not scaled: its weight is its own.
        advantage = advantage + advantages.group_advantage(rewards - kept.rewards, kept.groups, baseline="group_mean")
    return advantage


def reward_tokens(
    rollouts: Rollouts, objective: Objective, *, policy: Reference | None = None, reference: Reference | None = None
) -> tuple[Rollouts, Examples, Float[Tensor, "B T"]]:
    """Everything of `prepare` except the advantages, for an algorithm that estimates them itself.

    Returns:
        The rollouts that are trained on: those that did not fail, and whose group has a signal if the objective asks
        for that; the same as examples, without advantages; and the reward of each token in float64, less the penalty of
        length and the KL where it is in the reward. Rows that are truncated and not trained on have both too: others
        are compared with them.

    Raises:
        ValueError: see `prepare`.
    """
    kept = rollouts.take(kept_rows(rollouts, objective))

    unknown = torch.full(kept.tokens.shape, math.nan)
    examples = Examples(
        tokens=kept.tokens,
        lengths=kept.lengths,
        trainable=kept.response,
        advantage=unknown,
        logp_old=kept.logp_old,
        logp_proximal=unknown,
        logp_ref=unknown,
    )
    if objective.kl.weight > 0:
        if reference is None:
            raise ValueError(f"kl.weight={objective.kl.weight} needs a reference, and none was given")
        if len(examples.tokens):
            examples = replace(examples, logp_ref=reference.logp(examples))
        check_finite("logp_ref", examples.logp_ref, examples.trainable)
    if objective.ratio.proximal == "recomputed":
        if policy is None:
            raise ValueError("ratio.proximal='recomputed' needs the policy when a batch is begun, and none was given")
        if len(examples.tokens):
            examples = replace(examples, logp_proximal=policy.logp(examples))
        check_finite("logp_proximal", examples.logp_proximal, examples.trainable)
    check_finite("logp_old", examples.logp_old, examples.trainable)

    rewards = kept.token_rewards.clone()
    if objective.overlong.max_length is not None and len(rewards):
        penalty = objective.overlong.penalty * advantages.overlong_penalty(
            kept.response.sum(dim=1), max_length=objective.overlong.max_length, buffer=objective.overlong.buffer
        )
        last = kept.response.shape[1] - 1 - kept.response.flip(1).int().argmax(dim=1)
        rewards[torch.arange(len(rewards)), last] += penalty
    if objective.kl.weight > 0 and objective.kl.place == "reward" and len(rewards):
        logp = examples.logp_proximal if objective.ratio.proximal == "recomputed" else examples.logp_old
        known = {"logp": torch.where(kept.response, logp, 0.0), "mask": kept.response}
        kl = objective.kl.estimate({**known, "logp_ref": torch.where(kept.response, examples.logp_ref, 0.0)})
        rewards -= objective.kl.weight * torch.where(kept.response, kl, 0.0).double()

    if objective.selection.mask_truncated:
        examples = replace(examples, trainable=examples.trainable & ~kept.truncated[:, None])
    return kept, examples, rewards


def kept_rows(rollouts: Rollouts, objective: Objective) -> Bool[Tensor, " B"]:
    """The rollouts that `prepare` keeps: those that did not fail, and whose group has a signal if that is asked for."""
    rows = ~rollouts.failed
    if objective.selection.groups_without_signal == "drop":
        valid = rows.clone()
        rows[valid] = advantages.has_signal(rollouts.rewards[valid], rollouts.groups[valid])
    return rows


def select_tokens(examples: Examples, objective: Objective) -> Examples:
    """The same examples, with the tokens that the objective selects by looking at the whole step.

    Args:
        examples: every row of one optimizer step, those of every rank.
        objective: if it selects no tokens, or row by row, the examples are returned as they are.
    """
    piece = objective.selection.piece
    if piece is None or not piece.whole_step:
        return examples
    mask = examples.trainable
    proximal = examples.logp_proximal if objective.ratio.proximal == "recomputed" else examples.logp_old
    available = {
        "logp_old": torch.where(mask, examples.logp_old, 0.0),
        "logp_proximal": torch.where(mask, proximal, 0.0),
        "advantage": torch.where(mask, examples.advantage, 0.0),
        "mask": mask,
    }
    if missing := [name for name in piece.inputs if name not in available]:
        raise ValueError(
            f"selection.tokens={piece.name!r} looks at the whole step before any forward of it, and asks for "
            f"{', '.join(missing)}; there are {', '.join(available)}"
        )
    selected = piece(available, objective.selection.numbers) & mask
    if isinstance(examples, SelectedExamples):
        return replace(examples, selected=selected)
    given = {each.name: getattr(examples, each.name) for each in fields(examples)}
    return SelectedExamples(**given, selected=selected)


def loss(output: Tensor, examples: Examples, *, objective: Objective, counts: Counts) -> tuple[Tensor, Sums]:
    """The part of the step's loss that these rows contribute, and sums of their metrics over tokens.

    Args:
        output: log-probabilities [B, T], or stacked with entropies [B, T, 2] where the objective has an entropy bonus.
        examples: rows of the step, each whole.
        objective: what is minimised.
        counts: of the whole step.
    """
    columns, sums = token_losses(output, examples, objective=objective, counts=counts)
    return columns["loss"].sum(), sums


def token_losses(
    output: Tensor, examples: Examples, *, objective: Objective, counts: Counts
) -> tuple[dict[str, Tensor], Sums]:
    """`loss` before it is added up: what each token contributes, and the sums of metrics.

    Args: as of `loss`.

    Returns:
        Columns [B, T] and the sums. `loss` adds up to the loss and has its gradient; the others are for people to look
        at: `logp`, `clipped`, `weight` where the sampler's mismatch is corrected, `entropy` where it was asked for.
    """
    mask, config = examples.trainable, objective.ratio
    logp, entropy = (output, None) if output.ndim == 2 else output.unbind(-1)
    logp = torch.where(mask, logp, 0.0)
    logp_old = torch.where(mask, examples.logp_old.to(logp.dtype), 0.0)
    advantage = torch.where(mask, examples.advantage.to(logp.dtype), 0.0)

    # The importance ratio, to the proximal policy.
    if config.proximal == "sampler":
        logp_proximal = logp_old
    elif config.proximal == "current":
        logp_proximal = logp.detach()
    else:
        logp_proximal = torch.where(mask, examples.logp_proximal.to(logp.dtype), 0.0)
    # What a piece may ask for: 0 off the mask.
    available: dict[str, Any] = {
        "logp": logp,
        "logp_old": logp_old,
        "logp_proximal": logp_proximal,
        "log_ratio": logp - logp_proximal,
        "advantage": advantage,
        "mask": mask,
        "entropy": None if entropy is None else torch.where(mask, entropy, 0.0),
    }
    available["ratio"] = ratio = config.level_piece(available, {})

    # Which tokens keep their policy gradient.
    selection, selected = objective.selection.piece, mask
    if selection is not None and not selection.whole_step:
        selected = selection(available, objective.selection.numbers) & mask
    elif selection is not None:
        if not isinstance(examples, SelectedExamples):
            raise ValueError(
                f"selection.tokens={selection.name!r} looks at the whole step, and these rows may be a part of it; "
                f"give the step's examples to select_tokens before they are cut, as grpo.step does"
            )
        selected = examples.selected & mask
    available["selected"] = selected

    # The surrogate, and where its clip was what bound.
    made = config.piece(available, config.numbers)
    per_token, clipped = made if isinstance(made, tuple) else (made, torch.zeros_like(mask))
    if selection is not None and "selected" not in config.piece.inputs:
        per_token = torch.where(selected, per_token, 0.0)

    with torch.no_grad():
        gap = torch.where(mask, logp_old - logp, 0.0)
        sums = {
            "clip_fraction": (clipped & mask).sum(),
            "ratio": torch.where(mask, ratio, 0.0).sum(),
            "kl_engine": gap.sum(),  # k1 estimate of KL(sampler || trainer)
            "token_mult_prob_error": torch.where(mask, gap.abs().clamp(max=LOG_RATIO_LIMIT).exp(), 0.0).sum(),
            "entropy": -torch.where(mask, logp_old, 0.0).sum(),  # the sampler's: the mean of -logp over its samples
        }

    if selection is not None:
        sums["selected_fraction"] = selected.sum()
    if objective.correction.off_policy_threshold is not None:
        dropped = corrections.off_policy_sequences(
            logp, logp_old, mask, advantage=advantage, threshold=objective.correction.off_policy_threshold
        )
        per_token = torch.where(dropped, 0.0, per_token)
        sums["off_policy_fraction"] = dropped.sum()

    columns: dict[str, Tensor] = {"logp": logp.detach(), "clipped": clipped & mask}

    # The correction. Where the sampler is the proximal policy there is none: every weight would be 1.
    if config.proximal != "sampler" and objective.correction.active:
        weight = corrections.token_factors(logp_proximal, logp_old, mask, config=objective.correction)
        per_token = torch.where(weight == 0, 0.0, per_token * weight)  # what is rejected may be infinite
        columns["weight"] = masked = torch.where(mask, weight, 0.0)
        sums |= {
            "importance_weight": masked.sum(),
            "importance_weight_squared": masked.square().sum(),
            "rejected_fraction": ((masked == 0) & mask).sum(),
        }

    if objective.kl.weight > 0:
        logp_ref = torch.where(mask, examples.logp_ref.to(logp.dtype), 0.0)
        if objective.kl.place == "loss":
            kl = objective.kl.estimate({**available, "logp_ref": logp_ref})
            per_token = per_token + objective.kl.weight * kl
        sums["kl_reference"] = k3(logp.detach(), logp_ref).sum()  # both are 0 off the mask

    weights = token_weights(mask, objective.aggregation, counts, max_length=objective.max_length).to(logp.dtype)
    columns["loss"] = weights * torch.where(mask, per_token, 0.0)
    if entropy is not None:
        columns["loss"] = columns["loss"] - objective.entropy_weight * available["entropy"] / max(counts.tokens, 1)
        columns["entropy"] = available["entropy"].detach()
        sums["entropy"] = columns["entropy"].sum()
    return columns, {"loss": columns["loss"].detach().sum(), **sums}


def check_finite(name: str, logp: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> None:
    """Refuse a log-probability that is missing where it is needed.

    Raises:
        ValueError: naming row and token of the first one.
    """
    missing = (mask & ~logp.isfinite()).nonzero()
    if len(missing):
        row, token = missing[0].tolist()
        raise ValueError(
            f"{name} of row {row}, token {token} is {logp[row, token].item()}, and {len(missing)} tokens that are "
            f"trained on have none that is finite; a ratio to nothing would be made up"
        )


def _weights(names: tuple[str, ...], config: AdvantageConfig) -> list[float]:
    if not names:
        raise ValueError(
            "normalize_each_reward compares rewards by name, and the environment names none; return "
            "EnvironmentReturn.rewards, or combine reward functions into one environment"
        )
    if unknown := sorted(set(config.reward_weights) - set(names)):
        raise ValueError(f"reward_weights names {', '.join(unknown)}; the environment's rewards are {', '.join(names)}")
    return [config.reward_weights.get(name, 1.0) for name in names]
