"""Whether a step fits a GPU, and if not, the smallest change of its options that makes it fit.

    fits            peak + reserve <= the memory of the GPU
    reserve         what a prediction does not count: 2 GiB for the CUDA context, NCCL and kernels' workspaces, and a
                    twentieth of the peak for what the allocator rounds up and fragments

One option alone is the smallest change, then several of which none can be left out. What costs less comes first:
another way to read the lm_head and a fused optimizer cost nothing, sequence parallelism sends the same bytes,
recomputation takes time, a smaller batch more microbatches. More ranks, which are more GPUs, are tried last of all.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.forecast.options import MemoryOptions

GIB = 2**30
# GiB as the driver reports them (`torch.cuda.get_device_properties(0).total_memory`), rounded down: a little less than
# the gigabytes that name the card.
GPUS = {
    "a10-24gb": 21.9,
    "a100-40gb": 39.3,
    "a100-80gb": 79.1,
    "a6000-48gb": 47.3,
    "b200-180gb": 178.3,
    "h100-80gb": 79.1,
    "h200-141gb": 139.7,
    "l4-24gb": 21.9,
    "l40s-48gb": 44.3,
    "mi300x-192gb": 191.9,
    "rtx3090-24gb": 23.6,
    "rtx4090-24gb": 23.5,
    "rtx5090-32gb": 31.3,
    "t4-16gb": 14.5,
    "v100-16gb": 15.7,
    "v100-32gb": 31.7,
}
UNITS = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12} | {"kib": 2**10, "mib": 2**20, "gib": GIB}
RESERVE_BYTES, RESERVE_SHARE = 2 * GIB, 1 / 20
# More ranks are tried up to this many times those that were asked for.
MOST_RANKS = 8

Change = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """Whether the predicted step fits one GPU a rank."""

    gpu: str
    """The GPU as it was asked for."""
    capacity: int
    """Its bytes."""
    reserve: int
    """Bytes kept free for what a prediction does not count."""
    fits: bool
    """Whether peak and reserve are no more than the capacity."""
    change: Mapping[str, Any] | None = None
    """Options to change so that it fits; None where it fits as it is, and where nothing that was tried does."""
    peak: int = 0
    """Bytes of the peak with that change, or as it is; where nothing fits, the least that was found."""
    tried: int = 0
    """Predictions that were made in search of it."""

    def text(self) -> str:
        """The answer in a sentence or two."""
        kept, peak = f"{self.reserve / GIB:.1f} of them kept for what is not counted", f"{self.peak / GIB:.2f} GiB"
        room = f"{self.gpu} ({self.capacity / GIB:.1f} GiB, {kept})"
        if self.fits:
            return f"fits {room}: the peak is {peak}"
        if self.change is not None:
            changed = ", ".join(f"{name}={value!r}" for name, value in self.change.items())
            return f"does not fit {room}; the smallest change that does: {changed}, peak {peak}"
        if self.tried:
            return f"does not fit {room}, and no change that was tried does ({self.tried}): the least is {peak}"
        return f"does not fit {room}: the peak is {peak}"


def gpu_bytes(gpu: str | int) -> int:
    """Bytes of a GPU: of one in `GPUS` (also as torch names it: "NVIDIA H100 80GB HBM3"), or "75GiB", or a number.

    Raises PlanError for a name that is not known, or that several sizes of one GPU share.
    """
    text = str(gpu).strip().lower()
    if (amount := re.fullmatch(r"([0-9][0-9_,]*(?:\.[0-9]+)?)\s*([kmgt]?i?b?)", text)) is not None:
        unit = amount[2] if amount[2].endswith("b") or not amount[2] else f"{amount[2]}b"
        num_bytes = int(float(re.sub("[_,]", "", amount[1])) * UNITS.get(unit, 0))
        if num_bytes < GIB // 4:
            raise PlanError(f"gpu is {gpu!r}, {num_bytes:,} bytes: give bytes, or a number with a unit (80GB, 75GiB)")
        return num_bytes
    words = re.findall(r"[a-z]+[0-9]*[a-z]*", text.replace("rtx ", "rtx"))
    found = [name for name in GPUS if name.split("-")[0] in words]
    sized = [name for name in found if name.split("-")[1] in text.replace(" ", "")]
    match sized or found:
        case [name]:
            return int(GPUS[name] * GIB)
        case [_, *_]:
            raise PlanError(f"gpu is {gpu!r}, of which there are several: say {' or '.join(found)}")
    near = ", ".join(get_close_matches(text, GPUS, n=3, cutoff=0.4))
    nearest = f" (the nearest: {near})" if near else ""
    raise PlanError(
        f"gpu {gpu!r} is not known{nearest}: give its bytes (80GB, 75GiB), or one of {', '.join(sorted(GPUS))}"
    )


def reserve(peak: int) -> int:
    """Bytes kept free beside a peak."""
    return RESERVE_BYTES + int(peak * RESERVE_SHARE)


def fit(
    options: MemoryOptions,
    gpu: str | int,
    *,
    peak: int,
    lasting: int,
    predict: Callable[[MemoryOptions], int] | None,
) -> MemoryFit:
    """Whether a step with `options`, whose peak is `peak`, fits the GPU, and else what to change.

    lasting: bytes that are there between steps too, and that nothing but more ranks makes fewer.
    predict: the peak of other options; where it raises PlanError, they are no choice. None: no change is looked for.
    """
    capacity = gpu_bytes(gpu)
    answer = MemoryFit(gpu=str(gpu), capacity=capacity, reserve=reserve(peak), fits=False, peak=peak)
    if peak + answer.reserve <= capacity:
        return replace(answer, fits=True)
    if predict is None:
        return answer
    peaks: dict[str, int | None] = {}

    def peak_with(change: Change) -> int | None:  # None where the model cannot be planned so
        key = repr(sorted(change.items()))
        if key not in peaks:
            try:
                peaks[key] = predict(replace(options, **change))
            except PlanError:
                peaks[key] = None
        return peaks[key]

    def fits(change: Change) -> bool:
        found = peak_with(change)
        return found is not None and found + reserve(found) <= capacity

    # Sequence parallelism is the only cheap change that not every model takes.
    singles = [c for c in _cheap_changes(options) if "sequence_parallel" not in c or peak_with(c) is not None]
    change = _smallest(options, singles, fits, lasting_ranks=(lasting + reserve(lasting)) / capacity)
    known = [found for found in peaks.values() if found is not None]
    least = peak_with(change) if change is not None else min([peak, *known])
    assert least is not None
    return replace(answer, change=change, peak=least, reserve=reserve(least), tried=len(peaks))


def _smallest(
    options: MemoryOptions, singles: Sequence[Change], fits: Callable[[Change], bool], *, lasting_ranks: float
) -> Change | None:
    """The smallest change that `fits`; at least `lasting_ranks` times the ranks must share what lasts between steps."""
    everything: Change = {}
    for change in singles:  # of several changes of one option the last saves most
        everything |= change
    if lasting_ranks <= 1 and everything and fits(everything):
        for change in singles:
            if fits(change):
                return change
        together: Change = {}
        for change in singles:
            together |= change
            if fits(together):
                return _without_needless(together, singles, fits)
    times = 2
    while times <= MOST_RANKS:
        more: tuple[Change, ...] = ({"dp": options.dp * times}, {"tp": options.tp * times})
        for change in more if lasting_ranks <= times else ():
            if fits(change):
                return change
            if everything and fits(everything | change):
                return _without_needless(everything | change, singles, fits)
        times *= 2
    return None


def _without_needless(change: Change, singles: Sequence[Change], fits: Callable[[Change], bool]) -> Change:
    """Leave out what it fits without, the costly first, and weaken what is stronger than it need be."""
    cheap = {name for single in singles for name in single}  # further ranks were found to be needed
    for name in reversed([name for name in change if name in cheap]):
        fewer = {other: value for other, value in change.items() if other != name}
        if fewer and fits(fewer):
            change = fewer
            continue
        values = [single[name] for single in singles if name in single]  # the weakest first
        for weaker in values[: values.index(change[name])] if change[name] in values else ():
            if fits(change | {name: weaker}):
                change |= {name: weaker}
                break
    return change


def _cheap_changes(options: MemoryOptions) -> Iterator[Change]:
    """Changes that need no further GPU, those first that cost least."""
    if options.lm_head != "linear_logp" and options.loss is None:
        yield {"lm_head": "linear_logp"}
    if options.optimizer == "adamw":
        yield {"optimizer": "adamw_fused"}
    if options.tp > 1 and not options.sequence_parallel:
        yield {"sequence_parallel": True}
    if options.activation_checkpointing is None:
        yield {"activation_checkpointing": "selective"}
    if options.activation_checkpointing != "full":
        yield {"activation_checkpointing": "full"}
    rows = options.batch_size
    while rows > 1:
        rows = (rows + 1) // 2
        yield {"batch_size": rows}
