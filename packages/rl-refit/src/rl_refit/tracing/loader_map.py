"""Where every element of an engine's memory comes from: what `trace` found out about a `load_weights`.

Knows the module that was traced, and reads none of its values.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor, nn

from rl_refit.bindings import Binding
from rl_refit.errors import RefitError
from rl_refit.layout import Region
from rl_refit.tracing.engine_memory import read_memory
from rl_refit.tracing.strided import Piece

__all__ = ["LoaderMap", "TracedTensor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedTensor:
    """One tensor of the engine, and what the loader puts there."""

    name: str
    """The engine's own name of it."""

    shape: tuple[int, ...]
    """Of this rank's memory."""

    strides: tuple[int, ...]
    """Of this rank's memory, in elements."""

    pieces: dict[str, tuple[Piece, ...]]
    """Checkpoint tensor → its boxes; their memory counts elements from this tensor's first one."""

    never_written: tuple[Region, ...]
    """What the loader leaves alone."""

    filled: tuple[Region, ...]
    """What the loader writes by itself, the same whatever the checkpoint holds, such as zeros into padding."""

    @property
    def fed(self) -> int:
        """Elements that come from the checkpoint."""
        return sum(piece.numel for pieces in self.pieces.values() for piece in pieces)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderMap:
    """Engine memory, element by element: the checkpoint element that the loader puts there, or that there is none.

    Hand `bindings` itself to a sink: `ModuleSink(module, bindings=loader_map.bindings)`.
    """

    module: nn.Module
    """What was traced."""

    tensors: dict[str, TracedTensor]
    """By the engine's own names; with `names=`, only what these names reach."""

    shapes: dict[str, tuple[int, ...]]
    """Global shape of every checkpoint tensor that the loader was given."""

    tied: dict[str, str]
    """Names of the engine that share the memory of another one, with that one's name."""

    derived: tuple[str, ...]
    """Tensors of the engine that were said to be computed, and were not mapped."""

    @property
    def never_written(self) -> dict[str, tuple[Region, ...]]:
        """Engine tensor → its elements that the loader leaves alone: stale for ever unless something else sets them."""
        return {name: tensor.never_written for name, tensor in self.tensors.items() if tensor.never_written}

    @property
    def filled(self) -> dict[str, tuple[Region, ...]]:
        """Engine tensor → its elements that the loader sets by itself, whatever the checkpoint holds."""
        return {name: tensor.filled for name, tensor in self.tensors.items() if tensor.filled}

    @property
    def unused(self) -> tuple[str, ...]:
        """The checkpoint tensors of which nothing arrived, in this rank's memory."""
        used = {name for tensor in self.tensors.values() for name in tensor.pieces}
        return tuple(name for name in self.shapes if name not in used)

    def bindings(self, module: nn.Module | None = None) -> list[Binding]:
        """Every box of a checkpoint tensor with the view of engine memory where it lies.

        Args:
            module: Whose memory; the traced module's where left out, as it is now.

        Raises:
            RefitError: The module lacks a tensor of the map, or has it in another shape.
        """
        memory = read_memory(self.module if module is None else module).tensors
        return [
            Binding(Region(name, piece.offsets, piece.shape), self.shapes[name], view)
            for tensor in self.tensors.values()
            for name, pieces in tensor.pieces.items()
            for piece, view in _views(tensor, pieces, memory)
        ]

    def explain(self) -> str:
        """The map as a table; tensors that differ in a number of their names only share a line."""
        rows = Counter(_row(tensor) for tensor in self.tensors.values())
        lines = [("engine tensor", "shape", "fed", "boxes", "filled", "never written", "from"), *rows]
        counts = ["times", *(str(count) for count in rows.values())]
        table = _aligned([(count, *line) for count, line in zip(counts, lines, strict=True)])
        notes = [
            *(f"tied: {name} is the memory of {root}" for name, root in self.tied.items()),
            *(f"derived, not mapped: {name}" for name in self.derived),
            *(f"unused here: {name}" + f" ({count})" * (count > 1) for name, count in _alike(self.unused).items()),
        ]
        return "\n".join([*table, *notes])


def _views(tensor: TracedTensor, pieces: Sequence[Piece], memory: dict[str, Tensor]) -> list[tuple[Piece, Tensor]]:
    if not pieces:
        return []
    local = memory.get(tensor.name)
    if local is None or (tuple(local.shape), local.stride()) != (tensor.shape, tensor.strides):
        found = "is not there" if local is None else f"has shape {list(local.shape)} and strides {local.stride()}"
        raise RefitError(
            f"{tensor.name!r} {found}, and was traced with shape {list(tensor.shape)} and strides {tensor.strides}; "
            f"trace this module",
            tensor=tensor.name,
        )
    start = local.storage_offset()
    return [(piece, local.as_strided(piece.shape, piece.strides, start + piece.memory)) for piece in pieces]


def _row(tensor: TracedTensor) -> tuple[str, ...]:
    return (
        _without_numbers(tensor.name),
        str(list(tensor.shape)),
        f"{tensor.fed:,}",
        str(sum(map(len, tensor.pieces.values()))),
        f"{_count(tensor.filled):,}",
        f"{_count(tensor.never_written):,}",
        ", ".join(dict.fromkeys(_without_numbers(name) for name in tensor.pieces)) or "nothing",
    )


def _alike(names: Iterable[str]) -> Counter[str]:
    return Counter(map(_without_numbers, names))


def _count(regions: Sequence[Region]) -> int:
    return sum(region.numel for region in regions)


def _without_numbers(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
