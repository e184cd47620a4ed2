"""How stale rollouts may be, and what must make up for it. Knows no thread and no engine.

    staleness = version of the policy - version of the oldest weights that sampled a token of the group

S steps on each batch move the policy S versions on; the last of them is S - 1 after the first. A bound on the staleness
at every step therefore lets a group wait for k = (bound - (S - 1)) // S batches. k = 0 is synchronous.
"""

from rl_algorithms.objective import Objective

__all__ = ["batches_ahead", "refuse_uncorrected"]


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


def refuse_uncorrected(objective: Objective, *, max_staleness: int) -> None:
    """Refuse an objective that takes what older weights sampled for the policy's own.

    A ratio to the sampler is right for every token, whatever sampled it, and so is one to the policy as the batch is
    begun, with importance weights from the sampler to that. Without either, 8 steps of staleness undo what was learnt.

    Raises:
        ValueError: neither is there.
    """
    ratio, weight = objective.ratio, objective.correction.weight
    to_the_sampler = ratio.proximal == "sampler" and ratio.surrogate != "reinforce"
    if not to_the_sampler and weight == "none":
        raise ValueError(
            f"max_staleness={max_staleness} trains on what older weights sampled, and nothing in "
            f"ratio.proximal={ratio.proximal!r}, ratio.surrogate={ratio.surrogate!r}, correction.weight='none' makes "
            f"up for it; take ratio.proximal='sampler' with a ratio, or 'recomputed' with correction.weight='token'"
        )
