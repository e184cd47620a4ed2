"""What a training step did and how fast: a meter that the backend wraps around its work, and the figures that it gives.

What all ranks do follows from the cut that each of them knows, and they finish a step together, so that this rank's
seconds are everybody's: there is no collective. The steps themselves only take the time, by the wall clock on a CPU and
by events on the stream of a GPU; figures are computed, and a GPU is waited for, when `metrics()` is called.

    with meter.forward_backward(examples, cut_of_all_ranks): ...     any number of times a step
    with meter.optim_step() as outcome: outcome.grad_norm = ...
    meter.metrics()
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from rl_backends.batching.dealing import DealtRows, trainable_of
from rl_backends.batching.microbatches import Layout, Microbatch
from rl_backends.errors import NonFiniteGradientError
from rl_backends.examples import TokenBatch
from rl_backends.metrics.flops import ModelFlops
from rl_backends.metrics.memory import MemoryUse, device_used_bytes


@dataclass(slots=True)
class StepOutcome:
    """What only the backend knows of an optimizer step; filled in while it is made."""

    grad_norm: float | None = None
    """Before clipping."""
    skipped: bool = False
    """Whether the weights were left as they were. A NonFiniteGradientError says so too."""
    router: Mapping[str, float] = field(default_factory=dict)
    """Figures of a mixture's router, by name."""


@dataclass(frozen=True, slots=True)
class Pass:
    """Over all microbatches of a batch: what it did, and when."""

    cut: Sequence[Sequence[Microbatch]]
    """Microbatches of each data-parallel rank, as `RowDealing.cut` gives them."""
    lengths: Int[Tensor, " B"]
    """Tokens of each row of the batch that are not padding."""
    asked: Shaped[Tensor, "B *T"]
    """Which tokens something is wanted of, `[B, T]`, or of how many of each row, `[B]`."""
    start: Any = None
    end: Any = None


# ---- What a step has to do: arithmetic on the host, since every rank knows the lengths of the whole batch and its cut.


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Of all ranks together, unless said otherwise."""

    tokens: int
    """Of rows, without padding."""
    tokens_read: int
    """With padding, and with microbatches repeated to keep ranks in step. Rows count whole, also the tokens at their
    ends that no asked token depends on, and that the model is not given."""
    padding_share: float
    """Of the tokens that were read, those that no row has, from 0 to 1."""
    asked_tokens: int
    """Whose log-probability (or value, or score) the loss was given."""
    microbatches: int
    """Of each rank."""
    repeated_microbatches: int
    """That did not count."""
    load_balance: float
    """FLOPs of the most expensive rank over the mean of all, padding included; tokens where FLOPs are not known. 1 is
    perfect."""
    model_flops: float | None
    """That the mathematics of the step needs; see `ModelFlops`."""


def work_of(passes: Sequence[Pass], *, flops: ModelFlops | None, layout: Layout, token_multiple: int = 1) -> Work:
    """Add up what `passes`, one or more over the same ranks, make all ranks do; `flops` None where they are unknown."""
    # Every row that is read, those of repeated microbatches again: its number among the rows of all passes, its rank.
    microbatches, of_rank, numbers, num_rows = list[Microbatch](), list[int](), list[Tensor](), 0
    for each in passes:
        for rank, own in enumerate(each.cut):
            microbatches += own
            of_rank += [rank] * len(own)
            numbers += [microbatch.rows + num_rows for microbatch in own]
        num_rows += len(each.lengths)
    counts = (each.asked.sum(dim=1, dtype=torch.int64) if each.asked.ndim > 1 else each.asked for each in passes)
    lengths, asked = torch.cat([each.lengths.cpu() for each in passes]), torch.cat([count.cpu() for count in counts])
    sizes, rows = torch.tensor([len(each.rows) for each in microbatches]), torch.cat(numbers)
    counted = torch.tensor([each.counted for each in microbatches]).repeat_interleave(sizes)
    ranks = torch.tensor(of_rank).repeat_interleave(sizes)

    real, wanted = lengths[rows], asked[rows]
    read = -(-real // token_multiple) * token_multiple
    if layout == "padded":
        widths = [-(-each.width // token_multiple) * token_multiple for each in microbatches]
        read = torch.tensor(widths).repeat_interleave(sizes)
    cost = read.double() if flops is None else flops.of_rows(read, wanted)
    costs = torch.zeros(len(passes[0].cut), dtype=torch.float64).index_add_(0, ranks, cost * counted)
    tokens, tokens_read, total = int((real * counted).sum()), int(read.sum()), float(costs.sum())
    return Work(
        tokens=tokens,
        tokens_read=tokens_read,
        padding_share=1.0 - tokens / tokens_read,
        asked_tokens=int((wanted * counted).sum()),
        microbatches=sum(max(map(len, each.cut)) for each in passes),
        repeated_microbatches=sum(not each.counted for each in microbatches),
        load_balance=float(costs.max()) * len(costs) / total if total else 1.0,
        model_flops=None if flops is None else float((flops.of_rows(real, wanted) * counted).sum()),
    )


# ---- The figures of a step.


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics(Work):
    """One optimizer step and the passes before it, of all ranks together unless said otherwise."""

    forward_backward_s: float
    optim_s: float
    tokens_per_s: float
    """Real tokens over the seconds of both."""
    flops_per_s_per_rank: float | None
    mfu: float | None
    """Model FLOPs utilisation: the same over the peak of the device, from 0 to 1; None where either is not known."""
    grad_norm: float | None
    """Before clipping."""
    skipped: bool
    """Whether this step left the weights as they were."""
    skipped_steps: int
    """How many have, since the meter was made."""
    router: Mapping[str, float]
    """Figures of a mixture's router, by name."""
    peak_allocated_bytes: int | None
    """The most GPU memory that tensors of this rank had from the step's first forward to the end of its update; None on
    a CPU."""
    peak_reserved_bytes: int | None
    """The same of what torch's allocator had taken from the device."""
    device_used_bytes: int | None
    """Of this rank's GPU, what all processes held after the update, their contexts included. torch keeps what its peak
    took. None on a CPU."""
    memory: MemoryUse | None = None
    """Of this rank, when the metrics were asked for; None if they were asked for without it."""

    def as_dict(self) -> dict[str, float]:
        """The figures that are known, flat, for a logger; of memory the bytes by category and the peaks."""
        values = {name: value for name, value in asdict(self).items() if isinstance(value, int | float)}
        values |= {f"router/{name}": value for name, value in self.router.items()}
        if (memory := self.memory) is not None:
            values |= {
                f"memory/{device}/{category.replace(' ', '_')}_bytes": size
                for device, categories in memory.by_device.items()
                for category, size in categories.items()
            }
            values |= {f"memory/cuda_{name}_bytes": size for name, size in (memory.cuda or {}).items()}
            values |= {} if memory.resident is None else {"memory/resident_bytes": memory.resident}
            values |= {} if memory.peak_resident is None else {"memory/peak_resident_bytes": memory.peak_resident}
        return {name: float(value) for name, value in values.items()}


