"""What a loop tells of each optimizer step to an observer, which looks at it and changes nothing.

    for metrics in grpo.train(..., on_rollouts=print, on_step=lambda step: print(step.rows, step.columns["logp"])):
        ...

The log-probabilities and losses are those that the step itself computed: they are caught where the loss is called, and
cost no further forward. Where the loss is called in other processes (ranks on Ray) they do not come back, and
`columns` is empty.

Axes: b rows of the step, t tokens of the longest of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias, cast

import torch
from jaxtyping import Int
from torch import Tensor

from rl_algorithms import policy_gradient
from rl_algorithms.contracts import Sums
from rl_algorithms.losses import Counts
from rl_algorithms.objective import Objective
from rl_algorithms.policy_gradient import Examples, LossFunction, SelectedExamples, kept_rows
from rl_algorithms.rollouts import Rollouts

__all__ = ["NumberedExamples", "ObservedStep", "ObservingLoss", "OnStep", "number_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberedExamples(SelectedExamples):
    """Examples that know their rollouts. Where the objective selects no tokens, `selected` is not looked at."""

    rows: Int[Tensor, " B"]
    """The row of the batch's rollouts that each example is."""


def number_rows(examples: Examples, rollouts: Rollouts, objective: Objective) -> NumberedExamples:
    """The examples that `prepare` made of `rollouts`, with the row of each."""
    given = {each.name: getattr(examples, each.name) for each in fields(Examples)}
    rows = kept_rows(rollouts, objective).nonzero()[:, 0]
    return NumberedExamples(**given, selected=examples.trainable, rows=rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedStep:
    """One optimizer step, after it was taken or refused."""

    rows: Int[Tensor, " b"]
    """The rows of the batch's rollouts that were trained on; all others of the batch were not, in this step."""

    examples: Examples
    """These rows as the loss saw them."""

    columns: Mapping[str, Tensor]
    """[b, t] by name: `logp`, `loss`, `clipped`, and `weight` or `entropy` where there are any; NaN or False where
    nothing was trained on. Empty where the loss was called in other processes; only `logp` for a loss of one's own."""

    metrics: Mapping[str, float]
    """What is logged of it; empty for a step that was refused."""

    error: str | None = None
    """Why it was not taken."""


OnStep: TypeAlias = Callable[[ObservedStep], object]


class ObservingLoss:
    """A loss that also keeps what it computes of each token. Called as `LossFn`, with microbatches of `examples`."""

    def __init__(self, loss: LossFunction, *, objective: Objective, counts: Counts) -> None:
        self._loss, self._objective, self._counts = loss, objective, counts
        self._seen: list[tuple[Tensor, dict[str, Tensor]]] = []

    def __call__(self, output: Tensor, examples: NumberedExamples) -> tuple[Tensor, Sums]:
        """The loss and its sums, as without an observer."""
        bound: dict[str, Any] = {"objective": self._objective, "counts": self._counts}
        if self._loss is policy_gradient.loss:
            columns, sums = policy_gradient.token_losses(output, examples, **bound)
            total = columns["loss"].sum()
        else:
            total, sums = self._loss(output, examples, **bound)
            columns = {"logp": output if output.ndim == 2 else output[..., 0]}
        self._seen.append((examples.rows, {name: column.detach() for name, column in columns.items()}))
        return total, sums

    def observed(
        self, examples: Examples, *, metrics: Mapping[str, float] | None = None, error: str | None = None
    ) -> ObservedStep:
        """What was kept, laid out like `examples`, all rows of the step."""
        rows = cast("NumberedExamples", examples).rows
        place = {row: index for index, row in enumerate(rows.tolist())}
        columns: dict[str, Tensor] = {}
        for seen, parts in self._seen:
            places = torch.tensor([place[row] for row in seen.tolist()], dtype=torch.int64)
            for name, part in parts.items():
                if name not in columns:
                    unknown = False if part.dtype == torch.bool else float("nan")
                    columns[name] = torch.full(examples.tokens.shape, unknown, dtype=part.dtype)
                columns[name][places, : part.shape[1]] = part.cpu()  # a microbatch is as wide as its own rows
        return ObservedStep(rows=rows, examples=examples, columns=columns, metrics=metrics or {}, error=error)
