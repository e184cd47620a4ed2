"""What each metric of a run means, and the phases that a step's time is divided into.

The live view and the report take their words from here. Neither refuses a metric that is not listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rl_observe.json_lines import finite_number

__all__ = ["FAMILIES", "METRICS", "PHASES", "PHASE_PREFIX", "Metric", "Phase", "metric_of", "phase_seconds"]

PHASE_PREFIX = "phase_s/"
"""A metric named so holds the seconds that one logged step spent in a phase."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One name in a run's log, for people."""

    label: str
    """What it is called on a page."""

    unit: str
    """How its number is written: a key of `figures.format_value`."""

    meaning: str
    """One sentence for somebody who does not know it."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One kind of work that a step's time goes into."""

    name: str
    """The part of the metric's name after `phase_s/`."""

    colour: str
    """For a terminal, legible on light and on dark; the report has its own, in `report.css`."""

    meaning: str
    """What is done in it."""


PHASES = (
    Phase("generate", "#4c8dff", "the engine answers the prompts"),
    Phase("reward", "#b07cff", "the environment judges the answers"),
    Phase("reference", "#c9a227", "log-probabilities of the frozen model"),
    Phase("teacher", "#d08a5a", "the teacher's likeliest words, which are learnt from"),
    Phase("train", "#f0883e", "forward, backward and optimizer step"),
    Phase("refit", "#2bb3a3", "new weights into the engine, verified"),
    Phase("evaluate", "#e667a5", "held-out problems"),
    Phase("wait", "#7f8c5a", "nothing to train on yet: rollouts are awaited"),
    Phase("drain", "#5aa0c8", "answers under way end before the weights change"),
    Phase("checkpoint", "#a5814f", "weights, optimizer and progress are saved"),
    Phase("other", "#8b93a1", "everything else, the driver included"),
)
"""In the order in which a step goes through them."""

