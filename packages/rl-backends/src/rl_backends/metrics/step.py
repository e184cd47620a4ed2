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
from dataclasses import KW_ONLY, asdict, dataclass, field, fields, replace
from functools import partial
from operator import add
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from rl_backends.batching.dealing import DealtRows, trainable_of
from rl_backends.batching.microbatches import Layout, Microbatch
from rl_backends.choices import out_of_bounds, refuse
from rl_backends.errors import ModelError, NonFiniteGradientError
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
class _Pass:
    """Over all microbatches of a batch: what it did, and when."""

    lengths: Tensor
    asked: Tensor
    cut: Sequence[Sequence[Microbatch]]
    start: Any
    end: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One optimizer step and the passes before it, of all ranks together unless said otherwise."""

    tokens: int
    """Of rows, without padding."""
    tokens_read: int
    """That the model computed: with padding, and with microbatches repeated to keep ranks in step."""
    padding_share: float
    """Of the tokens that were read, those that no row has, from 0 to 1."""
    asked_tokens: int
    """Whose log-probability (or value, or score) the loss was given."""
    microbatches: int
    """Of each rank."""
    repeated_microbatches: int
    """That did not count."""
    load_balance: float
    """FLOPs of the most expensive rank over the mean of all: 1 is perfect."""
    forward_backward_s: float
    """Seconds in `forward_backward`."""
    optim_s: float
    """Seconds in `optim_step`."""
    tokens_per_s: float
    """Real tokens over the seconds of both."""
    tokens_per_s_per_rank: float
    """The same, divided by all ranks of the run."""
    model_flops: float | None
    """That the mathematics of the step needs; see `ModelFlops`."""
    hardware_flops: float | None
    """With padding, repetitions, and what is computed again in backward."""
    flops_per_s_per_rank: float | None
    """Model FLOPs a second, of one rank."""
    mfu: float | None
    """Model FLOPs utilisation: the same over the peak of the device, from 0 to 1."""
    hfu: float | None
    """Hardware FLOPs utilisation."""
    mfu_unknown: str | None
    """Why there is no `mfu`; None where there is."""
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
    memory: MemoryUse | None
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

    def render(self) -> str:
        """One line for people."""
        speed = "unknown" if self.flops_per_s_per_rank is None else f"{self.flops_per_s_per_rank / 1e12:.3g} TFLOP/s"
        mfu = self.mfu_unknown if self.mfu is None else f"{self.mfu:.1%}"
        return (
            f"{self.tokens:,} tokens in {self.forward_backward_s + self.optim_s:.3g} s: {self.tokens_per_s:,.0f}/s, "
            f"{speed} a rank, MFU {mfu}; padding {self.padding_share:.1%}, load balance {self.load_balance:.2f}, "
            f"{self.microbatches} microbatches a rank, {self.repeated_microbatches} repeated"
            f"{'; SKIPPED' if self.skipped else ''}"
        )


# ---- What a step has to do: arithmetic on the host, since every rank knows the lengths of the whole batch and its cut.
#
# Axes: B rows of the batch, T tokens, R rows that are read (those of repeated microbatches again).


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Of all ranks together, unless said otherwise; the names are those of `StepMetrics`."""

    tokens: int
    tokens_read: int
    asked_tokens: int
    microbatches: int
    repeated_microbatches: int
    model_flops: float | None
    hardware_flops: float | None
    rank_costs: tuple[float, ...]
    """Of each rank's own rows as they are read, padding included and repetitions not: FLOPs, or tokens where FLOPs are
    not known."""

    def __add__(self, other: "Work") -> "Work":
        def added(a: Any, b: Any) -> Any:
            if a is None or b is None:
                return None
            return tuple(map(add, a, b)) if isinstance(a, tuple) else a + b

        return Work(**{each.name: added(getattr(self, each.name), getattr(other, each.name)) for each in fields(Work)})

    @property
    def padding_share(self) -> float:
        """Of the tokens that are read, those that no row has."""
        return 1.0 - self.tokens / self.tokens_read if self.tokens_read else 0.0

    @property
    def load_balance(self) -> float:
        """The most expensive rank over the mean: 1 is perfect, 2 leaves half of the machine waiting."""
        total = sum(self.rank_costs)
        return max(self.rank_costs) * len(self.rank_costs) / total if total else 1.0


