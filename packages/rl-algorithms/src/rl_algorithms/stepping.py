"""What the loops of all algorithms share: phases and their seconds, the batches that are left, a step and its figures.

steps_taken     optimizer steps of the run; a batch without a signal counts as its steps
version         optimizer steps that the weights have seen

A loss returns sums: numerators added up over rows, microbatches and ranks. They are divided only when they are whole,
so no figure depends on how a step was cut; a mean of means would.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

from torch import Tensor

from rl_algorithms.contracts import Policy, ScoreModel, Sums, TokenBatch, ValueModel, WeightSync

__all__ = [
    "PhaseTimer",
    "batches_left",
    "bring_weights",
    "checked_batches",
    "effective_sample_size",
    "figures",
    "finite_step",
    "mean_of_steps",
    "take_rows",
]


class PhaseTimer:
    """Adds up seconds by phase from one `lap()` to the next.

    >>> timer = PhaseTimer()
    >>> with timer.phase("train"):
    ...     pass
    >>> list(timer.lap())
    ['phase_s/train']
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the block towards `name`. Phases do not nest."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def lap(self) -> dict[str, float]:
        """Seconds of each phase since the last lap, as `phase_s/<name>`; start the next lap."""
        seconds, self._seconds = self._seconds, {}
        return {f"phase_s/{name}": value for name, value in seconds.items()}


BatchT = TypeVar("BatchT")
ExamplesT = TypeVar("ExamplesT", bound=TokenBatch)


@runtime_checkable
class StepConfig(Protocol):
    """What the configurations of all loops have."""

    @property
    def max_num_steps(self) -> int:
        """Of the whole run."""


def batches_left(config: StepConfig, *, steps_taken: int) -> list[tuple[int, int]]:
    """The batches that a run has still to take steps on: the number of each, from 0, and the steps taken after it.

    One step is taken on each, or `config.steps_per_generation` where there is such a field.

    Raises:
        ValueError: no run of this configuration can have taken so many steps.

    >>> from types import SimpleNamespace
    >>> batches_left(SimpleNamespace(max_num_steps=6, steps_per_generation=2), steps_taken=2)
    [(1, 4), (2, 6)]
    """
    max_num_steps, each = config.max_num_steps, int(getattr(config, "steps_per_generation", 1))
    if not 0 <= steps_taken <= max_num_steps:
        raise ValueError(f"steps_taken={steps_taken} must be from 0 to max_num_steps={max_num_steps}")
    if steps_taken % each:
        raise ValueError(
            f"steps_taken={steps_taken} must be a multiple of steps_per_generation={each}: a run goes on between two "
            f"batches; give the steps_taken that the loop yielded last"
        )
    return [(number, (number + 1) * each) for number in range(steps_taken // each, max_num_steps // each)]


def checked_batches(given: Iterator[BatchT], *, name: str, wanted: int, size: int | None = None) -> Iterator[BatchT]:
    """The batches, one by one as they are asked for.

    Args:
        given: by the caller.
        name: what the caller knows them as.
        wanted: how many the run needs at least.
        size: what each must have; None for any.

    Raises:
        ValueError: one has another size, or they ended.
    """
    number = 0
    for batch in given:
        if size is not None and isinstance(batch, Sized) and len(batch) != size:
            raise ValueError(
                f"{name} gave a batch of {len(batch)}, its number {number} from 0, and the configuration says {size}; "
                f"make batches of that size, as rl_algorithms.data.batches does, or say theirs"
            )
        number += 1
        yield batch
    raise ValueError(
        f"{name} ended after {number} batches, and the steps that are left want {wanted} or more; give batches that do "
        f"not end, as rl_algorithms.data.batches does, or take fewer steps"
    )


def take_rows(examples: ExamplesT, rows: Tensor) -> ExamplesT:
    """The same dataclass with only `rows` (indices or a mask along B) of every tensor, as wide as the longest of them.

    The columns that are padding in all of these rows go: a batch costs what its own rows are long.
    """
    instance = cast("Any", examples)  # the protocol cannot say that it is a dataclass
    lengths = examples.lengths[rows]
    width = int(lengths.max()) if len(lengths) else 0
    tensors = {field.name: getattr(instance, field.name)[rows] for field in fields(instance)}
    # The first axis is B, and a second one is T.
    taken: ExamplesT = replace(
        instance, **{name: tensor[:, :width] if tensor.ndim > 1 else tensor for name, tensor in tensors.items()}
    )
    return taken


def finite_step(model: Policy | ValueModel | ScoreModel, sums: Sums, *, where: Callable[[], str] = lambda: "") -> float:
    """Apply the gradient that is accumulated, and return its norm; never the gradient of a loss that is no number.

    Args:
        model: with the gradient.
        sums: of the step.
        where: is asked for a sentence about the token that the loss comes from, if the loss is not finite.

    Raises:
        ValueError: the loss is not finite. The gradient is still there: end the run, or clear it.
    """
    loss = float(sums["loss"])
    if not math.isfinite(loss):
        rest = ", ".join(f"{name}={float(total):.6g}" for name, total in sums.items() if name != "loss")
        raise ValueError(
            f"the loss of this step is {loss}, and its gradient was not applied; sums over the step: {rest or 'none'}. "
            f"{where()}Look at the log-probabilities and rewards of its rows, and at the learning rate of the steps "
            f"before"
        )
    return model.optim_step()


def bring_weights(weight_sync: WeightSync, *, version: int, timer: PhaseTimer) -> None:
    """Bring the policy's weights into the engine; the time it takes is `refit`.

    Raises:
        ValueError: the engine committed another version than it was asked for.
    """
    with timer.phase("refit"):
        committed = weight_sync(version=version).version
    if committed != version:
        raise ValueError(
            f"weight_sync was asked for version {version} and committed version {committed}: the rollouts to come "
            f"would not be what they are taken for; let it report the version that it is given"
        )


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
