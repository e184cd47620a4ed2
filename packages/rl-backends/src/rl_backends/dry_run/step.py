"""One step of a backend under a count of its storages: what it holds between steps, and at the worst of each phase.

    start, one optimizer step -> between steps | logp | reference logp | forward_backward | optim_step

Runs the backend's own methods on whatever tensors it has: fake ones for a prediction, real ones to compare it with.
The optimizer has its state from the beginning, so that the step is one of many.

Axes: B rows, T tokens.
"""

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from rl_backends.dtensor.backend import DTensorBackend
from rl_backends.optimizers import OptimizerConfig
from rl_backends.reference import ReferenceModel
from rl_parallel_plans.forecast import Ledger, MemoryTracker, gathered_labels
from rl_parallel_plans.forecast.tracker import (
    ACTIVATIONS,
    BUFFERS,
    GRADIENTS,
    OPTIMIZER_STATE,
    PARAMETERS,
    TEMPORARIES,
)

__all__ = ["BETWEEN_STEPS", "REFERENCE", "StepAsked", "rows_of", "run_step"]

DIFFERENT_TOKENS = 32
"""So many that a mixture's experts all get some; fewer where the vocabulary is smaller."""

BETWEEN_STEPS = "between steps"
REFERENCE = "reference"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAsked:
    """The step whose memory is asked for."""

    lengths: tuple[int, ...]
    """Tokens of each row of the whole batch."""

    optimizer: OptimizerConfig | None
    """None takes no step, and has no state."""

    temperature: float = 1.0
    """Of the log-probabilities."""

    reference: bool = False
    """Keep a frozen copy of the policy."""

    offload_reference: bool = False
    """Keep that copy in host memory."""

    different_tokens: int = DIFFERENT_TOKENS
    """Ids of the rows are from 0 to one less."""


@dataclass(frozen=True)
class _Rows:
    """Examples of which every token but the first is trained."""

    rows_per_unit: ClassVar[int] = 1
    tokens: Int[Tensor, "B T"]
    lengths: Int[Tensor, " B"]
    trainable: Bool[Tensor, "B T"]


def run_step(
    make_backend: Callable[[], DTensorBackend],
    asked: StepAsked,
    *,
    ledger: Ledger,
    also: Callable[[Any, Any, Any], None] | None = None,
) -> None:
    """Make a backend and let it take a step; the phases in `ledger` have the names at the head of this file.

    Args:
        make_backend: called once, under the count.
        asked: rows and optimizer.
        ledger: the account to write into.
        also: called with each operator, its arguments and its result.
    """
    rows, names = rows_of(asked.lengths, different_tokens=asked.different_tokens), dict[nn.Module, str]()
    with MemoryTracker(ledger, names, also=also) as tracker, ExitStack() as labelled:
        backend = make_backend()
        names.update((module, _place(name)) for name, module in backend.model.named_modules())
        tracker.label(backend.model.parameters(), PARAMETERS)
        tracker.label(backend.model.buffers(), BUFFERS)
        labelled.enter_context(gathered_labels(tracker, backend.model))
        reference = _prepare(backend, asked, tracker)
        ledger.moment(BETWEEN_STEPS)
        some = rows_of(_one_microbatch(backend, asked), different_tokens=asked.different_tokens)
        with ledger.phase("logp"):
            backend.logp(some)
        if reference is not None:
            with ledger.phase("reference logp"):
                reference.logp(some)
        with ledger.phase("forward_backward"):
            backend.forward_backward(rows, _loss)
        # FSDP has put other parameters in the place of those that were labelled.
        tracker.label(backend.model.parameters(), PARAMETERS)
        tracker.label((p.grad for p in backend.model.parameters() if p.grad is not None), GRADIENTS)
        gc.collect()  # as Python does now and then; what hangs in cycles would count for the step
        if asked.optimizer is not None:
            tracker.outside_backward = TEMPORARIES
            with ledger.phase("optim_step"):
                backend.optim_step()


def _prepare(backend: DTensorBackend, asked: StepAsked, tracker: MemoryTracker) -> ReferenceModel | None:
    """What lasts from step to step: the optimizer's state, and the reference, which is returned."""
    if asked.optimizer is not None:
        tracker.outside_backward = OPTIMIZER_STATE
        _give_state(backend, asked.optimizer, temperature=asked.temperature)
    reference = None
    if asked.reference:
        tracker.outside_backward = REFERENCE
        reference = backend.freeze_reference(offload=asked.offload_reference)
    tracker.outside_backward = ACTIVATIONS
    gc.collect()
    return reference


def rows_of(lengths: Sequence[int], *, different_tokens: int = DIFFERENT_TOKENS) -> _Rows:
    """Rows of these lengths, with ids below `different_tokens`."""
    width = max(lengths)
    each = torch.tensor(lengths)
    place = torch.arange(width)
    return _Rows(
        tokens=(place + each[:, None]) % different_tokens,
        lengths=each,
        trainable=(place > 0) & (place < each[:, None]),
    )


def _loss(logp: Float[Tensor, "b w"], _: _Rows) -> tuple[Tensor, dict[str, Tensor]]:
    total = -logp.sum()
    return total, {"loss": total.detach()}


def _give_state(backend: DTensorBackend, optimizer: OptimizerConfig, *, temperature: float) -> None:
    """The state that the optimizer has after its first step, of gradients of 0."""
    num_steps = optimizer.warmup_steps + (optimizer.decay_steps or 0) + 2
    backend.start_training(optimizer, num_steps=num_steps, temperature=temperature)
    for parameter in backend.model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    backend._clip_and_step()  # noqa: SLF001 - ours; optim_step() refuses a step without forward_backward()


def _one_microbatch(backend: DTensorBackend, asked: StepAsked) -> Sequence[int]:
    """Rows that show what all would: without gradients, one microbatch leaves nothing for the next."""
    lengths = asked.lengths
    if len(set(lengths)) > 1:
        return lengths
    cut = backend._distributed.cut(rows_of(lengths, different_tokens=asked.different_tokens))  # noqa: SLF001 - ours
    return lengths[: max(1, len(lengths) // len(cut[0]))]


def _place(name: str) -> str:
    """The same for the same module of every layer."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
