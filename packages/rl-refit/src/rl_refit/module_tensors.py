"""The tensors of an `nn.Module` as both sides of a refit see them: every parameter and every buffer, persistent or not.

DTensors appear as their local tensor, without a gather; names that share memory are ties.
Bindings put names to storage that has other names, or several, in the module: fused, stacked, padded or permuted. How
much of it they reach is exact for any strides: every element is counted once, in a mask of bytes for one storage at a
time.
"""

from __future__ import annotations

import fnmatch
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rl_refit.errors import CoverageError, RefitError
from rl_refit.layout import Layout, Region, is_dtensor, local_part, this_rank
from rl_refit.manifest import Feeding, Manifest, TensorMeta

__all__ = ["Binding", "Bindings", "Holding", "ModuleReader", "ModuleTensors", "Rename", "as_patterns", "check_writable"]

Rename = Callable[[str], str]
"""From the module's own name of a tensor to its Hugging Face name."""

_BANKS = 2  # a module whose tensors are exchanged at every refit has two states, in turn

Holding = tuple[Region, Tensor]
"""A box of a named tensor, and this rank's memory of it, detached."""


@dataclass(frozen=True, slots=True, eq=False)
class Binding:
    """The box `region` of the tensor `region.name` lives in `tensor`."""

    region: Region
    """Which box; its name is the Hugging Face name."""

    shape: tuple[int, ...]
    """Global shape of the named tensor."""

    tensor: Tensor
    """This rank's memory of the box: a view, of the region's shape."""

    def __post_init__(self) -> None:
        if tuple(self.tensor.shape) != self.region.shape:
            raise ValueError(f"{self.region} is bound to a tensor of shape {list(self.tensor.shape)}")


Bindings = Callable[[nn.Module], Iterable[Binding]]
"""From a module to the boxes of named tensors that its storage holds."""


@dataclass(frozen=True, slots=True)
class ModuleTensors:
    """A module's tensors at one moment."""

    held: dict[str, tuple[Holding, ...]]
    """What this rank has of each tensor."""

    manifest: Manifest
    """The same tensors' descriptions, in the same order."""

    objects: dict[str, Tensor]
    """The module's own parameters and buffers, by their Hugging Face names; bound ones by the module's."""

    identity: tuple[object, ...]
    """Equal for two reads that found the same tensors in the same memory."""


@dataclass(frozen=True, slots=True)
class _Description:
    """What is kept between two reads. Not the memory: a module that is moved would not free what it has left."""

    regions: dict[str, tuple[Region, ...]]
    bound: dict[str, tuple[Tensor, ...]]
    """The views that bindings gave, which are dear to make."""

    manifest: Manifest


