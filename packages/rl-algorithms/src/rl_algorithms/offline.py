"""The loop of everything that learns from given rows: SFT, DPO, KTO, ORPO, reward models, and a loss of your own.

    draw_batches    which rows each step is on: shuffled passes, which a resumed run takes up where it stopped
    train           one `step` on each batch, with its version, its seconds and what it logged
    take_step       one optimizer step: the gradient of a loss over all its rows, and the loss's sums as means

Each algorithm's page has what is its own: the configuration, the examples, and a `step` that refuses what it cannot
learn from, counts what the loss is divided by, and hands the loss to `take_step`. A loop of your own does the same:

    def step(examples):
        pairs = len(examples.tokens) // 2
        return take_step(policy, examples, functools.partial(my_loss, num_pairs=pairs), mean_over=pairs)

    for metrics in train(step, draw_batches(examples, config=config), config=config):
        print(metrics)

Axes: B rows, of which `rows_per_unit` consecutive ones belong together (2 for a pair); T tokens.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from rl_algorithms.contracts import LossFn, Policy, ScoreModel, TokenBatch
from rl_algorithms.data import batches
from rl_algorithms.stepping import PhaseTimer, StepConfig, batches_left, checked_batches, finite_step, take_rows

__all__ = ["OfflineConfig", "draw_batches", "take_step", "train"]

BatchT = TypeVar("BatchT")
ExamplesT = TypeVar("ExamplesT", bound=TokenBatch)


@runtime_checkable
class OfflineConfig(StepConfig, Protocol):
    """What the configuration of every offline algorithm has."""

    @property
    def batch_size(self) -> int:
        """Rows, or pairs, in each step."""


def draw_batches(
    examples: ExamplesT, *, config: OfflineConfig, steps_taken: int = 0, seed: int = 0
) -> Iterator[ExamplesT]:
    """Yield `config.batch_size` rows or pairs of `examples` for each step, without end.

    Every pass over them is a new shuffle. The same seed and `steps_taken` always give the same batches.

    Raises:
        DataError: there are no examples.
    """
    size = type(examples).rows_per_unit
    units = batches(range(len(examples.tokens) // size), size=config.batch_size, seed=seed)
    for drawn in itertools.islice(units, steps_taken, None):
        rows = torch.tensor([size * unit + place for unit in drawn for place in range(size)], dtype=torch.int64)
        yield take_rows(examples, rows)


def train(
    step: Callable[[BatchT], dict[str, float]],
    given: Iterator[BatchT],
    *,
    config: OfflineConfig,
    version: int = 0,
    steps_taken: int = 0,
    name: str = "batches",
    size: int | None = None,
) -> Iterator[dict[str, float]]:
    """Take the steps that are left of `config.max_num_steps`; after each, yield what to log.

    Args:
        step: takes one optimizer step on a batch and returns its metrics.
        given: batches, from the first step that is left on; at least as many as there are such steps.
        config: how many steps.
        version: of the policy's weights.
        steps_taken: of this run so far.
        name: what error messages call `given`.
        size: what `len` of each batch must be; None for any.

    Yields:
        The step's metrics, the new `version`, `steps_taken`, and the seconds of the phase `train`.

    Raises:
        ValueError: the batches ended, one has another size, or no such run can have taken so many steps.
    """
    timer = PhaseTimer()
    left = batches_left(config, steps_taken=steps_taken)
    checked = checked_batches(given, name=name, wanted=len(left), size=size)
    for _, taken in left:
        with timer.phase("train"):
            metrics = step(next(checked))
        version += 1
        yield {**metrics, "version": version, "steps_taken": taken, **timer.lap()}


def take_step(
    model: Policy | ScoreModel,
    examples: ExamplesT,
    loss: LossFn[ExamplesT],
    *,
    mean_over: int,
    divisors: Mapping[str, int] | None = None,
    **output: Any,
) -> dict[str, float]:
    """Take one optimizer step on `examples`, those of every rank.

    Args:
        model: what is trained.
        examples: of the whole step.
        loss: `(output, rows) -> (loss, sums)`, whose losses of parts of the step add up to the step's loss.
        mean_over: rows, or pairs, of the step: what the sums are divided by. Not `loss`, which is a mean already.
        divisors: other divisors by the name of the sum; one of 0 leaves the sum out.
        **output: `output=` for the model's `forward_backward`, where the loss looks at something else than logp.

    Returns:
        `loss`, `grad_norm`, and the sums as means.

    Raises:
        ValueError: the loss is not finite; no step is taken.
    """
    sums = model.forward_backward(examples, loss, **output)
    grad_norm = finite_step(model, sums)
    by = {"loss": 1, **(divisors or {})}
    means = {name: (total / by.get(name, mean_over)).item() for name, total in sums.items() if by.get(name, mean_over)}
    return {**means, "grad_norm": grad_norm}
