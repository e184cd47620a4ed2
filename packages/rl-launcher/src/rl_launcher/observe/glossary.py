"""What each metric of a run means, and the phases that a step's time is divided into.

The live view and the report take their words from here. Neither refuses a metric that is not listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rl_launcher.observe.json_lines import finite_number

__all__ = ["METRICS", "PHASES", "PHASE_PREFIX", "Metric", "Phase", "phase_seconds"]

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
    Phase("train", "#f0883e", "forward, backward and optimizer step"),
    Phase("refit", "#2bb3a3", "new weights into the engine, verified"),
    Phase("evaluate", "#e667a5", "held-out problems"),
    Phase("other", "#8b93a1", "everything else, the driver included"),
)
"""In the order in which a step goes through them."""

METRICS: Mapping[str, Metric] = {
    "reward": Metric("reward", "score", "Mean reward of the step's rollouts, sampled as in training."),
    "held_out_sampled": Metric("held-out, sampled", "score", "Mean reward on problems never trained on, sampled."),
    "held_out_greedy": Metric("held-out, greedy", "score", "The same with the likeliest token taken each time."),
    "groups_with_signal": Metric(
        "groups with signal", "share", "Share of groups whose rewards differ; the others have no gradient."
    ),
    "response_tokens": Metric("response length", "count", "Mean number of tokens in a response, stop token included."),
    "tokens_per_s": Metric("tokens per second", "count", "Tokens that went through the step, over its seconds."),
    "clip_fraction": Metric("clipped tokens", "share", "Share of tokens whose ratio left the trust region."),
    "truncated": Metric("truncated", "share", "Share of responses that ended at the token limit."),
    "sampled_tokens": Metric("sampled tokens", "count", "Response tokens that the engine made in the step."),
    "trained_tokens": Metric("trained tokens", "count", "Tokens that the step's loss was taken over."),
    "kl_engine": Metric("KL, engine to trainer", "scientific", "Mean of logp_old − logp over tokens, in nats."),
    "token_mult_prob_error": Metric(
        "trainer / engine agreement",
        "ratio",
        "Mean of exp |logp − logp_old| over tokens: 1 is perfect, above 1.05 is a fault.",
    ),
    "entropy": Metric("entropy", "number", "Mean of −logp over the sampled tokens, in nats."),
    "loss": Metric("loss", "number", "What the optimizer lowers."),
    "grad_norm": Metric("gradient norm", "number", "Norm of the whole gradient before clipping."),
    "learning_rate": Metric("learning rate", "scientific", "The optimizer's step size."),
    "version": Metric("version", "count", "Optimizer steps that the engine's weights have seen."),
    "refit_bytes": Metric("refit size", "bytes", "Bytes moved into the engine."),
    "refit_s": Metric("refit time", "seconds", "Seconds that the refit took, verification included."),
    "nll": Metric("likelihood loss", "number", "Negative log-likelihood of the chosen answers, a token."),
    "margin": Metric("margin", "number", "How much more the chosen answer gained over the rejected one, times beta."),
    "pair_accuracy": Metric("pair accuracy", "share", "Share of pairs in which the chosen answer gained more."),
    "chosen_logratio": Metric("chosen", "number", "log p(chosen) − log p_ref(chosen)."),
    "rejected_logratio": Metric("rejected", "number", "log p(rejected) − log p_ref(rejected)."),
    "held_out_margin": Metric("held-out margin", "number", "The margin on pairs never trained on."),
    "held_out_pair_accuracy": Metric("held-out pair accuracy", "share", "The accuracy on pairs never trained on."),
}
"""By the name that the trainer logs it under."""


def phase_seconds(values: Mapping[str, object]) -> dict[str, float]:
    """Take the seconds of each phase out of a step's values: known phases in their order, then any other."""
    found = {
        name.removeprefix(PHASE_PREFIX): seconds
        for name, value in values.items()
        if name.startswith(PHASE_PREFIX) and (seconds := finite_number(value)) is not None
    }
    known = [phase.name for phase in PHASES if phase.name in found]
    return {name: found[name] for name in (*known, *(name for name in found if name not in known))}