def work_of(
    cut: Sequence[Sequence[Microbatch]],
    *,
    lengths: Int[Tensor, " B"],
    asked: Int[Tensor, " B"],
    flops: ModelFlops | None,
    layout: Layout,
    token_multiple: int = 1,
    recomputed: bool = False,
) -> Work:
    """Add up what `cut` makes all ranks do.

    Args:
        cut: microbatches of each data-parallel rank, as `cut_all` gives them.
        lengths: tokens of each row of the batch that are not padding.
        asked: tokens of each row that something is wanted of.
        flops: what a token of the model costs; None where that is not known.
        layout: whether rows are padded to the longest of their microbatch.
        token_multiple: what a row is rounded up to: 2 · ranks under context parallelism.
        recomputed: whether backward computes the layers again.
    """
    microbatches = [each for rank in cut for each in rank]
    sizes = torch.tensor([len(each.rows) for each in microbatches])
    rows = torch.cat([each.rows for each in microbatches]) if microbatches else torch.zeros(0, dtype=torch.int64)
    counted = torch.tensor([each.counted for each in microbatches]).repeat_interleave(sizes)
    rank = torch.tensor([r for r, each in enumerate(cut) for _ in each]).repeat_interleave(sizes)
    real, wanted = lengths[rows], asked[rows]
    read = -(-real // token_multiple) * token_multiple
    if layout == "padded":
        widths = [-(-each.width // token_multiple) * token_multiple for each in microbatches]
        read = torch.tensor(widths).repeat_interleave(sizes)
    cost = read.double() if flops is None else flops.of_rows(read, wanted)
    costs = torch.zeros(len(cut), dtype=torch.float64).index_add_(0, rank, cost * counted)
    # The head makes its logits a second time in backward always; the layers only where they are checkpointed.
    again = 0.0 if flops is None else float(wanted.sum()) * flops.head.forward * (not recomputed)
    return Work(
        tokens=int((real * counted).sum()),
        tokens_read=int(read.sum()),
        asked_tokens=int((wanted * counted).sum()),
        microbatches=max(map(len, cut), default=0),
        repeated_microbatches=sum(not each.counted for each in microbatches),
        model_flops=None if flops is None else float((flops.of_rows(real, wanted) * counted).sum()),
        hardware_flops=None
        if flops is None
        else float((flops.of_rows(read, wanted, recomputed=True) if recomputed else cost).sum()) + again,
        rank_costs=tuple(costs.tolist()),
    )


# ---- The meter.


@dataclass(slots=True)
class StepMeter:
    """Measures steps one after another."""

    flops: ModelFlops | ModelError
    """What a token costs, or why that is not known."""
    _: KW_ONLY
    device: torch.device
    num_ranks: int
    """Of the run, on all axes of the mesh."""
    layout: Layout = "padded"
    token_multiple: int = 1
    """What rows are rounded up to: 2 · ranks under context parallelism."""
    recomputed: bool = False
    """Whether backward computes whole layers again (`activation_checkpointing="full"`)."""
    peak_flops_per_s: float | None = None
    """Of one device, in the dtype of the computation; None where it is not known."""
    memory: Callable[[], MemoryUse] | None = None
    """What takes the account of memory, when metrics are asked for."""
    _passes: list[_Pass] = field(default_factory=list, init=False)
    _pending: Callable[[], StepMetrics] | None = field(default=None, init=False)
    """Computes the figures of the last step, when they are asked for."""
    _metrics: StepMetrics | None = field(default=None, init=False)
    _skipped_steps: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        refuse(out_of_bounds(self, {"> 0": "peak_flops_per_s"}))

    @classmethod
    def of(cls, model: nn.Module, **options: Any) -> "StepMeter":
        """For a model that is not sharded yet; without FLOPs, and with the reason, where its modules do not tell."""
        try:
            return cls(ModelFlops.of(model), **options)
        except ModelError as error:
            return cls(error, **options)

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
        self._passes.append(_Pass(examples.lengths, wanted, cut, start, self._now()))

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
            peaks: tuple[int | None, int | None] = (None, None)
            if self.device.type == "cuda":  # what the allocator has counted on the host; waits for no kernel
                peaks = torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)
            self._pending = partial(
                self._figures,
                self._passes,
                outcome,
                optim=(start, self._now()),
                skipped_steps=self._skipped_steps,
                peak_allocated_bytes=peaks[0],
                peak_reserved_bytes=peaks[1],
                device_used_bytes=device_used_bytes(self.device),
            )
            self._passes = []
        if failure is not None:
            raise failure

    def metrics(self, *, memory: bool = True) -> StepMetrics | None:
        """Of the last step that ended; None before the first. Waits for a GPU to come to the end of that step.

        Args:
            memory: take the account of memory, as it is now; that looks at every parameter.
        """
        if self._pending is not None:
            self._metrics, self._pending = self._pending(), None
        if self._metrics is None or self.memory is None or not memory:
            return self._metrics
        return replace(self._metrics, memory=self.memory())

    def _now(self) -> Any:
        """Seconds of the wall clock; on a GPU, an event that is recorded when its stream comes to it."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _figures(
        self, passes: Sequence[_Pass], outcome: StepOutcome, *, optim: tuple[Any, Any], **known: Any
    ) -> StepMetrics:
        work: Work | None = None
        for each in passes:
            asked = each.asked.sum(dim=1, dtype=torch.int32) if each.asked.ndim > 1 else each.asked
            of_pass = work_of(
                each.cut,
                lengths=each.lengths.cpu(),
                asked=asked.cpu(),
                flops=self.flops if isinstance(self.flops, ModelFlops) else None,
                layout=self.layout,
                token_multiple=self.token_multiple,
                recomputed=self.recomputed,
            )
            work = of_pass if work is None else work + of_pass
        assert work is not None
        unknown = None
        if isinstance(self.flops, ModelError):
            unknown = f"unknown: {self.flops}"
        elif self.peak_flops_per_s is None:
            unknown = f"unknown: no data sheet's peak for {self.device}; pass peak_flops_per_s"
        passed, optim_s = sum(_seconds(each.start, each.end) for each in passes), _seconds(*optim)
        seconds, peak = passed + optim_s, self.peak_flops_per_s
        each_rank = None if work.model_flops is None else work.model_flops / seconds / self.num_ranks
        hardware = None if work.hardware_flops is None else work.hardware_flops / seconds / self.num_ranks
        return StepMetrics(
            **{each.name: getattr(work, each.name) for each in fields(Work) if each.name != "rank_costs"},
            padding_share=work.padding_share,
            load_balance=work.load_balance,
            forward_backward_s=passed,
            optim_s=optim_s,
            tokens_per_s=work.tokens / seconds,
            tokens_per_s_per_rank=work.tokens / seconds / self.num_ranks,
            flops_per_s_per_rank=each_rank,
            mfu=None if each_rank is None or peak is None else each_rank / peak,
            hfu=None if hardware is None or peak is None else hardware / peak,
            mfu_unknown=unknown,
            grad_norm=outcome.grad_norm,
            skipped=outcome.skipped,
            router=dict(outcome.router),
            memory=None,
            **known,
        )


def _seconds(start: Any, end: Any) -> float:
    """Between two moments; waits for a GPU to come to the later one."""
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000.0
