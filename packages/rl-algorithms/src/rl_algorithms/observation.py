"""Look at each optimizer step of a policy gradient from outside: an observer sees it, and changes nothing.

    policy = ObservedPolicy(policy, on_step=lambda step: print(step.rows, step.columns["logp"]))
    for metrics in grpo.train(policy=policy, ...):
        ...

The log-probabilities and losses are those that the step itself computed: they are caught where the loss is called, and
cost no further forward. Where the loss is called in other processes (ranks on Ray) they do not come back, and
`columns` is empty.

Axes: b rows of the step, t tokens of the longest of them.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from rl_algorithms import policy_gradient
from rl_algorithms.contracts import Policy, Sums, TokenBatch
from rl_algorithms.objective import Objective
from rl_algorithms.policy_gradient import Examples, SelectedExamples, kept_rows
from rl_algorithms.rollouts import Rollouts
from rl_algorithms.stepping import figures

__all__ = ["NumberedExamples", "ObservedPolicy", "ObservedStep", "number_rows"]


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


class ObservedPolicy:
    """A policy that tells of every optimizer step that the loops of `grpo` and `async_grpo` take on it.

    Everything but `forward_backward` and `optim_step` is the policy's own. What else is trained with it, such as pairs
    or demonstrations, is not observed.

    Args:
        policy: what trains.
        on_step: called after each step, also after one whose loss was not finite or raised.
    """

    def __init__(self, policy: Policy, on_step: Callable[[ObservedStep], object]) -> None:
        self._policy, self._on_step = policy, on_step
        self._finish: Callable[..., ObservedStep] | None = None

    def __getattr__(self, name: str) -> Any:
        """A method or figure of the policy itself."""
        return getattr(self._policy, name)

    def logp(self, examples: TokenBatch) -> Tensor:
        """The policy's own."""
        return self._policy.logp(examples)

    def forward_backward(self, examples: TokenBatch, loss: Callable[..., Any], **options: Any) -> Sums:
        """The policy's own, with a loss that also keeps what it computes of each token."""
        if not isinstance(examples, NumberedExamples):
            return self._policy.forward_backward(examples, loss, **options)
        keeping = _KeepingLoss(loss)
        finish = functools.partial(_observed, examples, keeping)
        try:
            sums = self._policy.forward_backward(examples, keeping, **options)
        except Exception as error:
            self._on_step(finish(error=str(error)))
            raise
        if not math.isfinite(total := float(sums["loss"])):  # such a step is refused, and `optim_step` never called
            self._on_step(finish(error=f"the loss of this step is {total}"))
        self._finish = functools.partial(finish, sums=sums)
        return sums

    def optim_step(self) -> float:
        """The policy's own; then the observer is told."""
        norm = self._policy.optim_step()
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._on_step(finish(grad_norm=norm))
        return norm


class _KeepingLoss:
    """Called as the loss is, with microbatches of the step's examples, in any order."""

    def __init__(self, loss: Callable[..., Any]) -> None:
        self._loss = loss
        self.kept: list[tuple[Tensor, dict[str, Tensor]]] = []

    def __call__(self, output: Tensor, examples: NumberedExamples) -> tuple[Tensor, Sums]:
        bound = self._loss
        if isinstance(bound, functools.partial) and bound.func is policy_gradient.loss:
            columns, sums = policy_gradient.token_losses(output, examples, **bound.keywords)
            total = columns["loss"].sum()
        else:
            total, sums = bound(output, examples)
            columns = {"logp": output if output.ndim == 2 else output[..., 0]}
        self.kept.append((examples.rows, {name: column.detach() for name, column in columns.items()}))
        return total, sums


def _observed(
    examples: NumberedExamples,
    keeping: _KeepingLoss,
    *,
    sums: Sums | None = None,
    grad_norm: float = math.nan,
    error: str | None = None,
) -> ObservedStep:
    """What was kept, laid out like `examples`, all rows of the step."""
    place = {row: index for index, row in enumerate(examples.rows.tolist())}
    columns: dict[str, Tensor] = {}
    for rows, parts in keeping.kept:
        places = torch.tensor([place[row] for row in rows.tolist()], dtype=torch.int64)
        for name, part in parts.items():
            if name not in columns:
                unknown = False if part.dtype == torch.bool else float("nan")
                columns[name] = torch.full(examples.tokens.shape, unknown, dtype=part.dtype)
            columns[name][places, : part.shape[1]] = part.cpu()  # a microbatch is as wide as its own rows
    metrics: dict[str, float] = {}
    if sums is not None:
        metrics = {"grad_norm": grad_norm, **figures(sums, num_tokens=int(examples.trainable.sum()))}
    return ObservedStep(rows=examples.rows, examples=examples, columns=columns, metrics=metrics, error=error)
