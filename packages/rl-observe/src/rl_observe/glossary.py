"""What each metric means and in which unit it is shown, and the phases that a step's time is divided into.

The live view and the report take labels, units and explanations from here. Metrics that are not listed are shown as
plain numbers under their own names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rl_observe.json_lines import finite_number

PHASE_PREFIX = "phase_s/"
"""A metric with this prefix holds the seconds that one logged step spent in a phase."""


@dataclass(frozen=True, slots=True)
class Metric:
    """How one metric is shown."""

    label: str
    """The name shown to people."""

    unit: str
    """A unit of `number_format.format_value`."""

    meaning: str
    """One sentence for somebody who does not know the metric."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One kind of work in a step."""

    name: str
    """The part of the metric's name after `phase_s/`."""

    colour: str
    """Its colour in a terminal, legible on light and dark; the report has colours of its own."""

    meaning: str
    """What is done in it."""


PHASES = (
    Phase("generate", "#4c8dff", "the engine samples responses"),
    Phase("reward", "#b07cff", "the environment scores the responses"),
    Phase("reference", "#c9a227", "log-probabilities under the frozen model"),
    Phase("teacher", "#d08a5a", "the teacher's top-k tokens, which the policy learns from"),
    Phase("train", "#f0883e", "forward, backward and optimizer step"),
    Phase("refit", "#2bb3a3", "new weights into the engine, verified"),
    Phase("evaluate", "#e667a5", "held-out problems"),
    Phase("wait", "#7f8c5a", "nothing to train on yet: waiting for rollouts"),
    Phase("drain", "#5aa0c8", "unfinished responses complete before the weights change"),
    Phase("checkpoint", "#a5814f", "weights, optimizer and progress are saved"),
    Phase("other", "#8b93a1", "everything else, including the driver"),
)
"""In the order in which a step goes through them."""