class ModuleReader:
    """A `WeightSource` that describes a module, as often as it is asked to; what has not changed since, only once.

    Args:
        module: What to describe.
        rename: From the module's names to Hugging Face names; nothing is stripped without it.
        bindings: The boxes of named tensors that lie in storage of other names.
        feeding: For a sink: patterns, as of `fnmatch`, of the names that are "derived" or "constant".
        exclude: Patterns of the names that do not take part.
        complete: Whether bindings must cover every element of the tensors that they touch, for a sink.
    """

    tensors_stay = True

    def __init__(
        self,
        module: nn.Module,
        *,
        rename: Rename | None = None,
        bindings: Bindings | None = None,
        feeding: dict[Feeding, tuple[str, ...]] | None = None,
        exclude: tuple[str, ...] = (),
        complete: bool = False,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"expected an nn.Module, got {type(module).__name__}; a mapping of tensors is a StateDictSource"
            )
        self._module = module
        self._rename = rename
        self._bindings = bindings
        self._feeding = feeding or {}
        self._exclude = exclude
        self._complete = complete
        self._known: dict[tuple[object, ...], _Description] = {}
        """What was read last, by the identity of the module's tensors at that time."""

    @property
    def device(self) -> torch.device:
        """Where the module's first tensor is."""
        tensors = itertools.chain(self._module.parameters(), self._module.buffers())
        return next((tensor.device for tensor in tensors), torch.device("cpu"))

    def manifest(self) -> Manifest:
        """Of the module's tensors now; as `read`."""
        return self.read().manifest

    def shards(self, names: Iterable[str]) -> Iterator[Holding]:
        """The boxes of each tensor of `names` that this rank holds, in the module's own memory: a `WeightSource`'s."""
        held = self.read().held
        for name in names:
            yield from held[name]

    def read(self) -> ModuleTensors:
        """The module's tensors now.

        Raises:
            RefitError: Two tensors get the same name, a tensor has no memory (meta device), a placement is not known,
                or a pattern fits no name.
            CoverageError: Of a sink, elements that no binding feeds and no pattern declares constant or derived.
        """
        if "torch.distributed.fsdp" in sys.modules:
            # After a forward without backward the root of FSDP2 keeps the gathered parameters: a copy, in the compute
            # dtype, and not what the optimizer updates. Have the sharded ones put back.
            from torch.distributed.fsdp import FSDPModule

            for submodule in self._module.modules():
                if isinstance(submodule, FSDPModule):
                    submodule.reshard()

        # The named tensors, and this rank's part of each: detached, in the same memory.
        tensors: dict[str, Tensor] = {}
        parts: dict[str, Tensor] = {}
        marks: list[object] = []
        for own_name, tensor in itertools.chain(
            self._module.named_parameters(remove_duplicate=False), self._module.named_buffers(remove_duplicate=False)
        ):
            name = self._rename(own_name) if self._rename else own_name
            if name in tensors:
                raise RefitError(f"two tensors are named {name!r}, one of them {own_name!r} in the module", tensor=name)
            if tensor.is_meta:
                raise RefitError(f"{name!r} is on the meta device and has no values; load weights first", tensor=name)
            tensors[name], placements = tensor, getattr(tensor, "placements", None)
            local = parts[name] = local_part(tensor)
            # Equal as long as a tensor is the same object, in the same memory, and lies on the same ranks.
            marks.append((name, id(tensor), tensor.shape, placements, local.data_ptr(), local.shape, local.stride()))
            marks.append((local.dtype, local.device))
        identity = tuple(marks)

        # What is known of these tensors from one of the latest reads, or is found out now.
        known = self._known.pop(identity, None) or self._describe(tensors, parts)
        self._known[identity] = known
        if len(self._known) > _BANKS:
            del self._known[next(iter(self._known))]
        held = {
            name: tuple(zip(regions, known.bound.get(name) or (parts[name],), strict=False))
            for name, regions in known.regions.items()
        }
        return ModuleTensors(held, known.manifest, tensors, identity)

    def _describe(self, tensors: dict[str, Tensor], parts: dict[str, Tensor]) -> _Description:
        held: dict[str, list[Holding]] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        layouts: dict[str, Layout] = {}
        rank = this_rank()
        bound = self._bind(parts, held, shapes)
        fed_by_bindings = set(held)
        for name, tensor in tensors.items():
            if name not in bound:
                layouts[name] = Layout.from_tensor(tensor)
                shapes[name] = tuple(tensor.shape)
                mine = layouts[name].regions(name, shapes[name]).get(rank, ())
                held[name] = [(region, parts[name]) for region in mine]
        # Of a bound tensor a pattern means the elements that no binding reaches, also where a bound name is the same.
        declared = self._declared([*held, *bound])
        feeding = {name: kind for name, kind in declared.items() if name not in fed_by_bindings}
        excluded = _matching(self._exclude, held)
        metas: list[TensorMeta] = []
        roots: dict[object, str] = {}
        for name in (name for name in held if name not in excluded):
            root = roots.setdefault(_memory(held[name]), name)
            metas.append(
                TensorMeta(
                    name=name,
                    shape=shapes[name],
                    dtype=_dtype(held[name], tensors.get(name)),
                    layout=layouts.get(name)
                    or Layout.from_boxes({rank: dict.fromkeys(region for region, _ in held[name])}),
                    tied_to=None if root == name else root,
                    feeding=feeding.get(root, "fed"),
                )
            )
        manifest = Manifest(tuple(metas))
        same = (known.manifest for known in self._known.values() if known.manifest == manifest)
        return _Description(
            regions={meta.name: tuple(region for region, _ in held[meta.name]) for meta in metas},
            bound={name: tuple(view for _, view in held[name]) for name in fed_by_bindings},
            manifest=next(same, manifest),  # the hash of a known one is computed already
        )

    def _bind(
        self, locals_: dict[str, Tensor], held: dict[str, list[Holding]], shapes: dict[str, tuple[int, ...]]
    ) -> set[str]:
        """Fill in what the bindings say; return the module's tensors whose storage they describe."""
        if self._bindings is None:
            return set()
        views: list[Tensor] = []
        memory = {local.untyped_storage().data_ptr() for local in locals_.values()}
        for binding in self._bindings(self._module):
            name = binding.region.name
            if binding.tensor.untyped_storage().data_ptr() not in memory:
                raise RefitError(
                    f"{binding.region} is bound to a copy, or to memory of no parameter and no buffer, whose "
                    f"replacement nobody would see; bind a view of one, or register the tensor as a buffer",
                    tensor=name,
                )
            if shapes.setdefault(name, binding.shape) != binding.shape:
                raise RefitError(f"bindings give {name!r} two shapes: {shapes[name]} and {binding.shape}", tensor=name)
            held.setdefault(name, []).append((binding.region, binding.tensor.detach()))
            views.append(binding.tensor.detach())
        storages = {view.untyped_storage().data_ptr() for view in views}
        bound = {
            name: local
            for name, local in locals_.items()
            if local.numel() and local.untyped_storage().data_ptr() in storages
        }
        for name in held.keys() & locals_.keys():
            own = locals_[name].untyped_storage().data_ptr()
            if not any(view.untyped_storage().data_ptr() == own for _, view in held[name]):
                raise RefitError(
                    f"{name!r} is a tensor of the module, and bindings give the name to others", tensor=name
                )
        if self._complete:
            self._require_covered(bound, views)
        return set(bound)

    def _require_covered(self, bound: dict[str, Tensor], views: list[Tensor]) -> None:
        declared = {_place(bound[name]) for name in self._declared([*bound], strict=False)}  # with what is tied to it
        loose = {
            name: count for name, count in uncovered_by(views, bound).items() if _place(bound[name]) not in declared
        }
        if loose:
            lines = tuple(f"{name}: {count:,} of {bound[name].numel():,} elements" for name, count in loose.items())
            raise CoverageError(
                f"{len(lines)} tensors of the engine that bindings feed in part only; bind the rest, or declare the "
                f"names constant, as padding is:" + "".join(f"\n  {line}" for line in lines),
                unfed=tuple(loose),
            )

    def _declared(self, names: Iterable[str], *, strict: bool = True) -> dict[str, Feeding]:
        names = list(names)
        return {
            name: feeding
            for feeding, patterns in self._feeding.items()
            for name in _matching(patterns, names, strict=strict)
        }


