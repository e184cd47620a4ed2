"""Distillation, whole: a student becomes likelier to say what its teacher would.

    top[t]  = the K words that the teacher finds most probable at token t, and their log-probabilities P
    Q       = the student's log-probabilities of these words
    L       = sum_t D(P[t], Q[t]) / N             D: forward or reverse KL, or between; `distillation.losses`

On-policy the rows are the student's own answers, so that it learns where its own mistakes lead; no reward is needed.
Off-policy they are conversations that are given. N counts the trainable tokens of the whole optimizer step. A state is
compared with the teacher as it is, not as it was sampled: several steps on one batch need no importance ratio.

With `teacher_prompt_template` the teacher reads another prompt before the same response, and may be the policy itself:
`distillation.self_distillation`.

The models must share a tokenizer. Both are asked at the temperatures that they were set to: let them be equal.
`advantage` is the other form: one word a token as the advantage of GRPO's loss, from `teacher.logp` alone.

Axes: B rows, T tokens, K words.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from rl_algorithms import observation
from rl_algorithms.chat import Chat, Prompt
from rl_algorithms.contracts import (
    Engine,
    Environment,
    ResettingEnvironment,
    Student,
    Sums,
    Teacher,
    TokenBatch,
    WeightSync,
    matches,
)
from rl_algorithms.distillation.config import DistillConfig, explain, require_same_tokenizer
from rl_algorithms.distillation.examples import Examples, NoReward, Rows, RowsOfBoth, prepare
from rl_algorithms.distillation.losses import advantage, divergence
from rl_algorithms.distillation.self_distillation import demonstrations, of_rollouts
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

__all__ = ["DistillConfig", "Examples", "NoReward", "Rows", "RowsOfBoth", "advantage", "demonstrations", "divergence"]
__all__ += ["explain", "loss", "prepare", "require_same_tokenizer", "step", "train", "train_offline"]

SamplingT = TypeVar("SamplingT")


def train(
    *,
    policy: Student,
    teacher: Teacher,
    engine: Engine[SamplingT],
    weight_sync: WeightSync,
    prompts: Iterator[list[Prompt]],
    chat: Chat,
    sampling: SamplingT,
    config: DistillConfig,
    environment: Environment | None = None,
    version: int = 0,
    steps_taken: int = 0,
    seed: int = 0,
    on_rollouts: Callable[[Rollouts], object] = lambda _: None,
) -> Iterator[dict[str, float]]:
    """Distil on the student's own answers; arguments, what is yielded and resuming are those of `grpo.train`.

    An environment adds turns, failures and a reward to the log. Its rewards only say which responses succeeded, where
    `teacher_prompt_template` shows one to the teacher; a batch without any takes no step.

    Raises:
        ValueError: with `teacher_prompt_template`, an environment that begins episodes by itself; or as `collect_batch`
            and `step`.
        DataError: a row lacks a column that the template names.
    """
    template = config.teacher_prompt_template
    if template is not None and matches(environment, ResettingEnvironment):
        raise ValueError(
            f"teacher_prompt_template={template!r} is put in place of the row's prompt, and this environment begins "
            f"episodes with another; take one without a reset, or set the template to null"
        )
    timer = PhaseTimer()
    ask: dict[str, Any] = {"engine": engine, "sampling": sampling, "chat": chat, "timer": timer}
    ask |= {"environment": NoReward() if environment is None else environment}
    left = batches_left(config, steps_taken=steps_taken)
    given = checked_batches(prompts, name="prompts", wanted=len(left), size=config.num_prompts)
    for number, taken in left:
        batch = next(given)
        rollouts = collect_batch(iter([batch]), config, number=number, version=version, seed=seed, **ask)
        on_rollouts(rollouts)
        metrics = describe(rollouts, version=version)
        if environment is None:
            metrics = {name: value for name, value in metrics.items() if not name.startswith(("reward", "groups"))}
        kept = rollouts.take(~rollouts.failed)
        rows: TokenBatch = Rows(tokens=kept.tokens, lengths=kept.lengths, trainable=kept.response)
        if template is not None:
            rows = of_rollouts(kept, batch, chat, template=template, success_reward=config.success_reward)
            metrics["rows_without_tokens"] = float((~rows.trainable.any(dim=1)).sum())
        if template is None or rows.trainable.any():  # else no step, and nothing new to transfer
            places, numbered = (~rollouts.failed).nonzero()[:, 0], episode_seed(seed, number)
            steps = _take_steps(policy, rows, teacher, config=config, timer=timer, seed=numbered, places=places)
            version += len(steps)
            bring_weights(weight_sync, version=version, timer=timer)
            metrics |= mean_of_steps(steps)
        yield {**metrics, "version": version, "steps_taken": taken, **timer.lap()}


def train_offline(
    *,
    policy: Student,
    teacher: Teacher,
    batches: Iterator[TokenBatch],
    config: DistillConfig,
    version: int = 0,
    steps_taken: int = 0,
    seed: int = 0,
) -> Iterator[dict[str, float]]:
    """Distil on given conversations: `steps_per_generation` a batch.

    `sft.prepare` makes batches of demonstrations; `demonstrations` makes those whose teacher reads another prompt.
    """
    timer = PhaseTimer()
    left = batches_left(config, steps_taken=steps_taken)
    given = checked_batches(batches, name="batches", wanted=len(left))
    for number, taken in left:
        numbered = episode_seed(seed, number)
        steps = _take_steps(policy, next(given), teacher, config=config, timer=timer, seed=numbered)
        version += len(steps)
        yield {**mean_of_steps(steps), "version": version, "steps_taken": taken, **timer.lap()}


def step(policy: Student, examples: Examples, config: DistillConfig) -> dict[str, float]:
    """Take one optimizer step on `examples`, those of every rank; return what to log.

    Raises:
        ValueError: no token is trainable, or the loss is not finite.
    """
    num_tokens = int(examples.trainable.sum())
    if not num_tokens:
        raise ValueError(f"none of the {examples.tokens.numel()} tokens of this step is trainable")
    bound = functools.partial(loss, config=config, num_tokens=num_tokens)
    sums = policy.forward_backward(examples, bound, output="logp_of_token_ids")
    norm = finite_step(policy, sums)
    return {"grad_norm": norm, **figures(sums, num_tokens=num_tokens), "trained_tokens": num_tokens}


def loss(
    logp: Float[Tensor, "B T K"], examples: Examples, *, config: DistillConfig, num_tokens: int
) -> tuple[Float[Tensor, ""], Sums]:
    """The part of the step's loss that these rows contribute, and sums of their metrics over tokens.

    `logp` is the student's, of `examples.token_ids`; `num_tokens` counts the trainable tokens of the whole step.
    """
    columns, sums = token_losses(logp, examples, config=config, num_tokens=num_tokens)
    return columns["loss"].sum(), sums


def token_losses(
    logp: Float[Tensor, "B T K"], examples: Examples, *, config: DistillConfig, num_tokens: int
) -> tuple[dict[str, Tensor], Sums]:
    """`loss` before it is added up.

    Returns:
        Columns [B, T], `loss`, and `logp` of the tokens themselves, NaN where the teacher did not name them; and the
        same sums.
    """
    mask = examples.trainable
    student, teacher = (torch.where(mask[..., None], each, 0.0) for each in (logp, examples.logp_teacher))
    per_token = divergence(student, teacher, beta=config.beta, interpolation=config.interpolation, tail=config.tail)
    columns = {"loss": torch.where(mask, per_token, 0.0) / num_tokens}
    total = columns["loss"].sum()
    named = (examples.token_ids == examples.tokens[..., None]) & mask[..., None]
    own = torch.where(named, logp.detach(), 0.0).sum(-1)
    columns["logp"] = torch.where(named.any(-1), own, float("nan"))
    masses = (torch.where(mask, each.detach().exp().sum(-1), 0.0).sum() for each in (student, teacher))
    return columns, {"loss": total.detach(), **dict(zip(("student_mass", "teacher_mass"), masses, strict=True))}


observation.TOKEN_LOSSES[loss] = token_losses


def _take_steps(
    policy: Student,
    rows: TokenBatch,
    teacher: Teacher,
    *,
    config: DistillConfig,
    timer: PhaseTimer,
    seed: int,
    places: Tensor | None = None,
) -> list[dict[str, float]]:
    """Ask the teacher, and deal the rows over `steps_per_generation` optimizer steps in a random order.

    `places` [B] says which rollout of its batch each row is, where the rows are rollouts.
    """
    shuffle = torch.Generator().manual_seed(seed)  # the same when a run is resumed here
    kept = rows.trainable.any(dim=1).nonzero()[:, 0]
    if not len(kept):
        raise ValueError(f"none of the {rows.tokens.numel()} tokens of this batch is trainable")
    with timer.phase("teacher"):
        examples = prepare(rows, teacher, k=config.k)
        if places is not None:
            examples = observation.numbered(examples, places)
    order = kept[torch.randperm(len(kept), generator=shuffle)].tensor_split(config.steps_per_generation)
    with timer.phase("train"):
        return [step(policy, take_rows(examples, part), config) for part in order if len(part)]
