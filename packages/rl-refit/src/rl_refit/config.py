"""What a refit may choose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from rl_refit.buckets import ALIGNMENT, DEFAULT_BUCKET_BYTES

__all__ = ["RefitConfig", "Verify"]

Verify = Literal["full", "sampled", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RefitConfig:
    """What a refit may choose. `Refit` takes the same names."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid"}

    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    """Bytes of a slot of the ring. Smaller takes less memory and looks at the deadline more often; on a CPU, much
    larger falls out of the cache and is slower."""

    buckets: int = 2
    """Slots of the ring; `buckets * bucket_bytes` is all the memory that a bounded transport takes in a process."""

    deadline_s: float = 600.0
    """Seconds that each phase may take before the refit is aborted at all parties. A commit that has begun at a sink is
    let finish there."""

    verify: Verify = "sampled"
    """How much is digested on both sides before the commit, and in the engine after it. "full" is every byte, "off"
    nothing. "sampled" is every byte at the first refit and wherever a rank moves no more than 64 MiB; otherwise every
    16th chunk of a MiB, others at each refit, so that 16 of them see every byte. The report says what share was not
    compared."""

    def __post_init__(self) -> None:
        if self.bucket_bytes < ALIGNMENT or self.bucket_bytes % ALIGNMENT:
            raise ValueError(f"bucket_bytes must be a positive multiple of {ALIGNMENT}; got {self.bucket_bytes}")
        if self.buckets < 1:
            raise ValueError(f"buckets must be at least 1; got buckets={self.buckets}")
        if not self.deadline_s > 0:
            raise ValueError(f"deadline_s must be positive; got deadline_s={self.deadline_s}")
        if self.verify not in get_args(Verify):
            raise ValueError(f"verify={self.verify!r} is none of {', '.join(get_args(Verify))}")
