"""From which bandwidth downwards a delta arrives sooner than all of the weights: a formula, and the speeds it needs.

A version of S bytes crosses a link of B bytes a second once. With a share w of them left on the wire, E bytes to encode
at the busiest source rank and A bytes to apply at the busiest sink rank,

    whole   S / B                delta   E / encode + w S / B + A / apply

are seconds, and are equal at the break-even bandwidth

    B* = (1 - w) S / (E / encode + A / apply)
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from rl_refit.delta.codec import apply, encode, revert
from rl_refit.digest import digest_tensor
from rl_refit.plan import RefitPlan
from rl_refit.schedule import make_schedule

__all__ = ["CodecSpeed", "DeltaForecast", "explain_delta", "forecast_delta", "measure_codec"]

_SAMPLE_BYTES = 16 * 2**20
_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSpeed:
    """What the codec does on one core for one share of changed elements."""

    changed_share: float
    """Of the elements."""

    encode_bytes_per_s: float
    """Of the tensor, as for the rates below."""

    apply_bytes_per_s: float

    wire_share: float
    """Bytes of the delta over bytes of the tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaForecast:
    """A delta refit beside a whole one."""

    total_bytes: int
    """That cross the link where all weights do."""

    source_bytes: int
    """Of the busiest source rank."""

    sink_bytes: int
    """Of the busiest sink rank."""

    speed: CodecSpeed

    @property
    def codec_seconds(self) -> float:
        """Seconds that encoding and applying take, whatever the link."""
        return self.source_bytes / self.speed.encode_bytes_per_s + self.sink_bytes / self.speed.apply_bytes_per_s

    @property
    def break_even_bytes_per_s(self) -> float:
        """The delta wins on slower links; 0 where it never does."""
        if not self.codec_seconds:
            return 0.0
        return max(0.0, 1.0 - self.speed.wire_share) * self.total_bytes / self.codec_seconds

    def seconds(self, bytes_per_s: float) -> tuple[float, float]:
        """Of a whole refit and of a delta over a link of `bytes_per_s`."""
        whole = self.total_bytes / bytes_per_s
        return whole, self.codec_seconds + self.speed.wire_share * whole

    def explain(self) -> str:
        """As text, with a line for each of some links."""
        changed, left = self.speed.changed_share, self.speed.wire_share
        encode_gb_s, apply_gb_s = self.speed.encode_bytes_per_s / 1e9, self.speed.apply_bytes_per_s / 1e9
        lines = [
            f"{changed:.2%} changed elements are {left:.2%} of the wire's {self.total_bytes:,} bytes",
            f"  encode {encode_gb_s:6.2f} GB/s a core, {self.source_bytes:,} bytes at the busiest source",
            f"  apply  {apply_gb_s:6.2f} GB/s a core, {self.sink_bytes:,} bytes at the busiest sink",
            f"  a delta wins below {self.break_even_bytes_per_s * 8e-9:.2f} Gbit/s",
        ]
        for gbit_per_s in (0.1, 1.0, 10.0, 100.0):
            whole, delta = self.seconds(gbit_per_s / 8e-9)
            lines.append(f"  at {gbit_per_s:5.1f} Gbit/s: whole {whole:9.3g} s, delta {delta:9.3g} s")
        return "\n".join(lines)


def explain_delta(plan: RefitPlan, changed_share: float, *, speed: CodecSpeed | None = None) -> str:
    """At which bandwidth a delta of `changed_share` of the elements wins, as text.

    Args:
        plan: What would be moved.
        changed_share: Of the elements, from 0 to 1.
        speed: Of the codec; measured here, in a fraction of a second, where left out.
    """
    return forecast_delta(plan, speed or measure_codec(changed_share)).explain()


def forecast_delta(plan: RefitPlan, speed: CodecSpeed) -> DeltaForecast:
    """What a delta refit of `plan` takes with a codec of `speed`."""
    sent: Counter[int] = Counter()
    for stream in make_schedule(plan, routing="multicast", bucket_bytes=None).streams:
        sent[stream.source_rank] += sum(piece.nbytes for bucket in stream.buckets for piece in bucket)
    return DeltaForecast(
        total_bytes=sent.total(),
        source_bytes=max(sent.values(), default=0),
        sink_bytes=max(map(plan.bytes_received, plan.sink.ranks), default=0),
        speed=speed,
    )


def measure_codec(
    changed_share: float, *, dtype: torch.dtype = torch.bfloat16, nbytes: int = _SAMPLE_BYTES
) -> CodecSpeed:
    """Encode and apply a random tensor here, in one thread; what counts is the time of the core, whoever else is busy.

    torch's number of threads is 1 meanwhile, in the whole process.

    Raises:
        ValueError: `changed_share` is not between 0 and 1.
    """
    if not 0.0 <= changed_share <= 1.0:
        raise ValueError(f"changed_share is a share of all elements, from 0 to 1; got {changed_share}")
    generator = torch.Generator().manual_seed(0)
    base = torch.randint(0, 256, (nbytes // dtype.itemsize, dtype.itemsize), dtype=torch.uint8, generator=generator)
    new = base.clone()
    new[:, 0] ^= (torch.rand(len(base), generator=generator) < changed_share).to(torch.uint8)
    base, new = base.view(dtype), new.view(dtype)
    digest = digest_tensor(base)
    delta = encode(base, new)

    def there_and_back() -> None:
        apply(base, delta)
        revert(base, delta)

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        encoding, applying = _fastest(lambda: encode(base, new, base_digest=digest)), _fastest(there_and_back) / 2
    finally:
        torch.set_num_threads(num_threads)
    return CodecSpeed(
        changed_share=changed_share,
        encode_bytes_per_s=nbytes / encoding,
        apply_bytes_per_s=nbytes / applying,
        wire_share=delta.numel() / nbytes,
    )


def _fastest(work: Callable[[], object]) -> float:
    """Seconds of a core in the fastest of some rounds."""
    spent = []
    for _ in range(_ROUNDS):
        start = time.process_time()
        work()
        spent.append(time.process_time() - start)
    return max(min(spent), 1e-9)
