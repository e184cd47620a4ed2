"""Dye tracing: what an unmodified `load_weights` does with every element of a checkpoint, found out by running it.

The loader may copy, slice, transpose, stack or cast as it likes. It is given synthetic checkpoints whose values are the
digits of each element's number, one digit a pass. What then lies in engine memory spells the number of the checkpoint
element that was put there.

A value is `1 + digit`, an integer that the narrowest dtype of checkpoint and engine holds exactly: base 256 in
bfloat16, 2048 in float16. Two more passes tell copying from computing: the complement of the first digit, whose sum
with it is `base + 1` for whatever was copied, and not for what was scaled or shifted; and a hash of the number, which
nothing that mixes elements gets right. Before each pass memory is filled with a mark that is no value, another one
every time; what still has it was not written, and what has the same in all passes was set by the loader itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from rl_refit.errors import RefitError
from rl_refit.layout import Region
from rl_refit.manifest import Manifest, TensorMeta
from rl_refit.tracing.code import Code, mark, values_held
from rl_refit.tracing.element_map import Numbering, find_pieces, find_regions
from rl_refit.tracing.engine_memory import EngineMemory, read_memory
from rl_refit.tracing.loader_map import LoaderMap, TracedTensor
from rl_refit.tracing.readings import FILLED, NEVER_WRITTEN, Readings

__all__ = ["LoadWeights", "trace"]

_CHUNK = 1 << 16

LoadWeights = Callable[[Iterable[tuple[str, Tensor]]], object]
"""An engine's own loader: takes pairs of a Hugging Face name and a tensor."""


@torch.no_grad()
def trace(
    load_weights: LoadWeights,
    module: nn.Module,
    manifest: Manifest,
    *,
    names: Iterable[str] | None = None,
    derived: Iterable[str] = (),
    restore: bool = True,
    max_boxes: int = 16_384,
) -> LoaderMap:
    """Run `load_weights` on synthetic checkpoints and say where in `module` each checkpoint element ends.

    One pass for each digit and two to be sure: five for a checkpoint of 16 million elements in bfloat16, seven for one
    of 8 billion. While it runs it needs 7 bytes (11 from 2³⁰ elements on) for each element of the engine in bfloat16,
    some 20 more for those of its largest tensor, and with `restore` another copy of the engine: `names` bounds it.

    Args:
        load_weights: The engine's own, which puts tensors into `module`; called several times.
        module: Whose parameters and buffers are read; this rank's part of the engine.
        manifest: The checkpoint: names, global shapes and dtypes. Tied tensors are given once, as they travel.
        names: Give the loader these tensors only, to trace a layer at a time; all where left out.
        derived: Names in the engine of tensors that its loader computes, such as `-exp(A_log)`; they are not mapped.
        restore: Put the engine's own values back in the end, also after an error.
        max_boxes: How many boxes one tensor of the engine may be made of.

    Raises:
        RefitError: The loader computes what it puts into a tensor, replaces its memory, or scatters single elements; or
            a dtype holds too few integers to be traced. Names every such tensor.
        ValueError: `names` or `derived` has a name that is not there.
    """
    metas = _given(manifest, names)
    memory = read_memory(module)
    derived = _known(derived, memory)
    code = _code_for(metas, memory)
    saved = {name: tensor.clone() for name, tensor in memory.tensors.items()} if restore else {}
    readings = {name: Readings(tensor, code) for name, tensor in memory.tensors.items() if name not in derived}
    try:
        for number in range(code.passes):
            for tensor in memory.tensors.values():
                mark(tensor, number)
            load_weights(_checkpoint(metas, code, number))
            _require_in_place(memory, read_memory(module))
            for reading in readings.values():
                reading.take(number)
    finally:
        for name, tensor in saved.items():
            memory.tensors[name].copy_(tensor)
    _require_copied(readings)
    tensors = _map(readings, _numbering(metas), max_boxes=max_boxes)
    return LoaderMap(
        module=module,
        tensors={name: tensor for name, tensor in tensors.items() if names is None or tensor.pieces},
        shapes={meta.name: meta.shape for meta in metas},
        tied=memory.tied,
        derived=derived,
    )


def _given(manifest: Manifest, names: Iterable[str] | None) -> list[TensorMeta]:
    if names is None:
        return [meta for meta in manifest.tensors if meta.travels]
    chosen = list(names)
    unknown = [name for name in chosen if name not in manifest.by_name]
    if unknown:
        raise ValueError(f"names has {', '.join(map(repr, unknown))}, which the manifest does not")
    return [manifest.by_name[name] for name in chosen]


