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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from rl_refit.errors import RefitError
from rl_refit.layout import Region
from rl_refit.manifest import Manifest, TensorMeta
from rl_refit.module_tensors import Binding
from rl_refit.tracing.memory import EngineMemory, LoadWeights, Place, read_memory, storage_id

__all__ = ["LoaderMap", "trace"]

MAX_BOXES = 16_384
"""Of which one tensor of the engine may be made."""

_CHUNK = 1 << 16
"""Elements that are looked at together: what they need stays in a CPU's cache."""
_MAX_BITS = 20
_NO_STEP = -(1 << 62)
"""Stands where two neighbouring slices are not one constant step apart."""
_MASK = (1 << 31) - 1
_ODD = 0x9E3779B1
_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a checkpoint tensor, and where it lies in a tensor of the engine, in elements from that one's first."""

    region: Region
    memory: int
    strides: tuple[int, ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderMap:
    """Where the loader puts each element of a checkpoint.

    Hand `bindings` itself to a sink: `ModuleSink(module, bindings=loader_map.bindings)`. The sink then refuses elements
    of the engine that no binding reaches and nothing declares constant.
    """

    module: nn.Module
    """What was traced."""

    pieces: dict[str, tuple[Place, tuple[Piece, ...]]]
    """By the engine's own name of each tensor: this rank's memory of it, and what comes from the checkpoint."""

    shapes: dict[str, tuple[int, ...]]
    """Global shape of every checkpoint tensor that the loader was given."""

    def bindings(self, module: nn.Module | None = None) -> list[Binding]:
        """Every box of a checkpoint tensor with the view of engine memory where it lies.

        Args:
            module: Whose memory; the traced module's where left out, as it is now.

        Raises:
            RefitError: The module lacks a tensor of the map, or has it in another shape.
        """
        memory = read_memory(self.module if module is None else module).tensors
        bindings: list[Binding] = []
        for name, (place, pieces) in self.pieces.items():
            local = memory.get(name)
            if local is None or (tuple(local.shape), local.stride()) != (place.shape, place.strides):
                has = "is not there" if local is None else f"has shape {list(local.shape)} and strides {local.stride()}"
                raise RefitError(
                    f"{name!r} {has}, and was traced with shape {list(place.shape)} and strides {place.strides}; trace "
                    f"this module",
                    tensor=name,
                )
            for piece in pieces:
                view = local.as_strided(piece.region.shape, piece.strides, local.storage_offset() + piece.memory)
                bindings.append(Binding(piece.region, self.shapes[piece.region.name], view))
        return bindings


@torch.no_grad()
def trace(
    load_weights: LoadWeights,
    module: nn.Module,
    manifest: Manifest,
    *,
    derived: Iterable[str] = (),
) -> LoaderMap:
    """Run `load_weights` on synthetic checkpoints and say where in `module` each checkpoint element ends.

    One pass for each digit and two to be sure: five for a checkpoint of 16 million elements in bfloat16, seven for one
    of 8 billion. While it runs it needs another copy of the engine, 9 bytes (13 from 2³⁰ elements on) for each of its
    elements in bfloat16, and some 50 more for those of its largest tensor and of what goes there: the manifest of one
    layer bounds it. The engine has its own values back in the end, also after an error.

    Args:
        load_weights: The engine's own, which puts tensors into `module`; called several times.
        module: Whose parameters and buffers are read; this rank's part of the engine.
        manifest: The checkpoint: names, global shapes and dtypes. Tied tensors are given once, as they travel.
        derived: Names in the engine of tensors that its loader computes, such as `-exp(A_log)`; they are not mapped.

    Raises:
        RefitError: The loader computes what it puts into a tensor, replaces its memory, or scatters single elements; or
            a dtype holds too few integers to be traced. Names every such tensor.
        ValueError: `derived` has a name that is not there.
    """
    metas = [meta for meta in manifest.tensors if meta.travels]
    memory, derived = read_memory(module), tuple(derived)
    if unknown := [name for name in derived if name not in memory.tensors]:
        known = list(memory.tensors)[:3]
        raise ValueError(f"derived has {', '.join(map(repr, unknown))}; the engine's own names look like {known}")
    code = _code_for(metas, memory)
    saved = {name: tensor.clone() for name, tensor in memory.tensors.items()}
    readings = {name: _Reading(tensor, code) for name, tensor in memory.tensors.items() if name not in derived}
    try:
        for number in range(code.passes):
            for tensor in memory.tensors.values():
                _markable(tensor).fill_(_mark(tensor.dtype, number))
            load_weights(_checkpoint(metas, code, number))
            _require_in_place(memory, read_memory(module))
            for reading in readings.values():
                reading.take(number)
    finally:
        for name, tensor in saved.items():
            memory.tensors[name].copy_(tensor)
    _require_copied(readings)
    shapes = {meta.name: meta.shape for meta in metas}
    found: dict[str, tuple[Place, tuple[Piece, ...]]] = {}
    while readings:  # each is freed before the next one is mapped
        name = next(iter(readings))
        reading = readings.pop(name)
        if reading.touched and (pieces := _pieces(name, reading, shapes)):
            found[name] = Place.of(reading.tensor), pieces
    return LoaderMap(module=module, pieces=found, shapes=shapes)


# -- Numbers in values -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Code:
    """How the numbers 0 … `total` − 1 are spelled, in digits of `bits` bits."""

    bits: int
    total: int

    @property
    def base(self) -> int:
        """The largest value."""
        return 1 << self.bits

    @property
    def digits(self) -> int:
        """Passes that spell the number."""
        return max(1, -(-max(0, self.total - 1).bit_length() // self.bits))

    @property
    def passes(self) -> int:
        """Passes in all: one for each digit, one for the complement of the first, one for the hash."""
        return self.digits + 2

    def values(self, number: Tensor, which: int) -> Tensor:
        """The value of each int64 `number` in pass `which`, int64 from 1 to `base`."""
        last = self.base - 1
        if which < self.digits:
            return number.bitwise_right_shift(which * self.bits).bitwise_and_(last).add_(1)
        if which == self.digits:
            return number.bitwise_and(last).neg_().add_(self.base)
        residue = number.bitwise_and(_MASK)
        hashed = residue.mul_(residue).add_(number)  # below 2⁶³, and no linear function of the number
        return hashed.bitwise_xor_(hashed >> 17).mul_(_ODD).bitwise_right_shift_(23).bitwise_and_(last).add_(1)


def _values_held(dtype: torch.dtype) -> int:
    """The n for which `dtype` holds 1, 2, … n exactly and at least two values more; 0 where that is too few."""
    if dtype in _INTEGERS:
        return torch.iinfo(dtype).max - 1
    return round(2 / torch.finfo(dtype).eps) if dtype in _FLOATS else 0


def _code_for(metas: list[TensorMeta], memory: EngineMemory) -> _Code:
    """The largest base that all dtypes hold, of those that hold any."""
    narrow = [f"{meta.name} ({meta.dtype})" for meta in metas if not _values_held(meta.torch_dtype)]
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
    held = [count for count in map(_values_held, dtypes) if count]
    return _Code(min(_MAX_BITS, min(held, default=2).bit_length() - 1), sum(math.prod(meta.shape) for meta in metas))


def _checkpoint(metas: list[TensorMeta], code: _Code, which: int) -> Iterator[tuple[str, Tensor]]:
    start = 0
    for meta in metas:
        numbers = torch.arange(start, start + math.prod(meta.shape))
        start += numbers.numel()
        yield meta.name, code.values(numbers, which).to(meta.torch_dtype).view(meta.shape)


def _markable(tensor: Tensor) -> Tensor:
    """The same memory, as integers where its dtype holds no values of a code."""
    if _values_held(tensor.dtype):
        return tensor
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.view(_SAME_SIZE[real.element_size()])


def _mark(dtype: torch.dtype, which: int) -> int:
    """What no code uses as a value, and what differs from pass to pass."""
    if not _values_held(dtype):
        return which % 2
    return 255 * (which % 2) if dtype == torch.uint8 else -1 - which % 2


# -- What the passes show --------------------------------------------------------------------------------------------


class _Reading:
    """One tensor of the engine after each pass: the number that each element spells, and three facts about it."""

    def __init__(self, tensor: Tensor, code: _Code) -> None:
        self.tensor, self._code = tensor, code
        self.touched = False
        """Whether any element was ever written; a tensor of which none was costs nothing."""
        self._first = self._number = torch.empty(0)
        self._copied = self._same = self._left = torch.empty(0, dtype=torch.bool)
        """Where all values so far were those of one number; were the same; were the marks, so nobody wrote."""

    @property
    def spelled(self) -> bool:
        """Whether the tensor's dtype can hold the values of the code."""
        return _values_held(self.tensor.dtype) > 0

    def take(self, which: int) -> None:
        """Read the tensor after pass `which`."""
        left = (_markable(self.tensor) == _mark(self.tensor.dtype, which)).flatten().cpu()
        if not self.touched and bool(left.all()):
            return
        raw, code = self.tensor.flatten().cpu(), self._code
        if self.spelled and not self.touched:
            self._first = raw.clone()
            self._number = torch.zeros(raw.shape, dtype=torch.int32 if code.total <= 1 << 30 else torch.int64)
            # What is written for the first time in a later pass is no copy and no constant, and had its marks before.
            self._copied, self._same = (torch.full(raw.shape, which == 0) for _ in range(2))
            self._left = torch.ones(raw.shape, dtype=torch.bool)
        self.touched = True
        if not self.spelled:
            return
        for start in range(0, raw.numel(), _CHUNK):
            chunk = slice(start, start + _CHUNK)
            value, copied, number = raw[chunk].to(torch.int32), self._copied[chunk], self._number[chunk]
            copied &= (value.to(raw.dtype) == raw[chunk]) & (value >= 1) & (value <= code.base)
            if which < code.digits:
                shift = which * code.bits
                digit = value.sub_(1)
                copied &= digit <= (code.total - 1) >> shift
                number |= digit.mul_(copied).to(number.dtype).bitwise_left_shift_(shift)
                copied &= number < code.total
            else:
                copied &= code.values(number.to(torch.int64), which) == value
        self._same &= raw == self._first
        self._left &= left

    def strange(self) -> Tensor:
        """Where it holds what is no element of the checkpoint, of the tensor's shape."""
        strange = ~(self._copied | self._same | self._left)
        return strange.view(self.tensor.shape) if self.touched else strange

    def numbers(self) -> Tensor:
        """Of each element the number of the checkpoint's that was copied there, −1 for none, of the tensor's shape."""
        return torch.where(self._copied, self._number, -1).view(self.tensor.shape)


def _pieces(engine_name: str, reading: _Reading, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Piece, ...]:
    """The boxes of each checkpoint tensor, of `shapes` as they were numbered, that a tensor of the engine holds.

    The numbers are turned around: from each element of the checkpoint to its place in the engine. Of an element that
    the engine has several times one place is found in each round.

    Raises:
        RefitError: They are too many: single elements, and no boxes.
    """
    numbers = reading.numbers()
    memory = torch.zeros(numbers.shape, dtype=torch.int64)
    for dim, (size, stride) in enumerate(zip(numbers.shape, reading.tensor.stride(), strict=True)):
        memory += (torch.arange(size) * stride).view(-1, *[1] * (numbers.dim() - dim - 1))
    mapped = numbers >= 0
    number, memory = numbers[mapped].to(torch.int64), memory[mapped]
    found: list[Piece] = []
    if not number.numel():
        return ()
    starts = list(itertools.accumulate(map(math.prod, shapes.values()), initial=0))
    lowest, highest = int(number.min()), int(number.max())
    reached = [
        (name, start)
        for (name, start), end in zip(zip(shapes, starts, strict=False), starts[1:], strict=True)
        if start <= highest and end > lowest
    ]
    base, end = reached[0][1], reached[-1][1] + math.prod(shapes[reached[-1][0]])
    number -= base
    while number.numel():
        places = torch.full((end - base,), -1)
        places[number] = memory
        for name, start in reached:
            size = math.prod(shapes[name])
            for region, first, steps in _boxes(name, places[start - base :][:size].view(shapes[name])):
                found.append(Piece(region, first, steps))
                if len(found) > MAX_BOXES:
                    raise RefitError(
                        f"{engine_name!r}, of shape {list(numbers.shape)}, is more than {MAX_BOXES:,} boxes of "
                        f"checkpoint tensors such as {name!r}: the loader scatters single elements; feed it whole "
                        f"through load_weights",
                        tensor=engine_name,
                    )
        again = places[number] != memory
        number, memory = number[again], memory[again]
    return tuple(found)


def _require_in_place(before: EngineMemory, after: EngineMemory) -> None:
    then, now = (
        {name: (storage_id(tensor), Place.of(tensor)) for name, tensor in memory.tensors.items()}
        for memory in (before, after)
    )
    moved = [name for name in {**now, **then} if now.get(name) != then.get(name)]
    if moved:
        raise RefitError(
            f"load_weights does not write into these tensors, it replaces them by others: {', '.join(moved)}; "
            f"bindings would lead to memory that nobody reads",
            tensor=moved[0],
        )


def _require_copied(readings: dict[str, _Reading]) -> None:
    narrow = [name for name, reading in readings.items() if reading.touched and not reading.spelled]
    if narrow:
        raise RefitError(
            f"these tensors of the engine are written, and of a dtype that holds too few integers to number elements "
            f"with: {', '.join(narrow)}; build the engine in bfloat16 to trace it, or name them derived",
            tensor=narrow[0],
        )
    lines: dict[str, str] = {}
    for name, reading in readings.items():
        strange = reading.strange()
        if bool(strange.any()):
            first = torch.unravel_index(strange.flatten().to(torch.uint8).argmax(), strange.shape)
            where = [int(coordinate) for coordinate in first]
            lines[name] = f"{name}: {int(strange.sum()):,} of {strange.numel():,} elements, the first at {where}"
    if lines:
        raise RefitError(
            "these tensors of the engine hold values that are no element of the checkpoint: load_weights computes them "
            "(scales, shifts, adds, rounds), or is not the same every time. Name them derived if the engine computes "
            "them after every refit." + "".join(f"\n  {line}" for line in lines.values()),
            tensor=next(iter(lines)),
        )


# -- Boxes -----------------------------------------------------------------------------------------------------------


def _boxes(
    name: str, places: Tensor, offsets: tuple[int, ...] | None = None
) -> Iterator[tuple[Region, int, tuple[int, ...]]]:
    """The elements of tensor `name` that have a place, as boxes along each dim of which places are one step apart.

    The tensor is cut along the dim that needs the fewest cuts, and its parts again.

    Args:
        name: Of the tensor.
        places: Of each element; integers, and negative where it has none.
        offsets: Of `places` within the tensor.

    Yields:
        The box, the place of its first element, and the step along each dim: 1 for a dim of one element.
    """
    offsets = offsets or (0,) * places.dim()
    if places.numel() == 0:
        return
    cuts = {dim: _parts(places, dim) for dim in range(places.dim()) if places.shape[dim] > 1}
    cuts = {dim: parts for dim, parts in cuts.items() if len(parts) > 1}
    if not cuts:
        first = int(places[(0,) * places.dim()])
        if first >= 0:
            steps = (
                int(places.select(dim, 1).flatten()[0]) - first if n > 1 else 1 for dim, n in enumerate(places.shape)
            )
            yield Region(name, offsets, tuple(places.shape)), first, tuple(steps)
        return
    dim = min(cuts, key=lambda candidate: len(cuts[candidate]))
    for start, stop in cuts[dim]:
        where = (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :])
        yield from _boxes(name, places.narrow(dim, start, stop - start), where)


def _parts(places: Tensor, dim: int) -> list[tuple[int, int]]:
    """Where to cut `dim` so that within each part one step along it is the same step everywhere."""
    flat = places.movedim(dim, 0).reshape(places.shape[dim], -1)
    placed = flat >= 0
    step, later = flat[1:] - flat[:-1], placed[1:]
    common = step.gather(1, later.to(torch.uint8).argmax(1, keepdim=True))
    same = (((step == common) | ~later) & (later == placed[:-1])).all(1)
    forward = torch.where(later.any(1), common[:, 0], 0)  # none of the two slices has a place: they belong together
    steps = torch.where(same & ((forward > 0) | ~later.any(1)), forward, _NO_STEP)
    values, counts = torch.unique_consecutive(steps, return_counts=True)
    starts, position, current = [0], 0, None
    for value, count in zip(values.tolist(), counts.tolist(), strict=True):
        if value == _NO_STEP:
            starts += range(position + 1, position + count + 1)
            current = None
        elif current is None:
            current = value
        else:  # the first of these steps leads to the next part, the others are its own
            starts.append(position + 1)
            current = value if count > 1 else None
        position += count
    return list(itertools.pairwise([*starts, places.shape[dim]]))
