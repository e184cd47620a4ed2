"""Look at each optimizer step from outside: an observer sees it, and changes nothing.

    policy = ObservedPolicy(policy, on_step=lambda step: print(step.rows, step.columns["logp"]))
    for metrics in grpo.train(policy=policy, ...):
        ...

The log-probabilities and losses are those that the step itself computed: they are caught where the loss is called, and
cost no further forward. Where the loss is called in other processes (ranks on Ray), each has a copy of it; whoever
called it there extends the `kept` of the caller's loss by those of the copies. If nobody does, `columns` is empty.

Axes: b rows of the step, t tokens of the longest of them.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, make_dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from rl_algorithms import policy_gradient
from rl_algorithms.contracts import Policy, ScoreModel, Sums, TokenBatch
from rl_algorithms.objective import Objective
from rl_algorithms.policy_gradient import Examples, SelectedExamples, kept_rows
from rl_algorithms.rollouts import Rollouts
from rl_algorithms.stepping import figures

__all__ = ["TOKEN_LOSSES", "NumberedExamples", "ObservedPolicy", "ObservedStep", "number_rows", "numbered"]

TOKEN_LOSSES: dict[Callable[..., Any], Callable[..., tuple[dict[str, Tensor], Sums]]] = {
    policy_gradient.loss: policy_gradient.token_losses
}
"""For a loss the function that gives it token by token: columns [b, t], whose "loss" adds up to it, and its sums. The
modules of other losses add theirs."""


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


def numbered(examples: TokenBatch, rows: Int[Tensor, " B"]) -> Any:
    """Examples of any kind with the field `rows`: of a subclass of theirs, which every loss takes as it takes them."""
    given = {each.name: getattr(examples, each.name) for each in fields(examples)}  # type: ignore[arg-type]  # it is one
    return _numbered_kind(type(examples))(**given, rows=rows)


@functools.cache
def _numbered_kind(kind: type[Any]) -> type[Any]:
    made = make_dataclass(
        f"{kind.__name__}WithRows", [("rows", Tensor)], bases=(kind,), frozen=True, slots=True, kw_only=True
    )
    made.__module__ = __name__
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedStep:
    """One optimizer step, after it was taken or refused."""

    rows: Int[Tensor, " b"]
    """The rows of the batch's rollouts that were trained on; all others of the batch were not, in this step."""

    examples: Any
    """These rows as the loss saw them: `policy_gradient.Examples`, or those of another algorithm."""

    columns: Mapping[str, Tensor]
    """[b, t] by name: `logp`, `loss`, `clipped`, and `weight` or `entropy` where there are any; NaN or False where
    nothing was trained on. Only `logp` for a loss that is not in `TOKEN_LOSSES`, and `score` [b] of a reward model."""

    metrics: Mapping[str, float]
    """`loss`, `grad_norm`, and for a policy gradient what is logged of it; empty for a step that was refused."""

    error: str | None = None
    """Why it was not taken."""