METRICS: Mapping[str, Metric] = {
    "reward": Metric("reward", "score", "Mean reward of the step's rollouts, sampled as in training."),
    "reward_std": Metric("spread of rewards", "number", "Standard deviation of the rewards over the step's rollouts."),
    "held_out_sampled": Metric("held-out, sampled", "score", "Mean reward on problems never trained on, sampled."),
    "held_out_greedy": Metric("held-out, greedy", "score", "The same with the likeliest token taken each time."),
    "held_out_loss": Metric(
        "held-out loss", "number", "Mean of −logp over the learnt tokens of demonstrations never trained on, in nats."
    ),
    "groups_with_signal": Metric(
        "groups with signal", "share", "Share of groups whose rewards differ; the others have no gradient."
    ),
    "response_tokens": Metric("response length", "count", "Mean number of tokens in a response, stop token included."),
    "response_tokens_max": Metric("longest response", "count", "Tokens of the step's longest response."),
    "turns": Metric("turns", "number", "Mean number of answers in a conversation."),
    "failed": Metric("failed", "share", "Share of rollouts that could not be judged: not trained on, in no baseline."),
    "staleness": Metric("staleness", "number", "Mean age of the sampling weights, in optimizer steps, over tokens."),
    "staleness_max": Metric("oldest token", "count", "Age of the oldest weights that sampled a token, in steps."),
    "tokens_per_s": Metric("tokens per second", "count", "Tokens that went through the step, over its seconds."),
    "clip_fraction": Metric("clipped tokens", "share", "Share of tokens whose ratio left the trust region."),
    "ratio": Metric("ratio", "ratio", "Mean of exp(logp − logp_proximal) over tokens: 1 until the policy moves."),
    "importance_weight": Metric(
        "importance weight", "ratio", "Mean weight that makes up for the sampler, over tokens: 1 where both agree."
    ),
    "effective_sample_size": Metric(
        "effective sample size", "share", "Share of the tokens that as many equally weighted ones would be worth."
    ),
    "rejected_fraction": Metric("rejected tokens", "share", "Share of tokens that the correction gave weight 0."),
    "kl_reference": Metric(
        "KL to the reference", "scientific", "Estimate of KL(policy || reference) a token, in nats."
    ),
    "truncated": Metric("truncated", "share", "Share of responses that ended at the token limit."),
    "sampled_tokens": Metric("sampled tokens", "count", "Response tokens that the engine made in the step."),
    "trained_tokens": Metric("trained tokens", "count", "Tokens that the step's loss was taken over."),
    "kl_engine": Metric("KL, engine to trainer", "scientific", "Mean of logp_old − logp over tokens, in nats."),
    "token_mult_prob_error": Metric(
        "trainer / engine agreement",
        "ratio",
        "Mean of exp |logp − logp_old| over tokens: 1 is perfect, above 1.05 is a fault.",
    ),
    "entropy": Metric(
        "entropy", "number", "Mean of −logp over the sampled tokens, or of the policy's entropy, in nats."
    ),
    "loss": Metric("loss", "number", "What the optimizer lowers."),
    "grad_norm": Metric("gradient norm", "number", "Norm of the whole gradient before clipping."),
    "rows_without_tokens": Metric("rows without tokens", "count", "Rows of the step that nothing is learnt from."),
    "learning_rate": Metric("learning rate", "scientific", "The optimizer's step size."),
    "steps_taken": Metric("steps", "count", "Optimizer steps of the stage, those without a signal included."),
    "version": Metric("version", "count", "Optimizer steps that the engine's weights have seen."),
    "refit_bytes": Metric("refit size", "bytes", "Bytes moved into the engine."),
    "refit_verified": Metric(
        "refit verified",
        "share",
        "1 where both sides' digests were compared, and equal; 0 where none were.",
    ),
    "refits_repeated": Metric(
        "refits repeated", "count", "Refits of the run that were given up and done again, since an engine had died."
    ),
    "engine_restarts": Metric("engine restarts", "count", "Engines of the run that died so far."),
    "retried_prompts": Metric("prompts asked again", "count", "Prompts that an engine owed when it died, so far."),
    "engine_tokens_per_s": Metric(
        "engines' tokens per second", "count", "Tokens that all engines made in their latest call, over its seconds."
    ),
    "memory_rss_bytes": Metric("memory", "bytes", "Main memory of the process that drives the run."),
    "memory_gpu_bytes": Metric("GPU memory", "bytes", "What torch holds of the GPU of the driving process."),
    "memory_gpu_peak_bytes": Metric("GPU memory, most", "bytes", "The most that torch has held of that GPU so far."),
    "dropped_groups": Metric("dropped groups", "count", "Groups that became too old while they were sampled."),
    "buffer_groups": Metric("groups in the buffer", "count", "Groups that were ready when a batch was taken."),
    "refit_s": Metric("refit time", "seconds", "Seconds that the refit took, verification included."),
    "nll": Metric("likelihood loss", "number", "Negative log-likelihood of the chosen answers, a token."),
    "margin": Metric("margin", "number", "How much more the chosen answer gained over the rejected one, times beta."),
    "pair_accuracy": Metric("pair accuracy", "share", "Share of pairs in which the chosen answer gained more."),
    "chosen_logratio": Metric("chosen", "number", "log p(chosen) − log p_ref(chosen)."),
    "rejected_logratio": Metric("rejected", "number", "log p(rejected) − log p_ref(rejected)."),
    "held_out_margin": Metric("held-out margin", "number", "The margin on pairs never trained on."),
    "held_out_pair_accuracy": Metric("held-out pair accuracy", "share", "The accuracy on pairs never trained on."),
    "student_mass": Metric(
        "student's mass", "share", "Mean probability that the policy gives to the words that its teacher named."
    ),
    "teacher_mass": Metric(
        "teacher's mass", "share", "Mean probability that the teacher gives to the words that it named."
    ),
    "value": Metric("value", "score", "Mean of the critic's values over tokens, when the batch was begun."),
    "return": Metric("return", "score", "Mean of the returns over tokens, which the critic learns to foresee."),
    "explained_variance": Metric(
        "explained variance", "number", "1 − var(return − value) / var(return): 1 is perfect, below 0 harmful."
    ),
    "value_loss": Metric("value loss", "number", "What the critic's optimizer lowers."),
    "value_clip_fraction": Metric("clipped values", "share", "Share of tokens whose value moved beyond its clip."),
    "value_grad_norm": Metric("critic's gradient norm", "number", "Norm of the critic's gradient before clipping."),
    "environment/generation_batches": Metric(
        "batches asked", "count", "Batches of prompts asked until enough groups had a signal."
    ),
    "environment/groups_too_many": Metric(
        "groups left out", "count", "Groups with a signal beyond what a batch holds, which were not trained on."
    ),
}
"""By the name that the trainer logs it under."""

FAMILIES: Mapping[str, Metric] = {
    "reward/": Metric("reward", "number", "Mean of this part of the reward, weighted as it counts."),
    "environment/": Metric("environment", "number", "What the environment logs under this name, a mean."),
    PHASE_PREFIX: Metric("phase", "seconds", "Seconds that the step spent in this phase."),
    "collector_s/": Metric(
        "collectors", "seconds", "Seconds of all collecting threads in this phase, beside the step: `wait` for a place."
    ),
    "held_out_sampled/": Metric("held-out, sampled", "score", "An end of the 95 % interval of that mean."),
    "held_out_greedy/": Metric("held-out, greedy", "score", "An end of the 95 % interval of that mean."),
    "held_out_pass@": Metric(
        "held-out pass at", "share", "Chance that one of so many answers to a problem is right; or its interval's end."
    ),
}
"""By the beginning of names that a run gives itself, as those of its rewards."""


def metric_of(name: str) -> Metric | None:
    """What is known of a metric, by its name or by its family; None for a stranger."""
    family = next((prefix for prefix in FAMILIES if name.startswith(prefix)), None)
    if name in METRICS or family is None:
        return METRICS.get(name)
    of_family = FAMILIES[family]
    return Metric(f"{of_family.label}, {name.removeprefix(family)}", of_family.unit, of_family.meaning)


def phase_seconds(values: Mapping[str, object]) -> dict[str, float]:
    """Take the seconds of each phase out of a step's values: known phases in their order, then any other."""
    found = {
        name.removeprefix(PHASE_PREFIX): seconds
        for name, value in values.items()
        if name.startswith(PHASE_PREFIX) and (seconds := finite_number(value)) is not None
    }
    known = [phase.name for phase in PHASES if phase.name in found]
    return {name: found[name] for name in (*known, *(name for name in found if name not in known))}
