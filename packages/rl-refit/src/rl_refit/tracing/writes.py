"""Write tracing: one run of an unmodified `load_weights` without data says which engine memory it writes.

The module is on the meta device, and so is the checkpoint: a loader's copies move nothing, while a `TorchDispatchMode`
sees each of them with the storage, offset, shape and strides that it would write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from rl_refit.layout import Region
from rl_refit.manifest import Manifest
from rl_refit.tracing.engine_memory import read_memory
from rl_refit.tracing.recorder import Recorder
from rl_refit.tracing.written import unwritten

__all__ = ["WriteCoverage", "trace_writes"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WriteCoverage:
    """What a loader would write, by the engine's own names of its parameters and buffers; ties are named each."""

    complete: tuple[str, ...]
    """Every element is written."""

    partial: dict[str, int]
    """Some elements are; with the number of those that are not."""

    never: tuple[str, ...]
    """No element is: it keeps whatever it has."""

    unused: tuple[str, ...]
    """The checkpoint tensors of which nothing reaches the engine's memory."""

    gaps: dict[str, tuple[Region, ...]]
    """For each of `partial` the boxes that are not written."""

    def explain(self) -> str:
        """The same as text, a line for every tensor that is not complete."""
        total = len(self.complete) + len(self.partial) + len(self.never)
        return "\n".join(
            [
                f"{len(self.complete)} of {total} engine tensors are written whole",
                *(
                    f"  in part: {name}, {count:,} elements are not: {_boxes(self.gaps[name])}"
                    for name, count in self.partial.items()
                ),
                *(f"  never: {name}" for name in self.never),
                *(f"  unused checkpoint tensor: {name}" for name in self.unused),
            ]
        )


@torch.no_grad()
def trace_writes(
    load_weights: Callable[[Iterable[tuple[str, Tensor]]], object], module: nn.Module, manifest: Manifest
) -> WriteCoverage:
    """Run `load_weights` once on the names, shapes and dtypes of a checkpoint, and see what it writes.

    Nothing is computed, and no memory is needed. Tensors of `module` that are not on the meta device take part, and
    keep their values: writes to them are recorded and not done.

    Args:
        load_weights: The engine's own, which puts tensors into `module`.
        module: This rank's part of the engine, on the meta device.
        manifest: The checkpoint. Tied tensors are given once, as they travel.

    Raises:
        RefitError: The loader asks for a value (`.item()`, a mask, an index from a tensor), and there is none. It names
            the checkpoint tensor or the operation.
    """
    sources = {
        meta.name: torch.empty(meta.shape, dtype=meta.torch_dtype, device="meta")
        for meta in manifest.tensors
        if meta.travels
    }
    before = read_memory(module)
    recorder = Recorder(before.tensors, sources)
    with recorder:
        load_weights(iter(sources.items()))
    after = read_memory(module)
    gaps = {
        name: unwritten(name, tensor, recorder.writes_to(tensor)) if tensor.numel() else ()
        for name, tensor in after.tensors.items()
    }
    gaps |= {name: gaps[root] for name, root in after.tied.items()}
    sizes = {name: after.tensors[after.tied.get(name, name)].numel() for name in gaps}
    missing = {name: sum(region.numel for region in regions) for name, regions in gaps.items()}
    partial = {name: count for name, count in missing.items() if 0 < count < sizes[name]}
    arrived = recorder.arrived([*before.tensors.values(), *after.tensors.values()])
    return WriteCoverage(
        complete=tuple(name for name, count in missing.items() if not count),
        partial=partial,
        never=tuple(name for name, count in missing.items() if count and name not in partial),
        unused=tuple(name for name in sources if name not in arrived),
        gaps={name: gaps[name] for name in partial},
    )


def _boxes(regions: tuple[Region, ...], shown: int = 3) -> str:
    texts = [
        "["
        + ", ".join(f"{start}:{start + size}" for start, size in zip(region.offsets, region.shape, strict=True))
        + "]"
        for region in regions[:shown]
    ]
    return ", ".join(texts) + f" and {len(regions) - shown} boxes more" * (len(regions) > shown)
