"""What a refit did, in plain numbers: the proof that a loop logs and a launcher shows."""

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

    same_as: int | None
    """An earlier version of which the very same bytes were digested; None where they have changed. A policy that trains
    and does not change here is not the one that is sent: the source may be a copy of it, or a LoRA's base."""

    kept: tuple[str, ...]
    """Tensors that the source has and the sink keeps as they are, since they were declared constant or derived."""

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

    def metrics(self) -> dict[str, float]:
        """For a log: bytes, seconds, and 1 if digests of both sides were compared, else 0."""
        return {
            "refit_bytes": float(self.bytes),
            "refit_s": self.total_seconds,
            "refit_verified": float(self.digest is not None),
        }

    def explain(self) -> str:
        """One line for people."""
        phases = ", ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in self.seconds.items())
        digest = "" if self.digest is None else f", digest {self.digest[:12]}"
        notes = [f"the same bytes as version {self.same_as}"] if self.same_as is not None else []
        notes += [f"{len(self.kept)} tensors kept as they are"] if self.kept else []
        notes += [f"{len(self.unreadable)} tensors not readable in the engine"] if self.unreadable else []
        return (
            f"version {self.version}: {self.tensors} tensors, {self.bytes:,} bytes {self.transport}, "
            f"{1e3 * self.total_seconds:.1f} ms ({phases}), verified {self.verified}{digest}"
            + "".join(f", {note}" for note in notes)
        )