class ObservedPolicy:
    """A policy, or a reward model, that tells of every optimizer step that a loop takes on it.

    Everything but `forward_backward` and `optim_step` is the policy's own.

    Args:
        policy: what trains.
        on_step: called after each step, also after one whose loss was not finite or raised.
        every: whether steps on examples without numbers are observed too, as those of `sft` or `dpo`: their rows are
            numbered from 0. By default only those on rollouts are.
    """

    def __init__(
        self, policy: Policy | ScoreModel, on_step: Callable[[ObservedStep], object], *, every: bool = False
    ) -> None:
        self._policy: Any = policy
        self._on_step, self._every = on_step, every
        self._finish: Callable[..., ObservedStep] | None = None

    def __getattr__(self, name: str) -> Any:
        """A method or figure of the policy itself."""
        return getattr(self._policy, name)

    def logp(self, examples: TokenBatch) -> Tensor:
        """The policy's own."""
        logp: Tensor = self._policy.logp(examples)
        return logp

    def forward_backward(self, examples: TokenBatch, loss: Callable[..., Any], **options: Any) -> Sums:
        """The policy's own, with a loss that also keeps what it computes of each token."""
        if not hasattr(examples, "rows"):
            if not self._every:
                unobserved: Sums = self._policy.forward_backward(examples, loss, **options)
                return unobserved
            examples = numbered(examples, torch.arange(len(examples.tokens)))
        keeping = _KeepingLoss(loss)
        finish = functools.partial(_observed, examples, keeping)
        try:
            sums: Sums = self._policy.forward_backward(examples, keeping, **options)
        except Exception as error:
            self._on_step(finish(error=str(error)))
            raise
        if not math.isfinite(total := float(sums["loss"])):  # such a step is refused, and `optim_step` never called
            self._on_step(finish(error=f"the loss of this step is {total}"))
        self._finish = functools.partial(finish, sums=sums)
        return sums

    def optim_step(self) -> float:
        """The policy's own; then the observer is told."""
        norm: float = self._policy.optim_step()
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._on_step(finish(grad_norm=norm))
        return norm


class _KeepingLoss:
    """Called as the loss is, with microbatches of the step's examples, in any order."""

    def __init__(self, loss: Callable[..., Any]) -> None:
        self._loss = loss
        self.kept: list[tuple[Tensor, dict[str, Tensor]]] = []
        """Rows of a microbatch and columns of them. A copy in another process has those of its own."""

    def __call__(self, output: Tensor, examples: Any) -> tuple[Tensor, Sums]:
        bound = self._loss
        if isinstance(bound, functools.partial) and bound.func in TOKEN_LOSSES:
            columns, sums = TOKEN_LOSSES[bound.func](output, examples, **bound.keywords)
            total = columns["loss"].sum()
        else:
            total, sums = bound(output, examples)
            if output.ndim == 1:
                columns = {"score": output}
            else:
                columns = {"logp": output if output.ndim == 2 else output[..., 0]}
        self.kept.append((examples.rows, {name: column.detach() for name, column in columns.items()}))
        return total, sums


def _observed(
    examples: Any,
    keeping: _KeepingLoss,
    *,
    sums: Sums | None = None,
    grad_norm: float = math.nan,
    error: str | None = None,
) -> ObservedStep:
    """What was kept, laid out like `examples`, all rows of the step."""
    columns: dict[str, Tensor] = {}
    shape = examples.tokens.shape
    rows, parts = keeping.kept[0] if len(keeping.kept) == 1 else (examples.rows[:0], {})
    if rows.equal(examples.rows) and all(part.shape == shape[: part.ndim] for part in parts.values()):
        columns = {name: part.cpu() for name, part in parts.items()}  # one microbatch was all
    else:
        place = {row: index for index, row in enumerate(examples.rows.tolist())}
        for rows, parts in keeping.kept:
            places = torch.tensor([place[row] for row in rows.tolist()], dtype=torch.int64)
            for name, part in parts.items():
                if name not in columns:
                    unknown = False if part.dtype == torch.bool else float("nan")
                    columns[name] = torch.full(shape[: part.ndim], unknown, dtype=part.dtype)
                if part.ndim == 1:
                    columns[name][places] = part.cpu()
                else:
                    columns[name][places, : part.shape[1]] = part.cpu()  # a microbatch is as wide as its own rows
    metrics: dict[str, float] = {}
    if sums is not None and isinstance(examples, Examples):
        metrics = {"grad_norm": grad_norm, **figures(sums, num_tokens=int(examples.trainable.sum()))}
    elif sums is not None:  # what other sums are divided by, their own module knows
        metrics = {"grad_norm": grad_norm, "loss": float(sums["loss"])}
    return ObservedStep(rows=examples.rows, examples=examples, columns=columns, metrics=metrics, error=error)
