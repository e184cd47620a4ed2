"""Group Relative Policy Optimization, whole: from prompts to new weights in the engine. Its kin differ in `objective`.

    A[g]   = (r[g] - mean(r)) / std(r)                      advantage, within one prompt's group     advantages
    rho[t] = exp(logp[t] - logp_old[t])                     importance ratio, trainer over sampler
    L      = -sum_t min(rho A, clip(rho, 1 - low, 1 + high) A) / N                                    policy_gradient

N counts the trainable tokens of the whole optimizer step, over every microbatch and every rank, so the gradient does
not depend on how the batch was cut. Which advantage, ratio, clip, correction, KL and mean are taken is an `Objective`:
the published ones are in `presets`. Axes: P prompts, G rollouts of each, B rows, T tokens. Paper: arXiv:2402.03300.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

from rl_algorithms import observation, policy_gradient, presets
from rl_algorithms.chat import Chat, Prompt
from rl_algorithms.choices import check_fields
from rl_algorithms.contracts import Engine, Environment, Policy, Reference, WeightSync
from rl_algorithms.losses import Counts
from rl_algorithms.objective import Objective
from rl_algorithms.policy_gradient import Examples, LossFunction, check_finite, prepare, select_tokens
from rl_algorithms.presets import *  # noqa: F403 - `grpo.dapo()` and its kin
from rl_algorithms.rollouts import Rollouts, collect_batch, describe, episode_seed
from rl_algorithms.stepping import (
    PhaseTimer,
    batches_left,
    bring_weights,
    checked_batches,
    figures,
    finite_step,
    mean_of_steps,
    take_rows,
)

__all__ = ["Examples", "GRPOConfig", "minibatches", "prepare", "step", "train"]
__all__ += presets.__all__
SamplingT = TypeVar("SamplingT")


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOConfig:
    """What a GRPO run may choose."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid"}

    max_num_steps: int
    """Optimizer steps to take at most, a multiple of `steps_per_generation`. A batch without a signal counts as its
    steps, and changes nothing."""

    num_prompts: int = 32
    """Prompts in each batch of rollouts."""

    num_generations_per_prompt: int = 8
    """Rollouts of each prompt: its group, and its baseline."""

    steps_per_generation: int = 1
    """Optimizer steps on each batch of rollouts. More learns more from the same rollouts, and further off-policy."""

    max_turns: int = 1
    """Answers in one conversation at most, where the environment goes on after the first."""

    max_length: int | None = None
    """Tokens that a conversation may have before it is answered again. Null is no bound but the engine's context."""

    objective: Objective = field(default_factory=Objective)
    """What is minimised."""

    def __post_init__(self) -> None:
        counts = ("num_prompts", "num_generations_per_prompt", "steps_per_generation", "max_num_steps", "max_turns")
        check_fields(self, at_least={**dict.fromkeys(counts, 1), "max_length": 2})
        if self.num_generations_per_prompt < 2 and self.objective.advantage.compares_group:
            raise ValueError("num_generations_per_prompt=1 must be >= 2: a group of one has advantage 0")
        if self.max_num_steps % self.steps_per_generation:
            steps, each = self.max_num_steps, self.steps_per_generation
            raise ValueError(f"max_num_steps={steps} must be a multiple of steps_per_generation={each}")
        self.objective.refuse_off_policy(self.steps_per_generation)


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
    reference: Reference | None = None,
    greedy: SamplingT | None = None,
    version: int = 0,
    steps_taken: int = 0,
    seed: int = 0,
    on_rollouts: Callable[[Rollouts], object] = lambda _: None,
) -> Iterator[dict[str, float]]:
    """Train for `max_num_steps`; after each batch of rollouts, yield what to log, the new `version` included.

    The engine must hold the weights, which have seen `version` steps, as it does whenever a dict is yielded. `prompts`
    yields `num_prompts` at a time. A resumed run gives the `steps_taken` so far and prompts from there. `on_rollouts`
    gets each batch before it is trained on. `greedy`: `sampling` at temperature 0, for advantages that need it (ReMax).
    """
    timer = PhaseTimer()
    ask: dict[str, Any] = {"engine": engine, "sampling": sampling, "chat": chat, "environment": environment}
    ask |= {"timer": timer, "max_batches": config.objective.selection.max_generation_batches}
    ask["greedy"] = greedy if config.objective.advantage.compares_greedy else None
    left = batches_left(config, steps_taken=steps_taken)
    given = checked_batches(prompts, name="prompts", wanted=len(left), size=config.num_prompts)
    for number, taken in left:
        rollouts = collect_batch(given, config, number=number, version=version, seed=seed, **ask)
        on_rollouts(rollouts)
        with timer.phase("train"):
            examples = prepare(rollouts, config.objective, policy=policy, reference=reference)
            numbered = observation.number_rows(examples, rollouts, config.objective)
            groups = rollouts.groups[numbered.rows]
            parts = minibatches(numbered, config, groups=groups, seed=episode_seed(seed, number))
            steps = [step(policy, part, config.objective) for part in parts]
        metrics = describe(rollouts, version=version)
        version += len(steps)
        if steps:  # nothing to train on, no step, nothing new to transfer
            bring_weights(weight_sync, version=version, timer=timer)
        yield {**metrics, **mean_of_steps(steps), "version": version, "steps_taken": taken, **timer.lap()}


