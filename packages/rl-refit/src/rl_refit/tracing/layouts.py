"""Where a loader puts each box of a checkpoint: the layouts of an engine, found by running its `load_weights` once.

Nothing is loaded: `rl_refit.tracing.writes` notes what would be written. A box that is copied as it is, perhaps cast,
transposed or into the middle of something, has a place; what is computed, or reshaped beyond recognition, has none.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from rl_refit.errors import RefitError
from rl_refit.layout import Region
from rl_refit.manifest import Manifest
from rl_refit.module_tensors import Binding
from rl_refit.tracing.memory import LoadWeights, Place, read_memory, storage_id
from rl_refit.tracing.writes import Recorder, Write, record_writes

__all__ = ["Landing", "Landings", "LoaderMap", "find_landings", "trace"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderMap:
    """Where the loader puts each element of a checkpoint.

    Hand `bindings` itself to a sink: `ModuleSink(module, bindings=loader_map.bindings)`. The sink then refuses elements
    of the engine that no binding reaches and nothing declares constant.
    """

    module: nn.Module
    """What was traced."""

    landings: tuple[Landing, ...]

    places: dict[str, Place]
    """By the engine's own name of each tensor: this rank's memory of it."""

    shapes: dict[str, tuple[int, ...]]
    """Global shape of every checkpoint tensor."""

    def bindings(self, module: nn.Module | None = None) -> list[Binding]:
        """Every box of a checkpoint tensor with the view of engine memory where it lies.

        Args:
            module: Whose memory; the traced module's where left out, as it is now.

        Raises:
            RefitError: The module lacks a tensor of the map, or has it in another shape.
        """
        memory = read_memory(self.module if module is None else module).tensors
        bindings: list[Binding] = []
        for landing in self.landings:
            local, place = memory.get(landing.name), self.places[landing.name]
            if local is None or (tuple(local.shape), local.stride()) != (place.shape, place.strides):
                has = "is not there" if local is None else f"has shape {list(local.shape)} and strides {local.stride()}"
                raise RefitError(
                    f"{landing.name!r} {has}, and was traced with shape {list(place.shape)} and strides "
                    f"{place.strides}; trace this module",
                    tensor=landing.name,
                )
            bindings.append(Binding(landing.box, self.shapes[landing.box.name], landing.view_in(local)))
        return bindings


def trace(
    load_weights: LoadWeights, module: nn.Module, manifest: Manifest, *, derived: Iterable[str] = ()
) -> LoaderMap:
    """Run `load_weights` once, without data, and say where in `module` each box of the checkpoint goes.

    No memory is needed, and `module` keeps its values; it may be on the meta device.

    Args:
        load_weights: The engine's own, which puts tensors into `module`.
        module: This rank's part of the engine.
        manifest: The checkpoint: names, global shapes and dtypes. Tied tensors are given once, as they travel.
        derived: Names in the engine of tensors that its loader computes, such as `-exp(A_log)`; they are not mapped.

    Raises:
        RefitError: The loader computes what it puts into a tensor, asks for values, writes twice to one place, or
            replaces memory. Names every such tensor.
        ValueError: `derived` has a name that is not there.
    """
    before, derived = read_memory(module).tensors, set(derived)
    if unknown := derived - before.keys():
        raise ValueError(f"derived has {', '.join(map(repr, unknown))}; the engine's names look like {[*before][:3]}")
    recorder = record_writes(load_weights, module, manifest)
    after = read_memory(module).tensors
    same = before.keys() & after.keys()
    moved = [
        name for name in {**before, **after} if name not in same or storage_id(before[name]) != storage_id(after[name])
    ]
    if moved:
        raise RefitError(
            f"load_weights does not write into these tensors, it replaces them by others: {', '.join(moved)}; "
            f"bindings would lead to memory that nobody reads",
            tensor=moved[0],
        )
    tensors = {name: tensor for name, tensor in after.items() if name not in derived}
    found = find_landings(recorder, tensors)
    if computed := [name for name in tensors if name in found.changed]:
        raise RefitError(
            f"these tensors of the engine hold what is no copy of a box of the checkpoint: {', '.join(computed)}; "
            f"load_weights computes or reshapes it (scales, adds, concatenates, gathers). Bind them by hand, or name "
            f"them derived if the engine computes them after every refit",
            tensor=computed[0],
        )
    if found.clashes:
        raise RefitError("; ".join(found.clashes))
    landings = tuple(landing for each in found.by_source.values() for landing in each if landing.box.numel)
    return LoaderMap(
        module=module,
        landings=landings,
        places={landing.name: Place.of(tensors[landing.name]) for landing in landings},
        shapes={name: tuple(tensor.shape) for name, tensor in recorder.sources.items()},
    )


@dataclass(frozen=True, slots=True)
class Landing:
    """Where a box of a source tensor goes, unchanged but for a cast, in a tensor of the engine as it is made."""

    box: Region
    """Of the source tensor."""

    name: str
    """The engine's name of its tensor."""

    shape: tuple[int, ...]
    """Of the engine's tensor."""

    offset: int
    """Of the box within the engine's tensor, in elements from its first."""

    strides: tuple[int, ...]
    """In the engine's tensor, in the order of the dims of the source tensor."""

    same_dtype: bool
    """Whether the bytes stay the same."""

    def view_in(self, tensor: Tensor) -> Tensor:
        """The box in the engine's `tensor`, in the order of the source's dims."""
        return tensor.as_strided(self.box.shape, self.strides, int(tensor.storage_offset()) + self.offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class Landings:
    """What a loader does with the tensors of a checkpoint."""

    by_source: dict[str, tuple[Landing, ...]]
    """By source tensor, where all of its uses by this rank are plain copies."""

    users: dict[str, tuple[str, ...]]
    """The engine's tensors, each memory once, that are made from a source tensor; by source tensor."""

    changed: frozenset[str]
    """The engine's tensors that are not just copied and filled up."""

    clashes: list[str]
    """What is written to one place from two sources."""

    casts: dict[str, str]
    """By source tensor the dtype in which the engine keeps it, where that is another."""


def find_landings(recorder: Recorder, tensors: Mapping[str, Tensor]) -> Landings:
    """What was written to `tensors`, the engine's own."""
    landings: dict[str, list[Landing]] = {}
    users: dict[str, dict[str, None]] = {}
    kept: dict[str, torch.dtype] = {}
    computed: set[str] = set()
    changed: set[str] = set()
    clashes: list[str] = []
    for name, tensor in tensors.items():
        copied: dict[tuple[str, Region], None] = {}
        for write in recorder.writes_to(tensor):
            for source in write.names:
                users.setdefault(source, {})[name] = None
                kept |= {source: write.target.dtype} if len(write.names) == 1 else {}
            into = write.target.box_in(Place.of(tensor))
            if write.source is not None and into is not None:
                copied[write.source, into] = None
            if (landing := _landing(write, recorder.sources, name=name, tensor=tensor)) is not None:
                landings.setdefault(landing.box.name, []).append(landing)
            elif write.names:
                computed |= write.names
                changed.add(name)
            # Padding reads no source, and leaves alone what was copied before.
            elif not write.fills or (copied and (into is None or any(into.intersect(box) for _, box in copied))):
                changed.add(name)
        if sum(box.numel for _, box in copied) > tensor.numel():  # only one of two can survive at the same elements
            pairs = itertools.combinations(copied, 2)
            clashing = {(one, two) for (one, box), (two, other) in pairs if one != two and box.intersect(other)}
            clashes += [f"{one} and {two} are both written to {name}" for one, two in sorted(clashing)]
    casts = {
        name: str(dtype).removeprefix("torch.") for name, dtype in kept.items() if dtype != recorder.sources[name].dtype
    }
    return Landings(
        by_source={source: tuple(dict.fromkeys(each)) for source, each in landings.items() if source not in computed},
        users={source: tuple(names) for source, names in users.items()},
        changed=frozenset(changed),
        clashes=clashes,
        casts=casts,
    )


def _landing(write: Write, sources: Mapping[str, Tensor], *, name: str, tensor: Tensor) -> Landing | None:
    """Where a write puts a box of one source tensor, if it is a plain copy of a box."""
    if write.origin is None or write.source is None:
        return None
    whole = Place.of(sources[write.source])
    box, dims = write.origin.box_in(whole, write.source), write.origin.dims_in(whole)
    if box is None or dims is None:
        return None
    strides = [0] * len(whole.shape)
    for dim, stride in zip(dims, write.target.strides, strict=True):
        if dim is not None:
            strides[dim] = stride
    return Landing(
        box=box,
        name=name,
        shape=tuple(tensor.shape),
        offset=write.target.offset - int(tensor.storage_offset()),
        strides=tuple(strides),
        same_dtype=write.origin.dtype == write.target.dtype,
    )