def check_writable(live: Mapping[str, tuple[Holding, ...]], *, tensors: ModuleTensors, bound: bool, swap: bool) -> None:
    """Pass if every tensor of `live` can be written without harm to another.

    Args:
        live: The memory of each tensor that travels.
        tensors: The module's, for its ties.
        bound: Whether bindings made `live`: their strided views interleave, and their elements were counted one by one.
        swap: Whether tensors will be exchanged instead of written.

    Raises:
        RefitError: One is an inference tensor, expanded, or overlaps another; or, to be exchanged, it is part of a
            larger tensor, a DTensor, or tied to another by memory alone.
    """
    extents: dict[int, list[tuple[int, int, str]]] = {}
    for name, held in live.items():
        for _, tensor in held:
            if tensor.is_inference():
                made = "was made under torch.inference_mode, which forbids to overwrite it"
                raise RefitError(f"{name!r} {made}", tensor=name)
            if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
                raise RefitError(
                    f"{name!r} is expanded: several of its elements are one; make it contiguous", tensor=name
                )
            own = tensors.objects.get(name)
            counted = bound and (own is None or own.numel() != tensor.numel())  # a binding's view, not all of a tensor
            if tensor.numel() and (tensor.is_contiguous() or not counted):
                first, itemsize = int(tensor.storage_offset()), tensor.element_size()
                last = first + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
                extent = (first * itemsize, (last + 1) * itemsize, name)
                extents.setdefault(tensor.untyped_storage().data_ptr(), []).append(extent)
    for in_storage in extents.values():
        for (_, end, name), (start, _, other) in itertools.pairwise(sorted(in_storage)):
            if start < end:
                raise RefitError(f"{name!r} and {other!r} overlap in memory without being tied", tensor=other)
    if not swap:
        return
    advice, objects = "use mode='staged'", tensors.objects
    for name, held in live.items():
        if is_dtensor(objects[name]):
            raise RefitError(f"{name!r} is a DTensor, whose memory cannot be exchanged; {advice}", tensor=name)
        if any(tensor.untyped_storage().nbytes() != tensor.nbytes for _, tensor in held):
            raise RefitError(f"{name!r} is part of a larger tensor, and cannot be exchanged; {advice}", tensor=name)
    for meta in tensors.manifest.tensors:
        if meta.tied_to is not None and objects[meta.name] is not objects[meta.tied_to]:
            raise RefitError(
                f"{meta.name!r} shares the memory of {meta.tied_to!r} and is another tensor, which would keep the old "
                f"weights; {advice}",
                tensor=meta.name,
            )


