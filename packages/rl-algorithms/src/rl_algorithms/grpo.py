"""Group Relative Policy Optimization, whole: from prompts to new weights in the engine.

    A[g]   = (r[g] - mean(r)) / (std(r) + 1e-4)             advantage, within one prompt's group
    rho[t] = exp(logp[t] - logp_old[t])                     importance ratio, trainer over sampler
    L      = -sum_t min(rho A, clip(rho, 1 - low, 1 + high) A) / N

N counts the trainable tokens of the whole optimizer step, over every microbatch and every rank, so the gradient does
not depend on how the batch was cut. A batch of rollouts may serve several steps; logp_old stays the sampler's.
Groups whose rewards are all equal have no advantage: they leave the batch, and N counts the rest (DAPO's dynamic
sampling without the resampling). There is no KL penalty and no entropy bonus.

Axes: P prompts, G rollouts per prompt, B rows, T tokens.
References: DeepSeekMath (arXiv:2402.03300), DAPO (arXiv:2503.14476: clip-higher, token-level mean).
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rl_algorithms.chat import Chat, Prompt
from rl_algorithms.contracts import Engine, Environment, Policy, Sums, WeightSync
from rl_algorithms.metrics import mean_of_steps
from rl_algorithms.padding import take_rows
from rl_algorithms.phases import PhaseTimer
from rl_algorithms.rollouts import Rollouts, collect

__all__ = [
    "Examples",
    "GRPOConfig",
    "clipped_surrogate",
    "group_advantage",
    "has_signal",
    "prepare",
    "step",
    "train",
]

SamplingT = TypeVar("SamplingT")


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOConfig:
    """What a GRPO run may choose. The defaults are GRPO with DAPO's clip-higher and token-level mean."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "use_attribute_docstrings": True}

    max_num_steps: int
    """Optimizer steps to take at most, a multiple of `steps_per_generation`. A batch of rollouts in which no group has
    a signal counts as its steps, and changes nothing."""

    num_prompts: int = 32
    """Prompts in each batch of rollouts."""

    num_generations_per_prompt: int = 8
    """Rollouts of each prompt: its group, and its baseline."""

    steps_per_generation: int = 1
    """Optimizer steps on each batch of rollouts. More learns more from the same rollouts, and further off-policy."""

    clip_low: float = 0.2
    """A token whose ratio is below `1 - clip_low` is no longer pushed down."""

    clip_high: float = 0.28
    """A token whose ratio is above `1 + clip_high` is no longer pushed up."""

    normalize_by_std: bool = True
    """Divide advantages by the group's reward std, as the first GRPO paper does; Dr.GRPO does not."""

    def __post_init__(self) -> None:
        if not 0.0 < self.clip_low < 1.0:
            raise ValueError(f"clip_low={self.clip_low} must be between 0 and 1: the ratio is held above 1 - clip_low")
        if not self.clip_high > 0.0:
            raise ValueError(f"clip_high={self.clip_high} must be > 0: the ratio is held below 1 + clip_high")
        if self.num_generations_per_prompt < 2:
            raise ValueError(
                f"num_generations_per_prompt={self.num_generations_per_prompt} must be >= 2: a group of one is its own "
                f"baseline, and its advantage always 0"
            )
        for name in ("num_prompts", "steps_per_generation", "max_num_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be >= 1")
        if self.max_num_steps % self.steps_per_generation:
            raise ValueError(
                f"max_num_steps={self.max_num_steps} must be a multiple of "
                f"steps_per_generation={self.steps_per_generation}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """Rollouts made ready for the loss."""

    rows_per_unit: ClassVar[int] = 1
    tokens: Int[Tensor, "B T"]
    lengths: Int[Tensor, " B"]
    trainable: Bool[Tensor, "B T"]
    logp_old: Float[Tensor, "B T"]
    advantage: Float[Tensor, " B"]


def train(
    *,
    policy: Policy,
    engine: Engine[SamplingT],
    weight_sync: WeightSync,
    environment: Environment,
    prompts: Iterator[list[Prompt]],
    chat: Chat,
    sampling: SamplingT,
    config: GRPOConfig,
    version: int = 0,
    steps_taken: int = 0,
    seed: int = 0,
) -> Iterator[dict[str, float]]:
    """Train for `max_num_steps`; after each batch of rollouts, yield what to log, the new `version` included.

    `version` is how many steps the weights have seen at the start, and the engine must already hold them. `prompts`
    yields `num_prompts` at a time. When a dict is yielded, the engine holds the policy's weights. To go on with a run,
    give the `steps_taken` so far, and prompts from there on.
    """
    timer = PhaseTimer()
    for _ in range(steps_taken // config.steps_per_generation, config.max_num_steps // config.steps_per_generation):
        rollouts = collect(
            next(prompts),
            group_size=config.num_generations_per_prompt,
            engine=engine,
            sampling=sampling,
            environment=environment,
            chat=chat,
            timer=timer,
        )
        with timer.phase("train"):
            examples = prepare(rollouts, normalize_by_std=config.normalize_by_std)
            shuffle = torch.Generator().manual_seed((seed * 1_000_003 + version) % 2**63)  # the same when resumed here
            order = torch.randperm(len(examples.tokens), generator=shuffle).tensor_split(config.steps_per_generation)
            steps = [step(policy, take_rows(examples, rows), config) for rows in order if len(rows)]
        version += len(steps)
        if steps:  # no group with a signal, no step, nothing new to transfer
            with timer.phase("refit"):
                weight_sync(version=version)
        yield {**_describe(rollouts), **mean_of_steps(steps), "version": version, **timer.lap()}


def prepare(rollouts: Rollouts, *, normalize_by_std: bool) -> Examples:
    """Give each rollout its advantage, and leave out the groups whose rewards are all equal."""
    advantage = group_advantage(rollouts.rewards, normalize_by_std=normalize_by_std)
    signal = has_signal(rollouts.rewards)[:, None].expand_as(advantage).flatten()
    everything = Examples(
        tokens=rollouts.tokens,
        lengths=rollouts.lengths,
        trainable=rollouts.response,
        logp_old=rollouts.logp_old,
        advantage=advantage.flatten().float(),
    )
    return take_rows(everything, signal)


def step(policy: Policy, examples: Examples, config: GRPOConfig) -> dict[str, float]:
    """Take one optimizer step on `examples`, those of every rank; return what to log."""
    num_tokens = examples.trainable.sum()
    sums = policy.forward_backward(examples, functools.partial(_loss, config=config, num_tokens=num_tokens))
    grad_norm = policy.optim_step()
    return {"grad_norm": grad_norm, **{name: (total / num_tokens).item() for name, total in sums.items()}}


def has_signal(rewards: Float[Tensor, "P G"]) -> Bool[Tensor, " P"]:
    """Whether a group's rewards differ. Exact: a std of equal floats need not be 0."""
    return rewards.amax(dim=1) != rewards.amin(dim=1)


def group_advantage(rewards: Float[Tensor, "P G"], *, normalize_by_std: bool) -> Float[Tensor, "P G"]:
    """Center each prompt's rewards on their mean: the group is its own baseline. Equal rewards give exactly 0.

    >>> group_advantage(torch.tensor([[1.0, 0.0, 0.0, 1.0]]), normalize_by_std=False)
    tensor([[ 0.5000, -0.5000, -0.5000,  0.5000]])
    """
    centered = torch.where(has_signal(rewards)[:, None], rewards - rewards.mean(dim=1, keepdim=True), 0.0)
    return centered / (rewards.std(dim=1, keepdim=True) + 1e-4) if normalize_by_std else centered


def clipped_surrogate(
    logp: Float[Tensor, "B T"],
    logp_old: Float[Tensor, "B T"],
    advantage: Float[Tensor, " B"],
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """PPO's pessimistic objective per token, negated (arXiv:1707.06347, eq. 7), and where the clip was what bound."""
    ratio = torch.exp(logp - logp_old)
    free = ratio * advantage[:, None]
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantage[:, None]
    return -torch.minimum(free, clipped), clipped < free


def _loss(
    logp: Float[Tensor, "B T"], examples: Examples, *, config: GRPOConfig, num_tokens: Int[Tensor, ""]
) -> tuple[Float[Tensor, ""], Sums]:
    mask = examples.trainable
    logp_old = torch.where(mask, examples.logp_old, logp.detach())  # ratio 1 off the mask, whatever stands there
    per_token, bound = clipped_surrogate(
        logp, logp_old, examples.advantage, clip_low=config.clip_low, clip_high=config.clip_high
    )
    total = torch.where(mask, per_token, 0.0).sum()
    gap = torch.where(mask, logp_old - logp.detach(), 0.0)
    sums = {
        "loss": total.detach(),
        "clip_fraction": (bound & mask).sum(),
        "kl_engine": gap.sum(),  # k1 estimate of KL(sampler || trainer)
        "token_mult_prob_error": torch.where(mask, gap.abs().exp(), 0.0).sum(),
        "entropy": -logp_old[mask].sum(),  # of the sampler: the mean of -logp over its own samples
    }
    return total / num_tokens, sums


def _describe(rollouts: Rollouts) -> dict[str, float]:
    response_tokens = rollouts.response.sum().item()
    return {
        "reward": rollouts.rewards.mean().item(),
        "groups_with_signal": has_signal(rollouts.rewards).float().mean().item(),
        "response_tokens": response_tokens / len(rollouts.tokens),
        "truncated": rollouts.truncated.float().mean().item(),
        "sampled_tokens": response_tokens,
    }