_SHOWN = (  # name, label, unit, meaning
    ("reward", "reward", "score", "Mean reward of the step's rollouts, sampled as in training."),
    ("reward_std", "spread of rewards", "number", "Standard deviation of the rewards over the step's rollouts."),
    ("held_out_sampled", "held-out, sampled", "score", "Mean reward on problems never trained on, sampled."),
    ("held_out_greedy", "held-out, greedy", "score", "The same, with greedy decoding."),
    ("held_out_loss", "held-out loss", "number", "Mean −logp per trained token of held-out demonstrations, in nats."),
    ("groups_with_signal", "groups with signal", "share", "Groups whose rewards differ; others have no gradient."),
    ("response_tokens", "response length", "count", "Mean number of tokens in a response, stop token included."),
    ("response_tokens_max", "longest response", "count", "Tokens of the step's longest response."),
    ("turns", "turns", "number", "Mean number of responses in a conversation."),
    ("failed", "failed", "share", "Rollouts that could not be scored: not trained on, and in no baseline."),
    ("staleness", "staleness", "number", "Mean age of the sampling weights over tokens, in optimizer steps."),
    ("staleness_max", "oldest token", "count", "Age of the oldest weights that sampled a token, in steps."),
    ("tokens_per_s", "tokens per second", "count", "Tokens sampled and trained on in the step, over its seconds."),
    ("clip_fraction", "clipped tokens", "share", "Tokens whose ratio left the trust region."),
    ("ratio", "ratio", "ratio", "Mean of exp(logp − logp_proximal) over tokens: 1 until the policy moves."),
    ("importance_weight", "importance weight", "ratio", "Mean off-policy weight over tokens: 1 if both sides agree."),
    ("effective_sample_size", "effective sample size", "share", "The equally weighted tokens these are worth."),
    ("rejected_fraction", "rejected tokens", "share", "Tokens to which the off-policy correction gave weight 0."),
    ("kl_reference", "KL to the reference", "scientific", "Estimate of KL(policy || reference) per token, in nats."),
    ("truncated", "truncated", "share", "Responses that ended at the token limit."),
    ("sampled_tokens", "sampled tokens", "count", "Response tokens that the engine generated in the step."),
    ("trained_tokens", "trained tokens", "count", "Tokens that the step's loss was computed over."),
    ("kl_engine", "KL, engine to trainer", "scientific", "Mean of logp_old − logp over tokens, in nats."),
    ("token_mult_prob_error", "trainer / engine agreement", "ratio", "Mean of exp |logp − logp_old|: 1 is perfect."),
    ("entropy", "entropy", "number", "Mean −logp of the sampled tokens, or the policy's entropy, in nats."),
    ("loss", "loss", "number", "The quantity that the optimizer minimizes."),
    ("grad_norm", "gradient norm", "number", "Norm of the whole gradient before clipping."),
    ("rows_without_tokens", "rows without tokens", "count", "Rows of the step that have no token to train on."),
    ("learning_rate", "learning rate", "scientific", "The optimizer's learning rate."),
    ("steps_taken", "steps", "count", "Steps of the stage, including batches without a signal."),
    ("version", "version", "count", "Optimizer steps that the engine's weights have seen."),
    ("refit_bytes", "refit size", "bytes", "Bytes moved into the engine."),
    ("refit_verified", "refit verified", "share", "1 if the digests of both sides were compared and equal, else 0."),
    ("refits_repeated", "refits repeated", "count", "Refits so far that were repeated because an engine died."),
    ("engine_restarts", "engine restarts", "count", "Engines that died so far."),
    ("retried_prompts", "prompts retried", "count", "Prompts sent again so far because an engine died."),
    (
        "engine_tokens_per_s",
        "engines' tokens per second",
        "count",
        "Tokens of the latest call of all engines, over its seconds.",
    ),
    ("memory_rss_bytes", "memory", "bytes", "Main memory of the process that drives the run."),
    ("memory_gpu_bytes", "GPU memory", "bytes", "GPU memory that torch reserves in the driving process."),
    ("memory_gpu_peak_bytes", "peak GPU memory", "bytes", "The most GPU memory that torch has reserved so far."),
    ("dropped_groups", "dropped groups", "count", "Groups that became too old before they were trained on."),
    ("buffer_groups", "groups in the buffer", "count", "Groups that were ready when a batch was taken."),
    ("refit_s", "refit time", "seconds", "Seconds that the refit took, verification included."),
    ("nll", "likelihood loss", "number", "Negative log-likelihood of the chosen responses, per token."),
    ("margin", "margin", "number", "Gain of the chosen response over the rejected one, times beta."),
    ("pair_accuracy", "pair accuracy", "share", "Pairs in which the chosen response gained more."),
    ("chosen_logratio", "chosen", "number", "log p(chosen) − log p_ref(chosen)."),
    ("rejected_logratio", "rejected", "number", "log p(rejected) − log p_ref(rejected)."),
    ("held_out_margin", "held-out margin", "number", "The margin on pairs never trained on."),
    ("held_out_pair_accuracy", "held-out pair accuracy", "share", "The accuracy on pairs never trained on."),
    (
        "student_mass",
        "student's mass",
        "share",
        "Mean probability that the policy gives to the teacher's top-k tokens.",
    ),
    ("teacher_mass", "teacher's mass", "share", "Mean probability that the teacher gives to its top-k tokens."),
    ("value", "value", "score", "Mean of the critic's values over tokens, before the update."),
    ("return", "return", "score", "Mean of the returns over tokens, which the critic learns to predict."),
    ("explained_variance", "explained variance", "number", "1 − var(return − value) / var(return): 1 is perfect."),
    ("value_loss", "value loss", "number", "The quantity that the critic's optimizer minimizes."),
    ("value_clip_fraction", "clipped values", "share", "Tokens whose value moved beyond its clip."),
    ("value_grad_norm", "critic's gradient norm", "number", "Norm of the critic's gradient before clipping."),
    (
        "environment/generation_batches",
        "batches sampled",
        "count",
        "Batches sampled to find enough groups with signal.",
    ),
    ("environment/groups_too_many", "groups left out", "count", "Groups with a signal that the batch had no room for."),
)
METRICS: Mapping[str, Metric] = {name: Metric(label, unit, meaning) for name, label, unit, meaning in _SHOWN}
"""By the name under which the trainer logs it."""

FAMILIES: Mapping[str, Metric] = {
    "reward/": Metric("reward", "number", "Mean of this component of the reward, weighted as it counts."),
    "environment/": Metric("environment", "number", "What the environment logs under this name, as a mean."),
    PHASE_PREFIX: Metric("phase", "seconds", "Seconds that the step spent in this phase."),
    "collector_s/": Metric(
        "collectors", "seconds", "Seconds of all collecting threads in this phase, beside the step."
    ),
    "held_out_sampled/": Metric("held-out, sampled", "score", "An end of the 95 % interval of that mean."),
    "held_out_greedy/": Metric("held-out, greedy", "score", "An end of the 95 % interval of that mean."),
    "held_out_pass@": Metric("held-out pass at", "share", "Chance that one of k responses is right, or its interval."),
}
"""By the prefix of names that a run chooses, such as those of its reward components."""


def metric_of(name: str) -> Metric | None:
    """Look up a metric by its name, or else by its family; None if it is unknown."""
    family = next((prefix for prefix in FAMILIES if name.startswith(prefix)), None)
    if name in METRICS or family is None:
        return METRICS.get(name)
    of_family = FAMILIES[family]
    return Metric(f"{of_family.label}, {name.removeprefix(family)}", of_family.unit, of_family.meaning)


def phase_seconds(values: Mapping[str, object]) -> dict[str, float]:
    """Extract the seconds of each phase from a step's values: known phases in their order, then any others."""
    found = {
        name.removeprefix(PHASE_PREFIX): seconds
        for name, value in values.items()
        if name.startswith(PHASE_PREFIX) and (seconds := finite_number(value)) is not None
    }
    known = [phase.name for phase in PHASES if phase.name in found]
    return {name: found[name] for name in (*known, *(name for name in found if name not in known))}
