"""The critic of PPO: what it is asked, what its values make of rewards, and how it learns.

    A, R    = GAE(rewards, V)                                        advantages.gae; R = A + V is what is learnt
    L_value = sum_t max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2) / 2 / N

The value of a token is that of the state before it. Of the state after the last token there is one only if it is asked
for: then the row is one token longer in that question, and the critic, being causal, does not see which token it is.

Axes: B rows, T tokens; N the trainable tokens of the step.
References: GAE (arXiv:1506.02438), PPO (arXiv:1707.06347), VAPO (arXiv:2504.05118: a lambda of its own for the critic).
"""

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from rl_algorithms import losses
from rl_algorithms.advantages import gae, whiten
from rl_algorithms.choices import check_fields
from rl_algorithms.contracts import Sums, TokenBatch, ValueModel
from rl_algorithms.stepping import figures, finite_step

__all__ = ["ValueConfig", "ValueExamples", "describe_values", "estimate", "explain", "loss", "step", "values_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueConfig:
    """What is made of values, and how they are learnt."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid"}

    gamma: float = 1.0
    """Discount of a token. Below 1, what is rewarded late hardly reaches the first tokens of a long answer."""

    lam: float = 0.95
    """Lambda of the advantages. 1 trusts rewards alone: no bias, much variance; lower trusts the critic more."""

    lam_of_returns: float | None = None
    """Lambda of the returns that the critic learns; null takes `lam`. 1 brings the reward whole to the first token of a
    long answer, where 0.95 leaves little of it (VAPO)."""

    clip: float | None = 0.2
    """A value that has moved further than this since the batch was begun is not moved on, in the units of the reward;
    null is no bound."""

    whiten: bool = True
    """Bring the advantages of all tokens of a batch to mean 0 and variance 1; else they are in the units of the reward,
    and their size is one more learning rate."""

    bootstrap_truncated: bool = False
    """Add the critic's value of what would have followed to answers that a limit cut off. Wrong where coming to an end
    in time is part of the task; right where the limit is an accident of the run."""

    def __post_init__(self) -> None:
        check_fields(self, above={"clip": 0})
        for name in ("gamma", "lam", "lam_of_returns"):
            if (value := getattr(self, name)) is not None and not 0.0 <= value <= 1.0:
                raise ValueError(f"{name}={value} must be between 0 and 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueExamples:
    """Rows made ready for the critic."""

    rows_per_unit: ClassVar[int] = 1

    tokens: Int[Tensor, "B T"]
    """Right-padded."""

    lengths: Int[Tensor, " B"]
    """Tokens of each row that are not padding."""

    trainable: Bool[Tensor, "B T"]
    """Tokens that the policy chose: before each of them there is a state with a value."""

    values_old: Float[Tensor, "B T"]
    """What the critic said when the batch was begun."""

    returns: Float[Tensor, "B T"]
    """What it should have said."""


def estimate(
    value_model: ValueModel,
    examples: TokenBatch,
    *,
    rewards: Float[Tensor, "B T"],
    truncated: Bool[Tensor, " B"],
    config: ValueConfig,
) -> tuple[Float[Tensor, "B T"], ValueExamples]:
    """The advantage of each token, and what the critic has to learn; returns are taken before advantages are whitened.

    Args:
        value_model: the critic, as it is when a batch is begun.
        examples: all rows of the batch, those of every rank; whitening is over their trainable tokens.
        rewards: of each token; each answer's at its last one.
        truncated: the rows that a limit ended.
        config: what is made of the values.

    Raises:
        ValueError: a value is not finite.
    """
    mask = examples.trainable
    cut_off = truncated if config.bootstrap_truncated else torch.zeros_like(truncated)
    values, last_values = values_of(value_model, examples, cut_off=cut_off)
    back = functools.partial(gae, rewards, values, mask, gamma=config.gamma, last_values=last_values)
    advantage, returns = back(lam=config.lam)
    if config.lam_of_returns is not None:
        _, returns = back(lam=config.lam_of_returns)
    return whiten(advantage, mask) if config.whiten else advantage, ValueExamples(
        tokens=examples.tokens,
        lengths=examples.lengths,
        trainable=mask,
        values_old=values,
        returns=returns.to(values.dtype),
    )


def values_of(
    value_model: ValueModel, examples: TokenBatch, *, cut_off: Bool[Tensor, " B"]
) -> tuple[Float[Tensor, "B T"], Float[Tensor, " B"]]:
    """The value before each trainable token, and after the last token of the rows that are `cut_off`; 0 elsewhere.

    Args:
        value_model: the critic.
        examples: whose states; may have no rows.
        cut_off: rows that went on in some other world, whose last state is therefore worth something. The critic is
            asked about rows one token longer, so its context must have room for that.

    Raises:
        ValueError: a value is not finite; the message names it.
    """
    if not len(examples.tokens):
        return torch.zeros(examples.tokens.shape), torch.zeros(0)
    cut_off = cut_off & examples.trainable.any(dim=1)
    after = cut_off[:, None] & (torch.arange(examples.tokens.shape[1] + 1) == examples.lengths[:, None])
    unknown = torch.full(after.shape, torch.nan)
    question = ValueExamples(
        tokens=pad(examples.tokens, (0, 1)),
        lengths=examples.lengths + cut_off,
        trainable=pad(examples.trainable, (0, 1)) | after,
        values_old=unknown,
        returns=unknown,
    )
    values = value_model.value(question)
    wrong = (question.trainable & ~values.isfinite()).nonzero()
    if len(wrong):
        row, token = wrong[0].tolist()
        raise ValueError(
            f"the value before token {token} of row {row} is {values[row, token].item()}, and {len(wrong)} values are "
            f"not finite: the critic has diverged; lower its learning rate, or clip its gradient"
        )
    last = torch.where(after, values, 0.0).sum(dim=1)
    return torch.where(examples.trainable, values[:, :-1], 0.0), last


def step(value_model: ValueModel, examples: ValueExamples, *, clip: float | None) -> dict[str, float]:
    """Take one optimizer step of the critic on `examples`, those of every rank; return what to log.

    Args:
        value_model: the critic.
        examples: one minibatch.
        clip: how far a value may move from `values_old` before it has no gradient any more; None leaves it out.

    Raises:
        ValueError: no token is trainable.
    """
    num_tokens = int(examples.trainable.sum())
    if not num_tokens:
        raise ValueError(f"none of the {examples.tokens.numel()} tokens of this step is trainable")
    bound = functools.partial(loss, clip=clip, num_tokens=num_tokens)
    sums = value_model.forward_backward(examples, bound, output="value")
    grad_norm = finite_step(value_model, sums)
    means = {f"value_{name}": figure for name, figure in figures(sums, num_tokens=num_tokens).items()}
    return {**means, "value_grad_norm": grad_norm}


def explain(config: ValueConfig, *, objective: str) -> str:
    """The objective's lines, as `Objective.explain` gives them, with the critic's in place of its advantage.

    Args:
        config: what is made of values, and how they are learnt.
        objective: one of its lines must begin with `advantage`.
    """
    rewards = "R[t] = the part of R at token t"
    cut_off = "V[T] of an answer that was cut off is the critic's" if config.bootstrap_truncated else "V[T] = 0"
    delta = f"delta[t] = R[t] + {config.gamma:g} V[t+1] - V[t]"
    whitened = ", then mean 0 and variance 1 over the batch's tokens" if config.whiten else ""
    lam = config.lam if config.lam_of_returns is None else config.lam_of_returns
    critic, moved = "(V - G[t])^2", "clip(V, V_old[t] - {0:g}, V_old[t] + {0:g})"
    if config.clip is not None:
        critic = f"max({critic}, ({moved.format(config.clip)} - G[t])^2)"
    parts = {
        "step": f"{delta}, {rewards}; {cut_off}",
        "advantage": f"A[t] = delta[t] + {config.gamma * config.lam:g} A[t+1]{whitened}",
        "return": f"G[t] = V[t] + delta[t] + {config.gamma * lam:g} (G[t+1] - V[t+1])",
        "critic": f"L_V = sum_i sum_t {critic} / (2 N_tok), in a step of its own",
    }
    before, name, rest = objective.partition("advantage")
    replaced, _, after = rest.partition("\n")
    width = len(name) + len(replaced) - len(replaced.lstrip())
    return before + "\n".join(f"{name:<{width}}{line}" for name, line in parts.items()) + "\n" + after


def loss(
    values: Float[Tensor, "B T"], examples: ValueExamples, *, clip: float | None, num_tokens: int
) -> tuple[Float[Tensor, ""], Sums]:
    """The part of the step's value loss that these rows contribute; `num_tokens` is of the whole step."""
    mask = examples.trainable
    values, returns, values_old = (
        torch.where(mask, each, 0.0) for each in (values, examples.returns, examples.values_old)
    )
    per_token, bound = losses.value_loss(values, returns.to(values.dtype), values_old.to(values.dtype), clip=clip)
    total = torch.where(mask, per_token, 0.0).sum() / num_tokens
    return total, {"loss": total.detach(), "clip_fraction": (bound & mask).sum()}


def describe_values(examples: ValueExamples) -> dict[str, float]:
    """How good the critic was when the batch was begun: means over tokens, and the share of variance it explained.

    `explained_variance` is 1 - var(R - V) / var(R): 1 for a perfect critic, 0 for a constant one, below for a harmful
    one; it is left out where all returns are equal. Nothing where no token is trainable.
    """
    returns, values = (each[examples.trainable].double() for each in (examples.returns, examples.values_old))
    if not len(returns):
        return {}
    figures_of_values = {"value": values.mean().item(), "return": returns.mean().item()}
    variance = returns.var(correction=0)
    if returns.max() > returns.min():
        figures_of_values["explained_variance"] = (1 - (returns - values).var(correction=0) / variance).item()
    return figures_of_values
