"""The KTO stage: single responses, each good or bad; the loop is `rl_algorithms.kto`."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from torch import Tensor

from rl_algorithms import kto
from rl_algorithms.preferences.answers import answer_logp
from rl_algorithms.preferences.labelled import mismatched
from rl_backends.backend import TrainingBackend
from rl_launcher.build.parts import Parts
from rl_launcher.errors import Refusal
from rl_launcher.run.evaluate import Evaluator
from rl_launcher.run.record import Recorder
from rl_launcher.run.stages.start_stage import start_stage
from rl_launcher.run.step_recording import StepRecording, timings_of
from rl_launcher.schema import KTOStage, Recipe

ROWS_AT_ONCE = 4096
"""Rows that the reference reads between two looks at whether the run is to end."""


def run(stage: KTOStage, *, recipe: Recipe, parts: Parts, evaluator: Evaluator, recorder: Recorder) -> None:
    """Compare with the policy as it is, train for the stage's steps, refit; held-out responses measure the outcome.

    Raises:
        Refusal: the parts were built without labelled responses.
    """
    policy, labelled, progress = parts.policy, parts.data.labelled, recorder.progress
    if labelled is None:
        raise Refusal("the kto stage has no responses: data.source names a data set of prompt, completion and label")
    started = start_stage("kto", stage.optimizer, num_steps=stage.max_num_steps, parts=parts, recorder=recorder)
    taken = started.taken
    held_out = labelled.held_out[: recipe.evaluation.max_prompts_while_training]
    examples = {
        "train": kto.prepare(labelled.train),
        "mismatched": kto.prepare(mismatched(labelled.train)),
        "held_out": kto.prepare(held_out),
    }
    if taken:
        examples = {name: replace(each, logp_ref=started.tensors[name]) for name, each in examples.items()}
    else:
        with recorder.phase("reference"):
            compare = partial(kto.with_reference, policy, between=recorder.check, rows_at_once=ROWS_AT_ONCE)
            examples = {name: compare(each) for name, each in examples.items()}
        progress.tensors = {name: each.logp_ref for name, each in examples.items()}  # the reference is gone by then
    recorder.message(f"kto: {len(labelled.train)} responses to train on, {len(held_out)} held out")
    measured = partial(_measured, policy, examples["held_out"], beta=stage.beta)
    if not taken:
        with recorder.phase("evaluate"):
            recorder.evaluation("kto", measured())
    recording = StepRecording(recorder.log.recorded_steps, "kto", stage, recipe=recipe, parts=parts)
    recording.draws(len(labelled.train), word="response", size=stage.batch_size, seed=recipe.seed, taken=taken)
    learning_rate = policy.learning_rate
    steps = kto.train(
        policy=recording.observed(policy),
        examples=examples["train"],
        mismatched=examples["mismatched"],
        config=stage,
        version=policy.version,
        steps_taken=taken,
        seed=recipe.seed,
    )
    for index, metrics in recording.numbered(steps, start=taken + 1):
        extra = {"learning_rate": learning_rate}
        is_last = index == stage.max_num_steps
        if is_last or recipe.evaluation.due(index - 1, index):
            # Log-probabilities are the policy's own, and need no engine.
            if recipe.env is not None or (is_last and recipe.generates):
                with recorder.phase("refit"):
                    parts.weight_sync(version=policy.version)
            with recorder.phase("evaluate"):
                extra |= {**evaluator.quick(), **measured()}
        recording.record(index, timings=timings_of(metrics))
        recorder.step("kto", index, {**metrics, **extra})
        learning_rate = policy.learning_rate


def _measured(policy: TrainingBackend, examples: kto.Examples, *, beta: float) -> Mapping[str, float]:
    """How much likelier good and bad responses became than under the reference; the margin is between the two.

    A mean over no responses, where all that is held out is of one kind, is left out.
    """
    logratio: Tensor = answer_logp(policy.logp(examples), examples.trainable) - examples.logp_ref
    kinds = {"desirable": logratio[examples.desirable], "undesirable": logratio[~examples.desirable]}
    means = {name: each.mean().item() for name, each in kinds.items() if len(each)}
    figures = {f"held_out_{name}_logratio": value for name, value in means.items()}
    if len(means) == len(kinds):
        figures["held_out_margin"] = beta * (means["desirable"] - means["undesirable"])
    return figures
