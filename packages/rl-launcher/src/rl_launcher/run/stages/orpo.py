"""The ORPO stage: imitation and an odds ratio on given pairs; the loop is `rl_algorithms.orpo`."""

import torch

from rl_algorithms import dpo, orpo
from rl_algorithms.preferences.answers import answer_logp
from rl_algorithms.preferences.pairs import rows_of_pairs
from rl_algorithms.stepping import take_rows
from rl_backends.backend import TrainingBackend
from rl_launcher.build.parts import Parts
from rl_launcher.errors import Refusal
from rl_launcher.run.evaluate import Evaluator
from rl_launcher.run.record import Recorder
from rl_launcher.run.stages.start_stage import start_stage
from rl_launcher.run.step_recording import StepRecording, timings_of
from rl_launcher.schema import ORPOStage, Recipe


def run(stage: ORPOStage, *, recipe: Recipe, parts: Parts, evaluator: Evaluator, recorder: Recorder) -> None:
    """Train for the stage's steps, then refit; held-out pairs measure what was not trained on.

    Raises:
        Refusal: the parts were built without pairs.
    """
    policy, pairs = parts.policy, parts.data.pairs
    if pairs is None:
        raise Refusal("the orpo stage has no pairs: data.source names a data set of prompt, chosen and rejected")
    started = start_stage("orpo", stage.optimizer, num_steps=stage.max_num_steps, parts=parts, recorder=recorder)
    taken = started.taken
    number = min(len(pairs.held_out.tokens) // 2, recipe.evaluation.max_prompts_while_training)
    held_out = take_rows(_examples(pairs.held_out), rows_of_pairs(range(number)))
    recorder.message(f"orpo: {len(pairs.train.tokens) // 2} pairs to train on, {number} held out")
    if not taken:
        with recorder.phase("evaluate"):
            recorder.evaluation("orpo", _measured(policy, held_out))
    recording = StepRecording(recorder.log.recorded_steps, "orpo", stage, recipe=recipe, parts=parts)
    recording.draws(len(pairs.train.tokens) // 2, word="pair", size=stage.batch_size, seed=recipe.seed, taken=taken)
    learning_rate = policy.learning_rate
    steps = orpo.train(
        policy=recording.observed(policy),
        examples=_examples(pairs.train),
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
                extra |= evaluator.quick() | _measured(policy, held_out)
        recording.record(index, timings=timings_of(metrics))
        recorder.step("orpo", index, {**metrics, **extra})
        learning_rate = policy.learning_rate


def _examples(pairs: dpo.Examples) -> orpo.Examples:
    """Pairs without a reference."""
    return orpo.Examples(tokens=pairs.tokens, lengths=pairs.lengths, trainable=pairs.trainable)


def _measured(policy: TrainingBackend, examples: orpo.Examples) -> dict[str, float]:
    """What the loss compares, of pairs that are not trained on."""
    logp = answer_logp(policy.logp(examples), examples.trainable)
    odds = orpo.log_odds(logp / examples.trainable.sum(dim=1))
    ratio = odds[0::2] - odds[1::2]
    nll = -logp[0::2].sum() / examples.trainable[0::2].sum()
    means = torch.stack([nll, ratio.mean(), (ratio > 0).float().mean()]).tolist()
    return dict(zip(("held_out_nll", "held_out_log_odds_ratio", "held_out_pair_accuracy"), means, strict=True))
