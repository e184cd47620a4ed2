"""The DPO stage, with sampled or given preference pairs.

Checkpoints hold all of sampled pairs, but only the reference's log-probabilities of given ones: the rest is data.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from rl_algorithms import dpo
from rl_algorithms.chat import Prompt
from rl_algorithms.contracts import Reference
from rl_algorithms.data import DataError, batches
from rl_algorithms.preferences.pairs import Pair, pairs_from_rollouts, rows_of_pairs
from rl_algorithms.rollouts import collect
from rl_algorithms.stepping import PhaseTimer, take_rows
from rl_launcher.build import sampling
from rl_launcher.run.evaluate import Evaluator
from rl_launcher.run.record import Recorder
from rl_launcher.run.stages.start_stage import StageStart, start_stage
from rl_launcher.run_parts import Parts
from rl_launcher.schema import DPOStage, Recipe

TRAIN, HELD_OUT = "train/", "held_out/"
PAIRS_AT_ONCE = 2048
"""Pairs in one call of the reference: more take several calls, between which a signal takes effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePairs:
    """The pairs to train on and those to measure by."""

    train: dpo.Examples
    held_out: dpo.Examples | None
    """None if all responses to each held-out prompt got the same reward."""

    def describe(self) -> str:
        """How many there are."""
        num_held_out = 0 if self.held_out is None else len(self.held_out.tokens) // 2
        return f"{len(self.train.tokens) // 2} pairs to train on, {num_held_out} held out"