# ---- The meter.


@dataclass(slots=True)
class StepMeter:
    """Measures steps one after another."""

    flops: ModelFlops | None
    """What a token costs; None where the modules of the model do not tell."""
    _: KW_ONLY
    device: torch.device
    num_ranks: int
    """Of the run, on all axes of the mesh."""
    layout: Layout = "padded"
    token_multiple: int = 1
    """What rows are rounded up to: 2 · ranks under context parallelism."""
    peak_flops_per_s: float | None = None
    """Of one device, in the dtype of the computation; None where it is not known."""
    _passes: list[Pass] = field(default_factory=list, init=False)
    _pending: Callable[[], StepMetrics] | None = field(default=None, init=False)
    """Computes the figures of the last step, when they are asked for."""
    _metrics: StepMetrics | None = field(default=None, init=False)
    _skipped_steps: int = field(default=0, init=False)

    @contextmanager
    def forward_backward(
        self,
        examples: TokenBatch | DealtRows[Any],
        cut: Sequence[Sequence[Microbatch]],
        *,
        asked: Int[Tensor, " B"] | None = None,
    ) -> Iterator[None]:
        """Around the passes over all microbatches. What raises forgets the step so far, as its gradient is cleared."""
        if not self._passes and self.device.type == "cuda":  # a step begins, and its peak memory is its own
            torch.cuda.reset_peak_memory_stats(self.device)
        start = self._now()
        try:
            yield
        except BaseException:
            self._passes.clear()
            raise
        wanted = trainable_of(examples) if asked is None else asked
        self._passes.append(Pass(cut, examples.lengths, wanted, start, self._now()))

    @contextmanager
    def optim_step(self) -> Iterator[StepOutcome]:
        """Around clipping and the update; the backend fills in what is yielded. Ends the step."""
        outcome, start = StepOutcome(), self._now()
        failure: NonFiniteGradientError | None = None
        try:
            yield outcome
        except NonFiniteGradientError as error:
            outcome.skipped, failure = True, error
        self._skipped_steps += outcome.skipped
        if self._passes:  # otherwise there was nothing to step along
            # What the allocator has counted on the host; waits for no kernel.
            on_gpu, cuda = self.device.type == "cuda", torch.cuda
            self._pending = partial(
                self._figures,
                self._passes,
                outcome,
                optim=(start, self._now()),
                skipped_steps=self._skipped_steps,
                peak_allocated_bytes=cuda.max_memory_allocated(self.device) if on_gpu else None,
                peak_reserved_bytes=cuda.max_memory_reserved(self.device) if on_gpu else None,
                device_used_bytes=device_used_bytes(self.device),
            )
            self._passes = []
        if failure is not None:
            raise failure

    def metrics(self) -> StepMetrics | None:
        """Of the last step that ended; None before the first. Waits for a GPU to come to the end of that step."""
        if self._pending is not None:
            self._metrics, self._pending = self._pending(), None
        return self._metrics

    def _now(self) -> Any:
        """Seconds of the wall clock; on a GPU, an event that is recorded when its stream comes to it."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _figures(
        self, passes: Sequence[Pass], outcome: StepOutcome, *, optim: tuple[Any, Any], **known: Any
    ) -> StepMetrics:
        work = work_of(passes, flops=self.flops, layout=self.layout, token_multiple=self.token_multiple)
        passed, optim_s = sum(_seconds(each.start, each.end) for each in passes), _seconds(*optim)
        seconds, peak = passed + optim_s, self.peak_flops_per_s
        each_rank = None if work.model_flops is None else work.model_flops / seconds / self.num_ranks
        return StepMetrics(
            **asdict(work),
            forward_backward_s=passed,
            optim_s=optim_s,
            tokens_per_s=work.tokens / seconds,
            flops_per_s_per_rank=each_rank,
            mfu=None if each_rank is None or peak is None else each_rank / peak,
            grad_norm=outcome.grad_norm,
            skipped=outcome.skipped,
            router=dict(outcome.router),
            **known,
        )


def _seconds(start: Any, end: Any) -> float:
    """Between two moments; waits for a GPU to come to the later one."""
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000.0
