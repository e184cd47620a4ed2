"""What moved, and what the device has after it that it had not before."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rl_backends.metrics.memory import MemoryUse

__all__ = ["OffloadReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadReport:
    """Of one `offload` or `onload`, on this rank."""

    action: Literal["offload", "onload"]
    """What was asked for."""

    to: Literal["host", "disk"]
    """Where parts are kept while they are away."""

    bytes_moved: Mapping[str, int]
    """Of each part that was asked for and was not there already; 0 where it had nothing that could move."""

    seconds: float
    """It took, copies included."""

    before: MemoryUse
    """Memory by category."""

    after: MemoryUse
    """The same afterwards."""

    host_bytes: int
    """Host memory that is kept for the next time, or holds what is away."""

    notes: tuple[str, ...]
    """Why something that was asked for did not happen."""

    @property
    def freed_bytes(self) -> int:
        """That the device holds less of parameters, gradients and optimizer state than before; negative for onload."""
        return self.before.total() - self.after.total()

    @property
    def given_back_bytes(self) -> int | None:
        """That this process really has less: of the GPU (reserved by torch), or resident where there is none."""
        if self.before.cuda is not None and self.after.cuda is not None:
            return self.before.cuda["reserved"] - self.after.cuda["reserved"]
        if self.before.resident is None or self.after.resident is None:
            return None
        return self.before.resident - self.after.resident

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "freed_bytes": self.freed_bytes, "given_back_bytes": self.given_back_bytes}

    def as_json(self) -> str:
        """One line of JSON with every figure."""
        return json.dumps(self.as_dict())

    def render(self) -> str:
        """For people."""
        parts = ", ".join(f"{part} {size / 2**20:,.1f} MiB" for part, size in self.bytes_moved.items()) or "nothing"
        freed = f"{self.freed_bytes / 2**20:,.1f} MiB freed"
        where = f"to {self.to}" if self.action == "offload" else f"from {self.to}"
        back = "" if self.given_back_bytes is None else f", {self.given_back_bytes / 2**20:,.1f} MiB given back"
        return "\n".join(
            [
                f"{self.action} {where} in {self.seconds:.3g} s: {parts}; {freed}{back}",
                *(f"note: {note}" for note in self.notes),
                "before:",
                self.before.render(),
                "after:",
                self.after.render(),
            ]
        )