def _known(derived: Iterable[str], memory: EngineMemory) -> tuple[str, ...]:
    chosen = tuple(derived)
    unknown = [name for name in chosen if name not in memory.tensors]
    if unknown:
        raise ValueError(
            f"derived has {', '.join(map(repr, unknown))}; the engine's own names look like {list(memory.tensors)[:3]}"
        )
    return chosen


def _code_for(metas: list[TensorMeta], memory: EngineMemory) -> Code:
    narrow = [f"{meta.name} ({meta.dtype})" for meta in metas if not values_held(meta.torch_dtype)]
    if narrow:
        raise RefitError(
            f"these checkpoint tensors are of a dtype that holds too few integers to number elements with: "
            f"{', '.join(narrow)}; trace a manifest that gives them in bfloat16",
            tensor=narrow[0].split(" ")[0],
        )
    for name, tensor in memory.tensors.items():
        if tensor.is_meta:
            raise RefitError(f"{name!r} is on the meta device and holds nothing; use trace_writes", tensor=name)
        if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            raise RefitError(f"{name!r} is expanded: several of its elements are one; make it contiguous", tensor=name)
    dtypes = {meta.torch_dtype for meta in metas} | {tensor.dtype for tensor in memory.tensors.values()}
    return Code.for_dtypes(dtypes, sum(math.prod(meta.shape) for meta in metas))


def _numbering(metas: list[TensorMeta]) -> Numbering:
    starts = itertools.accumulate((math.prod(meta.shape) for meta in metas), initial=0)
    return Numbering(tuple(meta.name for meta in metas), tuple(meta.shape for meta in metas), tuple(starts))


def _checkpoint(metas: list[TensorMeta], code: Code, which: int) -> Iterator[tuple[str, Tensor]]:
    start = 0
    for meta in metas:
        tensor = torch.empty(math.prod(meta.shape), dtype=meta.torch_dtype)
        for first in range(0, tensor.numel(), _CHUNK):
            part = tensor[first : first + _CHUNK]
            part.copy_(code.values(torch.arange(start + first, start + first + part.numel()), which))
        start += tensor.numel()
        yield meta.name, tensor.view(meta.shape)


def _require_in_place(before: EngineMemory, after: EngineMemory) -> None:
    moved = after.moved_from(before)
    if moved:
        raise RefitError(
            f"load_weights does not write into these tensors, it replaces them by others: {', '.join(moved)}; "
            f"bindings would lead to memory that nobody reads",
            tensor=moved[0],
        )


def _require_copied(readings: dict[str, Readings]) -> None:
    narrow = [name for name, reading in readings.items() if not reading.untouched and not reading.spelled]
    if narrow:
        raise RefitError(
            f"these tensors of the engine are written, and of a dtype that holds too few integers to number elements "
            f"with: {', '.join(narrow)}; build the engine in bfloat16 to trace it, or name them derived",
            tensor=narrow[0],
        )
    lines: list[str] = []
    first: str | None = None
    for name, reading in readings.items():
        strange = reading.strange()
        if bool(strange.any()):
            first = first or name
            place = torch.unravel_index(strange.flatten().to(torch.uint8).argmax(), strange.shape)
            where = [int(coordinate) for coordinate in place]
            lines.append(f"{name}: {int(strange.sum()):,} of {strange.numel():,} elements, the first at {where}")
    if lines:
        raise RefitError(
            "these tensors of the engine hold values that are no element of the checkpoint: load_weights computes them "
            "(scales, shifts, adds, rounds), or is not the same every time. Name them derived if the engine computes "
            "them after every refit." + "".join(f"\n  {line}" for line in lines),
            tensor=first,
        )


def _map(readings: dict[str, Readings], numbering: Numbering, *, max_boxes: int) -> dict[str, TracedTensor]:
    tensors: dict[str, TracedTensor] = {}
    for name, reading in readings.items():
        shape, strides = tuple(reading.tensor.shape), reading.tensor.stride()
        if reading.untouched:
            alone = (Region(name, (0,) * len(shape), shape),) if reading.tensor.numel() else ()
            tensors[name] = TracedTensor(
                name=name, shape=shape, strides=strides, pieces={}, never_written=alone, filled=()
            )
            continue
        index = reading.map()
        tensors[name] = TracedTensor(
            name=name,
            shape=shape,
            strides=strides,
            pieces=find_pieces(name, index, numbering, strides=strides, max_boxes=max_boxes),
            never_written=find_regions(name, index == NEVER_WRITTEN),
            filled=find_regions(name, index == FILLED),
        )
        reading.free()
    return tensors
