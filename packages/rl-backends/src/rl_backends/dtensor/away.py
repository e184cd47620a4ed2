"""Parts of a backend that are away from its device, in one place at a time."""

from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import torch
from torch import nn

from rl_backends.lora import MergedWeights
from rl_backends.offload import PARTS, Offloader, OffloadReport, Part

__all__ = ["PASSES", "WEIGHTS", "Away"]

WEIGHTS: tuple[Part, ...] = ("weights",)
PASSES: tuple[Part, ...] = ("weights", "gradients")
"""What a forward and a backward need."""


class Away:
    """Knows what of `model` and its optimizers is offloaded, and where to.

    merged: what engines are fed from, beside the model; it has no memory while the weights are away.
    """

    def __init__(self, model: nn.Module, *, merged: Callable[[], MergedWeights | None] = lambda: None) -> None:
        self._model = model
        self._merged = merged
        self._offloader: Offloader | None = None
        self._directory: Path | None = None

    def require(self, what: str, parts: Collection[Part] = PARTS) -> None:
        """RuntimeError where any of `parts`, which `what` needs, is away."""
        if self._offloader is not None:
            self._offloader.require(what, parts)

    def offload(
        self, optimizers: Iterable[torch.optim.Optimizer], *, parts: Collection[Part], directory: Path | None
    ) -> OffloadReport:
        """See `DTensorBackend.offload`. A place is kept, and its memory used again, until another is asked for."""
        if self._offloader is None or directory != self._directory:
            self._require_empty(directory)
            self.close()
            to_host = directory is None
            self._offloader = Offloader(self._model, to="host" if to_host else "disk", directory=directory)
            self._directory = directory
        report = self._offloader.offload(optimizers, parts=parts)
        if "weights" in parts and (merged := self._merged()) is not None:
            merged.release()
        return report

    def onload(self, parts: Collection[Part]) -> OffloadReport:
        """See `DTensorBackend.onload`."""
        if self._offloader is None:
            raise RuntimeError("nothing was offloaded; onload() brings back what offload() has moved")
        report = self._offloader.onload(parts)
        if "weights" in parts and (merged := self._merged()) is not None:
            merged.refresh()
        return report

    def close(self) -> None:
        """Give back what the place holds."""
        if self._offloader is not None:
            self._offloader.close()

    def _require_empty(self, directory: Path | None) -> None:
        if self._offloader is not None and self._offloader.away:
            raise ValueError(
                f"directory={directory}, and {', '.join(self._offloader.away)} went to {self._directory or 'the host'}:"
                f" call onload() before choosing another place"
            )