def as_patterns(patterns: Iterable[str]) -> tuple[str, ...]:
    """Patterns as a tuple; a single string is one of them, and not its letters."""
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def _matching(patterns: tuple[str, ...], names: Iterable[str], *, strict: bool = True) -> set[str]:
    names = list(names)
    found: set[str] = set()
    for pattern in patterns:
        matches = fnmatch.filter(names, pattern)
        if not matches and strict:
            raise RefitError(f"the pattern {pattern!r} fits no tensor of the module; names look like {names[:3]}")
        found.update(matches)
    return found


def _dtype(holdings: list[Holding], tensor: Tensor | None) -> str:
    dtypes = {view.dtype for _, view in holdings} or {tensor.dtype if tensor is not None else torch.float32}
    if len(dtypes) > 1:
        raise RefitError(f"{holdings[0][0].name!r} is bound to memory of several dtypes: {sorted(map(str, dtypes))}")
    return str(dtypes.pop()).removeprefix("torch.")


def _memory(holdings: list[Holding]) -> object:
    """Equal for tensors that are the same memory seen the same way; tensors without elements share nothing."""
    if not any(view.numel() for _, view in holdings):
        return object()
    return tuple((_place(view), view.dtype, view.device, region.offsets) for region, view in holdings)


def _place(view: Tensor) -> tuple[object, ...]:
    """Equal for views that are the same elements of a storage, in the same order."""
    return view.untyped_storage().data_ptr(), view.storage_offset(), view.shape, view.stride()


def uncovered_by(views: Sequence[Tensor], tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The elements of each of `tensors` that no view reaches; names without any are left out.

    Views that are the same memory seen the same way, such as ties, count as one.

    Raises:
        RefitError: Two different views reach the same element.
    """
    by_storage: dict[int, dict[object, Tensor]] = {}
    for view in views:
        place = (view.storage_offset(), view.shape, view.stride(), view.dtype)
        by_storage.setdefault(view.untyped_storage().data_ptr(), {})[place] = view
    loose: dict[str, int] = {}
    for storage, seen in by_storage.items():
        inside = {name: tensor for name, tensor in tensors.items() if tensor.untyped_storage().data_ptr() == storage}
        mask = torch.zeros(next(iter(seen.values())).untyped_storage().nbytes(), dtype=torch.uint8)
        for view in seen.values():
            reached = _bytes_of(view, mask)
            if reached.numel() and int(reached.max()) > 0:
                raise RefitError(f"two bindings reach the same elements of {', '.join(inside) or 'one storage'}")
            reached.fill_(1)
        for name, tensor in inside.items():
            missing = int((_bytes_of(tensor, mask) == 0).any(dim=-1).sum())
            if missing:
                loose[name] = missing
    return loose


def _bytes_of(view: Tensor, mask: Tensor) -> Tensor:
    """The places of a view's bytes in a mask of its storage, whatever dtypes share that: [*shape, itemsize]."""
    size = view.element_size()
    strides = [size * stride for stride in view.stride()]
    return mask.as_strided((*view.shape, size), (*strides, 1), size * int(view.storage_offset()))