def minibatches(examples: Examples, config: GRPOConfig, *, groups: Int[Tensor, " B"], seed: int) -> Iterator[Examples]:
    """Deal the rows that have something to train on over `steps_per_generation` optimizer steps.

    Groups come in a random order, and the rows of one stay together, as in verl and NeMo-RL, where equal shares allow
    it: a step then sees answers to a prompt beside those that they are compared with, and a policy that reads common
    prefixes once (`share_prefixes`) has the most in common. TRL deals single rows.

    Args:
        examples: of one batch.
        config: its `steps_per_generation` are the parts; none is empty.
        groups: of each of `examples`.
        seed: of the order.
    """
    shuffle = torch.Generator().manual_seed(seed)  # the same when a run is resumed here
    rows = examples.trainable.any(dim=1).nonzero()[:, 0]
    names, group_of_row = torch.unique(groups[rows], return_inverse=True)
    place = torch.randperm(len(names), generator=shuffle)
    order = rows[place[group_of_row].argsort(stable=True)].tensor_split(config.steps_per_generation)
    return (take_rows(examples, part) for part in order if len(part))


def step(
    policy: Policy, examples: Examples, objective: Objective, *, loss: LossFunction = policy_gradient.loss
) -> dict[str, float]:
    """Take one optimizer step on `examples`, those of every rank, with the objective's loss or another; return metrics.

    Raises:
        ValueError: no token is trainable, a sampler's log-probability is missing, or the loss is not finite.
    """
    check_finite("logp_old", examples.logp_old, examples.trainable)
    counts = Counts.of(examples.trainable)
    if not counts.tokens:
        raise ValueError(f"none of the {examples.tokens.numel()} tokens of this step is trainable")
    bound = functools.partial(loss, objective=objective, counts=counts)
    output: Any = {"output": "logp_and_entropy"} if objective.needs_entropy else {}
    sums = policy.forward_backward(select_tokens(examples, objective), bound, **output)
    where = functools.partial(_worst_token, policy, examples)
    return {"grad_norm": finite_step(policy, sums, where=where), **figures(sums, num_tokens=counts.tokens)}


def _worst_token(policy: Policy, examples: Examples) -> str:
    """Say which token has no finite log-probability, or the largest ratio, for the message of a loss that is no number.

    It costs a forward pass, of a run that ends.
    """
    logp = policy.logp(examples)
    missing = (examples.trainable & ~logp.isfinite()).nonzero()
    if len(missing):
        row, token = missing[0].tolist()
        what = f"the policy's log-probability is {logp[row, token].item()}, as of {len(missing)} tokens"
    else:
        apart = ((logp - examples.logp_old).abs() * examples.trainable).nan_to_num()
        row, token = divmod(int(apart.argmax()), apart.shape[1])
        what = f"log-probabilities are furthest apart, {logp[row, token]:.6g} and {examples.logp_old[row, token]:.6g}"
    rollout = int(getattr(examples, "rows", torch.arange(len(logp)))[row])
    at = f"token {token} (id {int(examples.tokens[row, token])})"
    return f"In rollout {rollout} of the batch, at {at}, {what}. "