def find_pairs(tensors: dict[str, Tensor], *, recipe: Recipe, parts: Parts) -> StagePairs:
    """The pairs of a checkpoint's `tensors`, made by `kept`; if empty, given pairs without a reference so far."""
    if parts.pairs is None:
        held_out = _found(HELD_OUT, tensors) if any(name.startswith(HELD_OUT) for name in tensors) else None
        return StagePairs(train=_found(TRAIN, tensors), held_out=held_out)
    given = parts.pairs.held_out
    measured = min(len(given.tokens) // 2, recipe.evaluation.max_prompts_while_training)
    held_out = take_rows(given, rows_of_pairs(range(measured)))
    return StagePairs(
        train=replace(parts.pairs.train, **_logp_ref(TRAIN, tensors)),
        held_out=replace(held_out, **_logp_ref(HELD_OUT, tensors)),
    )


def kept(pairs: StagePairs, *, given: bool) -> dict[str, Tensor]:
    """What `find_pairs` needs to find them again."""
    names = ["logp_ref"] if given else [field.name for field in fields(dpo.Examples)]
    parts = {TRAIN: pairs.train} | ({} if pairs.held_out is None else {HELD_OUT: pairs.held_out})
    return {part + name: getattr(examples, name) for part, examples in parts.items() for name in names}


def compare(pairs: StagePairs, reference: Reference, *, heard: Callable[[], None]) -> StagePairs:
    """The same pairs with the log-probabilities of `reference`; `heard` is called after each of its batches."""
    held_out = None if pairs.held_out is None else _compared(pairs.held_out, reference, heard=heard)
    return StagePairs(train=_compared(pairs.train, reference, heard=heard), held_out=held_out)


def sample_pairs(stage: DPOStage, *, recipe: Recipe, parts: Parts) -> StagePairs:
    """Sample and pair responses to training prompts and to held-out ones.

    Raises:
        DataError: all responses to each training prompt got the same reward, so there is nothing to prefer.
    """

    def sample(prompts: list[Prompt]) -> list[Pair]:
        rollouts = collect(
            prompts,
            group_size=stage.num_generations_per_prompt,
            engine=parts.engine,
            sampling=sampling(recipe.policy.generation),
            environment=parts.environment,
            chat=parts.chat,
            timer=PhaseTimer(),
        )
        return pairs_from_rollouts(rollouts, pairs_per_prompt=stage.pairs_per_prompt)

    drawn = next(batches(parts.prompts, size=min(stage.num_prompts, len(parts.prompts)), seed=recipe.seed))
    pairs = sample(drawn)
    if not pairs:
        raise DataError(
            f"none of {len(drawn)} prompts has responses of different reward among its "
            f"{stage.num_generations_per_prompt}, so there are no preference pairs; give the policy an sft stage "
            f"first, raise dpo.num_prompts or dpo.num_generations_per_prompt, or correct the reward"
        )
    held_out = sample(parts.held_out[: recipe.evaluation.max_prompts_while_training])
    return StagePairs(train=dpo.prepare(pairs), held_out=dpo.prepare(held_out) if held_out else None)


def _found(part: str, tensors: dict[str, Tensor]) -> dpo.Examples:
    return dpo.Examples(**{field.name: tensors[part + field.name] for field in fields(dpo.Examples)})


def _logp_ref(part: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"logp_ref": tensors[f"{part}logp_ref"]} if tensors else {}


def _compared(examples: dpo.Examples, reference: Reference, *, heard: Callable[[], None]) -> dpo.Examples:
    answers, num_rows = [], len(examples.tokens)
    for start in range(0, num_rows, 2 * PAIRS_AT_ONCE):
        rows = torch.arange(start, min(start + 2 * PAIRS_AT_ONCE, num_rows))
        answers.append(dpo.with_reference(reference, take_rows(examples, rows)).logp_ref)
        heard()
    return replace(examples, logp_ref=torch.cat(answers))


def run(stage: DPOStage, *, recipe: Recipe, parts: Parts, evaluator: Evaluator, recorder: Recorder) -> None:
    """Find the pairs, train for the stage's steps, refit; held-out pairs measure what was not trained on."""
    policy = parts.policy
    started = start_stage(
        "dpo",
        stage.optimizer,
        num_steps=stage.max_num_steps,
        parts=parts,
        recorder=recorder,
        temperature=recipe.policy.generation.temperature if stage.pairs == "sampled" else 1.0,
    )
    taken = started.taken
    pairs = _pairs(stage, started, recipe=recipe, parts=parts, recorder=recorder)
    recorder.message(f"dpo: {pairs.describe()}")
    if not taken and pairs.held_out is not None:
        with recorder.phase("evaluate"):
            recorder.evaluation("dpo", _margins(pairs, stage, parts))
    learning_rate = policy.learning_rate
    steps = dpo.train(
        policy=policy,
        examples=pairs.train,
        config=stage,
        version=policy.version,
        steps_taken=taken,
        seed=recipe.seed,
    )
    for index, metrics in enumerate(steps, start=taken + 1):
        extra = {"learning_rate": learning_rate}
        is_last = index == stage.max_num_steps
        if is_last or evaluator.due(index - 1, index):
            if is_last or recipe.env is not None:  # margins are the policy's own, and need no engine
                with recorder.phase("refit"):
                    parts.weight_sync(version=policy.version)
            with recorder.phase("evaluate"):
                extra |= evaluator.quick() | _margins(pairs, stage, parts)
        recorder.step("dpo", index, {**metrics, **extra})
        learning_rate = policy.learning_rate


def _pairs(stage: DPOStage, started: StageStart, *, recipe: Recipe, parts: Parts, recorder: Recorder) -> StagePairs:
    """Those of an earlier process of the run, or new ones with the current policy as their reference."""
    if started.taken:
        return find_pairs(started.tensors, recipe=recipe, parts=parts)
    if stage.pairs == "data":
        pairs = find_pairs({}, recipe=recipe, parts=parts)
    else:
        with recorder.phase("generate"):
            pairs = sample_pairs(stage, recipe=recipe, parts=parts)
    if not stage.reference_free:
        with recorder.phase("reference"):
            pairs = compare(pairs, parts.policy, heard=recorder.check)
    if stage.pairs == "sampled" or not stage.reference_free:
        recorder.keep(kept(pairs, given=stage.pairs == "data"))
    recorder.check()
    return pairs


def _margins(pairs: StagePairs, stage: DPOStage, parts: Parts) -> dict[str, float]:
    if pairs.held_out is None:
        return {}
    measured = dpo.margins(parts.policy, pairs.held_out, stage)
    return {f"held_out_{name}": value for name, value in measured.items()}
