"""Several optimizer steps as one line of the log. Knows no algorithm."""

from collections.abc import Sequence

__all__ = ["mean_of_steps"]

OF_THE_FIRST = ("kl_engine", "token_mult_prob_error")
"""Taken from the first step on a batch of rollouts: there trainer and engine still hold the same weights, so these
measure how well the two agree, not how far the policy has moved."""


def mean_of_steps(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each metric over `steps`; those that measure agreement, from the first. Empty for no steps.

    >>> mean_of_steps([{"loss": 1.0, "kl_engine": 0.0}, {"loss": 3.0, "kl_engine": 0.5}])
    {'loss': 2.0, 'kl_engine': 0.0}
    """
    if not steps:
        return {}
    return {
        name: steps[0][name] if name in OF_THE_FIRST else sum(step[name] for step in steps) / len(steps)
        for name in steps[0]
    }
