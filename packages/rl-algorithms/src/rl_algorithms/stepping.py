"""What all loops do alike: which steps are left, batches that must come, and what may not be applied. Knows no loss.

steps_taken     optimizer steps of the run, those that a batch without a signal stands for among them
version         optimizer steps that the weights have seen
"""

import itertools
import math
from collections.abc import Iterator, Sized
from typing import Protocol, TypeVar, runtime_checkable

from rl_algorithms.contracts import Policy, ScoreModel, Sums, ValueModel, WeightSync
from rl_algorithms.data import batches
from rl_algorithms.phases import PhaseTimer

__all__ = ["batches_left", "bring_weights", "checked_batches", "draws_left", "finite_step"]

BatchT = TypeVar("BatchT")


@runtime_checkable
class StepConfig(Protocol):
    """What the configurations of all loops have."""

    @property
    def max_num_steps(self) -> int:
        """Of the whole run."""


@runtime_checkable
class DrawConfig(StepConfig, Protocol):
    """What the configurations of loops over given rows or pairs have."""

    @property
    def batch_size(self) -> int:
        """Rows or pairs in each step."""


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


def draws_left(num_units: int, config: DrawConfig, *, steps_taken: int, seed: int) -> Iterator[tuple[list[int], int]]:
    """For each step that is left, which of `num_units` rows or pairs it is on, and the steps taken after it.

    Raises:
        ValueError: as `batches_left`.
    """
    left = batches_left(config, steps_taken=steps_taken)
    drawn = itertools.islice(batches(range(num_units), size=config.batch_size, seed=seed), steps_taken, None)
    for _, taken in left:
        yield next(drawn), taken


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


def finite_step(model: Policy | ValueModel | ScoreModel, sums: Sums) -> float:
    """Apply the gradient that is accumulated, and return its norm; never the gradient of a loss that is no number.

    Raises:
        ValueError: the loss is not finite. The gradient is still there: end the run, or clear it.
    """
    loss = float(sums["loss"])
    if not math.isfinite(loss):
        rest = ", ".join(f"{name}={float(total):.6g}" for name, total in sums.items() if name != "loss")
        raise ValueError(
            f"the loss of this step is {loss}, and its gradient was not applied; sums over the step: {rest or 'none'}. "
            f"Look at the log-probabilities and rewards of its rows, and at the learning rate of the steps before"
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
