"""What a refit did: the proof that a loop logs and a launcher shows.

Knows plain numbers only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["RefitReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RefitReport:
    """A refit that was committed, as one of its parties saw it."""

    version: int
    """Number of optimizer steps that the weights have seen."""

    transport: str
    """The way that the bytes took."""

    tensors: int
    """Tensors fed; those tied to one of them are not counted."""

    bytes: int
    """Bytes that arrived, at all ranks of the sink together."""

    buckets: int
    """Buckets of all streams."""

    seconds: Mapping[str, float]
    """Seconds by phase: prepare, transfer, verify, commit."""

    verified: str
    """What was digested on both sides: "every byte", "1/8 of the chunks", "nothing"."""

    digest: str | None
    """Of all that was digested, at all sinks, in hex; equal at every party. None where nothing was."""

    unreadable: tuple[str, ...]
    """Tensors of this process's sink that were verified when staged, and cannot be read back from the engine."""

    manifest_hash: str
    """`Manifest.hash()` of the source."""

    extra_bytes: int
    """Bytes that the transport holds in this process. What the sink stages comes on top."""

    @property
    def total_seconds(self) -> float:
        """Seconds of all phases."""
        return sum(self.seconds.values())

    def explain(self) -> str:
        """One line for people."""
        phases = ", ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in self.seconds.items())
        digest = "" if self.digest is None else f", digest {self.digest[:12]}"
        unreadable = f", {len(self.unreadable)} tensors not readable in the engine" if self.unreadable else ""
        return (
            f"version {self.version}: {self.tensors} tensors, {self.bytes:,} bytes {self.transport}, "
            f"{1e3 * self.total_seconds:.1f} ms ({phases}), verified {self.verified}{digest}{unreadable}"
        )
