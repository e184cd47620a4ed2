"""How stale rollouts may be, and what must make up for it.

    staleness = version of the policy - version of the oldest weights that sampled a token of the group

S steps on each batch move the policy S versions on; the last of them is S - 1 after the first. A bound on the staleness
at every step therefore lets a group wait for k = (bound - (S - 1)) // S batches. k = 0 is synchronous: `explain_bound`
says so, for a run that was meant to be asynchronous and is not.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from rl_algorithms.choices import check_fields
from rl_algorithms.objective import Objective

__all__ = ["AsyncConfig", "batches_ahead", "explain_bound", "refuse_uncorrected"]

COUNTS_AND_SECONDS = ("num_collectors", "groups_per_call", "timeout_s", "stop_timeout_s")


@dataclass(frozen=True, kw_only=True)  # no slots: a class has but one base with them
class AsyncConfig:
    """How sampling goes on while the policy trains."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid"}

    max_staleness: int
    """Optimizer steps by which the policy may be ahead of the weights that sampled a token it trains on.
    `steps_per_generation - 1` is synchronous; each further `steps_per_generation` lets sampling run one batch ahead."""

    weights: Literal["between_calls", "in_flight"] = "between_calls"
    """When engines take new weights. `between_calls` waits for calls to end. `in_flight` takes them at once, in the
    middle of responses whose tokens record their version; it needs `policy.generation.vllm_cfg.async_engine`."""

    num_collectors: int = 1
    """Threads that request rollouts. As many as there are engines keep all of them busy."""

    groups_per_call: int = 8
    """Prompts in each call, at most. More fill an engine's batch; fewer shorten the wait of a refit `between_calls`."""

    ask_again: bool = True
    """Sample a group that became too old again. False moves on, so that slow prompts are trained on less."""

    timeout_s: float = 1800.0
    """Deadline in seconds for rollouts, and for calls to end before a refit."""

    stop_timeout_s: float = 60.0
    """Seconds that the end of the stage, also by an error, waits for running calls."""

    def __post_init__(self) -> None:
        check_fields(self, at_least={"max_staleness": 0}, above=dict.fromkeys(COUNTS_AND_SECONDS, 0))


def batches_ahead(*, max_staleness: int, steps_per_generation: int) -> int:
    """For how many batches a group may wait: k above.

    Raises:
        ValueError: the bound is so low that a synchronous run breaks it.

    >>> batches_ahead(max_staleness=11, steps_per_generation=4)
    2
    """
    if max_staleness < steps_per_generation - 1:
        raise ValueError(
            f"max_staleness={max_staleness} must be >= {steps_per_generation - 1}: the last of "
            f"steps_per_generation={steps_per_generation} steps is that far from the first, even synchronously"
        )
    return (max_staleness - (steps_per_generation - 1)) // steps_per_generation


def explain_bound(*, max_staleness: int, steps_per_generation: int) -> str:
    """What the bound lets sampling do while the policy trains, as a sentence.

    >>> explain_bound(max_staleness=1, steps_per_generation=1)
    'sampling runs up to 1 batch of rollouts ahead of training'
    """
    ahead = batches_ahead(max_staleness=max_staleness, steps_per_generation=steps_per_generation)
    if ahead:
        return f"sampling runs up to {ahead} {'batch' if ahead == 1 else 'batches'} of rollouts ahead of training"
    return (
        f"max_staleness={max_staleness} allows no asynchrony: the {steps_per_generation} steps on a batch use up "
        f"{steps_per_generation - 1} of it, and one batch ahead needs {2 * steps_per_generation - 1}; nothing is "
        f"sampled while the policy trains, so set max_staleness={2 * steps_per_generation - 1} or more, or train "
        f"synchronously"
    )


def refuse_uncorrected(objective: Objective, *, max_staleness: int) -> None:
    """Refuse an objective that takes what older weights sampled for the policy's own.

    A ratio to the sampler is right for every token, whatever sampled it, and so is one to the policy as the batch is
    begun, with importance weights from the sampler to that. Without either, 8 steps of staleness undo what was learnt.

    Raises:
        ValueError: neither is there.
    """
    ratio, weight = objective.ratio, objective.correction.weight
    to_the_sampler = ratio.proximal == "sampler" and ratio.looks_at_ratio
    if not to_the_sampler and weight == "none":
        raise ValueError(
            f"max_staleness={max_staleness} trains on what older weights sampled, and nothing in "
            f"ratio.proximal={ratio.proximal!r}, ratio.surrogate={ratio.surrogate!r}, correction.weight='none' makes "
            f"up for it; take ratio.proximal='sampler' with a ratio, or 'recomputed' with correction.weight='token'"
        )
