"""What a refit did: the proof that a loop logs and a launcher shows.

Knows plain numbers only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["RefitReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RefitReport:
    """A refit that was committed."""

    version: int
    """Number of optimizer steps that the weights have seen."""

    tensors: int
    """Tensors fed; those tied to one of them are not counted."""

    bytes: int
    """Bytes that arrived in the sink."""

    buckets: int
    """Buckets in which they came."""

    seconds: Mapping[str, float]
    """Seconds by phase: prepare, transfer, verify, commit."""

    digest: str | None
    """Of all tensors, equal on both sides, as `Digest.hex`; None where `verify=False` left it out."""

    manifest_hash: str
    """`Manifest.hash()` of the source."""

    extra_bytes: int
    """Bytes of the ring of slots. What the sink stages comes on top: for a `ModuleSink`, the weights once more."""

    @property
    def total_seconds(self) -> float:
        """Seconds of all phases."""
        return sum(self.seconds.values())

    def explain(self) -> str:
        """One line for people."""
        phases = ", ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in self.seconds.items())
        digest = "not verified" if self.digest is None else f"digest {self.digest[:12]}"
        return (
            f"version {self.version}: {self.tensors} tensors, {self.bytes:,} bytes in {self.buckets} buckets, "
            f"{1e3 * self.total_seconds:.1f} ms ({phases}), {digest}"
        )
