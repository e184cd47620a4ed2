"""Write tracing: one run of an unmodified `load_weights` without data says which engine memory it writes.

The module is on the meta device, and so is the checkpoint: a loader's copies move nothing, while a `TorchDispatchMode`
sees each of them with the storage, offset, shape and strides that it would write. Names flow with the data: what an
operation makes of a tensor carries the tensor's names, and so does the storage that it writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rl_refit.errors import RefitError
from rl_refit.layout import Region
from rl_refit.manifest import Manifest
from rl_refit.tracing.memory import LoadWeights, Place, read_memory, storage_id

__all__ = ["Recorder", "Write", "WriteCoverage", "record_writes", "trace_writes"]

_FILLING = frozenset({"fill_", "zero_"})

_OVERWRITING = _FILLING | {"copy_", "normal_", "uniform_", "random_", "bernoulli_", "_foreach_copy_", "_foreach_zero_"}
"""In-place operations whose result does not depend on what was there; all others (`add_`, `mul_`) leave it stale."""

_AT_INDICES = frozenset({"index_put_", "_index_put_impl_", "index_copy_", "index_fill_", "scatter_", "masked_fill_"})
"""In-place operations that overwrite the elements which a tensor names: not followed, since these are no boxes."""

_EMPTY = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"})
_NEEDS_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """What one operation wrote into a storage."""

    target: Place

    names: frozenset[str] = frozenset()
    """The checkpoint tensors of whose values, or what was made of them, it reads; none for padding."""

    origin: Place | None = None
    """Where it copied from, in the one checkpoint tensor of `names`; None for anything but a plain copy."""

    overwrites: bool = True
    """Whether nothing stays of what was there."""

    fills: bool = False
    """Whether it overwrites with a constant."""

    @property
    def source(self) -> str | None:
        """The checkpoint tensor of which it is a plain copy."""
        return None if self.origin is None else next(iter(self.names))


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


def trace_writes(load_weights: LoadWeights, module: nn.Module, manifest: Manifest) -> WriteCoverage:
    """Run `load_weights` once on the names, shapes and dtypes of a checkpoint, and see what it writes.

    Nothing is computed, and no memory is needed. Tensors of `module` that are not on the meta device take part, and
    keep their values: writes to them are recorded and not done.

    Args:
        load_weights: The engine's own, which puts tensors into `module`.
        module: This rank's part of the engine, on the meta device.
        manifest: The checkpoint. Tied tensors are given once, as they travel.

    Raises:
        RefitError: The loader asks for a value (`.item()`, a mask, an index from a tensor), and there is none; or it
            writes at indices. It names the checkpoint tensor or the operation.
    """
    return record_writes(load_weights, module, manifest).coverage()


@torch.no_grad()
def record_writes(load_weights: LoadWeights, module: nn.Module, manifest: Manifest) -> Recorder:
    """The same, with every single write that the loader does."""
    recorder = Recorder(module, manifest)
    with recorder:
        load_weights(iter(recorder.sources.items()))
    return recorder


@final
class Recorder(TorchDispatchMode):
    """Runs operations as they are, but for those on memory that must keep its values, and notes every write.

    Args:
        module: Of whose memory what has values is not to be changed.
        manifest: The checkpoint tensors that are followed.
    """

    def __init__(self, module: nn.Module, manifest: Manifest) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sources = {
            meta.name: torch.empty(meta.shape, dtype=meta.torch_dtype, device="meta")
            for meta in manifest.tensors
            if meta.travels
        }
        self._module, self._before = module, read_memory(module).tensors
        self._storages: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used twice
        self._writes: dict[int, list[Write]] = {}
        self._names: dict[int, set[str]] = {}
        self._kept = {self._see(tensor) for tensor in self._before.values() if not tensor.is_meta}
        for name, tensor in self.sources.items():
            self._names[self._see(tensor)] = {name}
            self._writes[self._see(tensor)] = [Write(Place.of(tensor))]
        self._given = {storage_id(tensor) for tensor in self.sources.values()}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: nothing is compiled under this mode, and skipping would import the compiler, for seconds."""
        return False

    def writes_to(self, tensor: Tensor) -> list[Write]:
        """What was written into the storage of `tensor`, in order."""
        return self._writes.get(storage_id(tensor), [])

    def coverage(self) -> WriteCoverage:
        """What the writes come to."""
        after = read_memory(self._module)
        missing = {
            name: _unwritten(tensor, self.writes_to(tensor)) if tensor.numel() else 0
            for name, tensor in after.tensors.items()
        }
        missing |= {name: missing[root] for name, root in after.tied.items()}
        sizes = {name: after.tensors[after.tied.get(name, name)].numel() for name in missing}
        partial = {name: count for name, count in missing.items() if 0 < count < sizes[name]}
        engine = [*self._before.values(), *after.tensors.values()]
        arrived = set[str]().union(*(self._names.get(storage_id(tensor), ()) for tensor in engine))
        return WriteCoverage(
            complete=tuple(name for name, count in missing.items() if not count),
            partial=partial,
            never=tuple(name for name, count in missing.items() if count and name not in partial),
            unused=tuple(name for name in self.sources if name not in arrived),
        )

    def __torch_dispatch__(  # noqa: PLR0917  torch's signature
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record what one operation writes."""
        kwargs, operation = dict(kwargs or {}), func.overloadpacket.__name__
        inputs = _tensors([*args, *kwargs.values()])
        written = list(_written(func, args, kwargs))
        read = [tensor for tensor in inputs if all(tensor is not target for target, _ in written)]
        names = set[str]().union(*(self._names.get(self._see(tensor), ()) for tensor in read if tensor.numel()))
        without_values = any(tensor.is_meta for tensor in inputs)
        if (names or without_values) and _needs_values(func):
            raise _refusal(f"asks for values of {', '.join(sorted(names)[:3]) or 'a tensor'}", func, names)
        kept = any(self._see(tensor) in self._kept for tensor, _ in written)
        if (names or without_values or kept) and operation in _AT_INDICES:
            raise _refusal("writes at indices", func, names)
        copies = func is torch.ops.aten.copy_.default and names and storage_id(read[0]) in self._given
        for target, is_out in ((tensor, is_out) for tensor, is_out in written if tensor.numel()):
            overwrites = operation in _OVERWRITING or is_out
            origin = Place.of(read[0]) if copies and read[0].shape == target.shape else None
            storage = self._see(target)
            write = Write(Place.of(target), frozenset(names), origin, overwrites, operation in _FILLING)
            self._writes.setdefault(storage, []).append(write)
            self._names.setdefault(storage, set()).update(names)
        # Not done are writes into values that are to stay, or of what has none to where torch refuses it.
        refused = without_values and any(not tensor.is_meta for tensor, _ in written)
        if written and (kept or refused):
            tensors = [tensor for tensor, _ in written]
            returned = len(func._schema.returns)  # noqa: SLF001  the only place that says it
            return None if returned == 0 else tensors[0] if returned == 1 else tuple(tensors)
        if without_values and kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")  # what has no values has no device to move to
        result = func(*args, **kwargs)
        for tensor in [] if written else _tensors(result):
            is_new = storage_id(tensor) not in self._storages
            self._names.setdefault(self._see(tensor), set()).update(names)
            if is_new and operation not in _EMPTY:
                self._writes[storage_id(tensor)] = [Write(Place.of(tensor), frozenset(names))]
        return result

    def _see(self, tensor: Tensor) -> int:
        storage = storage_id(tensor)
        if storage not in self._storages:
            self._storages[storage] = tensor.untyped_storage()
        return storage


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[Tensor, bool]]:
    """The tensors that an operation writes, each with whether it is the argument `out`."""
    for position, name, is_out in _written_arguments(func):
        value = args[position] if position < len(args) else kwargs.get(name)
        yield from ((tensor, is_out) for tensor in _tensors(value))


@cache
def _written_arguments(func: Any) -> tuple[tuple[int, str, bool], ...]:
    """Position and name of each argument that an operation writes, and whether it is `out`."""
    return tuple(
        (position, argument.name, bool(argument.is_out))
        for position, argument in enumerate(func._schema.arguments)  # noqa: SLF001  the only place that says it
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@cache
def _needs_values(func: Any) -> bool:
    return any(tag in func.tags for tag in _NEEDS_VALUES)


def _tensors(tree: object) -> list[Tensor]:
    """The tensors of nested arguments: an operation takes lists and tuples of them, and nothing deeper."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, list | tuple):
        return [tensor for branch in tree for tensor in _tensors(branch)]
    return []


def _refusal(what: str, func: Any, names: set[str]) -> RefitError:
    return RefitError(
        f"load_weights {what}, with {func}; tracing gives it tensors without values, and follows copies of boxes: bind "
        f"by hand what it does with them",
        tensor=min(names, default=None),
    )


def _unwritten(tensor: Tensor, writes: Iterable[Write]) -> int:
    """How many elements of `tensor` none of `writes` into its storage reaches."""
    own = Place.of(tensor)
    mine = [write for write in writes if write.overwrites and _share_bytes(write.target, own)]
    left = [Region.whole("", tensor.shape)]
    for write in mine:
        plain = write.target.dtype.itemsize == own.dtype.itemsize
        box = write.target.box_in(own) if plain else None
        if box is None:
            return _unmarked(tensor, mine)
        left = [rest for region in left for rest in region.minus(box)]
    return sum(region.numel for region in left)


def _unmarked(tensor: Tensor, writes: Sequence[Write]) -> int:
    """The same, for writes of any form: marked one by one, in a byte for each unit of the storage."""
    own = Place.of(tensor)
    unit = min(place.dtype.itemsize for place in (own, *(write.target for write in writes)))
    marks = torch.zeros(tensor.untyped_storage().nbytes() // unit, dtype=torch.bool)
    for write in writes:
        _in_units(marks, write.target, unit).fill_(True)
    return int((~_in_units(marks, own, unit).all(-1)).sum())


def _share_bytes(one: Place, other: Place) -> bool:
    a, b = one.bytes, other.bytes
    return 0 not in one.shape and a.start < b.stop and b.start < a.stop


def _in_units(marks: Tensor, place: Place, unit: int) -> Tensor:
    """The view's elements, and in a last dim their units."""
    units = place.dtype.itemsize // unit
    strides = (*(stride * units for stride in place.strides), 1)
    return marks.as_strided((*place.shape, units), strides, place.offset * units)
