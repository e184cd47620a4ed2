"""What is logged: rollouts described, sums made into figures, several optimizer steps as one line. Knows no algorithm.

Sums are what a loss returns: numerators added up over rows, microbatches and ranks. Only once they are whole are they
divided, so no figure depends on the cut; a mean of means would.
"""

from collections.abc import Sequence

from rl_algorithms.contracts import Sums

__all__ = ["effective_sample_size", "figures", "mean_of_steps"]

OF_THE_FIRST = ("kl_engine", "token_mult_prob_error")
"""Taken from the first step on a batch of rollouts: there trainer and engine still hold the same weights, so these
measure how well the two agree, not how far the policy has moved."""


def mean_of_steps(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each metric over `steps`; those that measure agreement, from the first. Empty for no steps.

    A metric that only some steps have is averaged over those.

    >>> mean_of_steps([{"loss": 1.0, "kl_engine": 0.0}, {"loss": 3.0, "kl_engine": 0.5}])
    {'loss': 2.0, 'kl_engine': 0.0}
    """
    values: dict[str, list[float]] = {}
    for step in steps:
        for name, value in step.items():
            values.setdefault(name, []).append(value)
    return {name: found[0] if name in OF_THE_FIRST else sum(found) / len(found) for name, found in values.items()}


def figures(sums: Sums, *, num_tokens: int) -> dict[str, float]:
    """What the sums of a whole step come to: `loss` is one already, the others are means over its tokens.

    `importance_weight_squared`, where there is one, becomes `effective_sample_size`.

    >>> import torch
    >>> figures({"loss": torch.tensor(0.5), "clip_fraction": torch.tensor(3)}, num_tokens=12)
    {'loss': 0.5, 'clip_fraction': 0.25}
    """
    sums = dict(sums)
    squares = sums.pop("importance_weight_squared", None)
    means = {name: float(total if name == "loss" else total / num_tokens) for name, total in sums.items()}
    if squares is not None:
        total = float(sums["importance_weight"])
        means["effective_sample_size"] = effective_sample_size(total, float(squares), number=num_tokens)
    return means


def effective_sample_size(sum_of_weights: float, sum_of_squares: float, *, number: int) -> float:
    """How many equally weighted samples are worth `number` weighted ones, as a share: (sum w)^2 / sum w^2 / n (Kish).

    1 where all weights are equal, 1 / n where one of them is everything, 0 where there are none.

    >>> effective_sample_size(2.0, 2.0, number=4)
    0.5
    """
    return sum_of_weights**2 / sum_of_squares / number if sum_of_squares else 0.0
