"""What a sink refuses before the first byte, because it would fail, or overwrite another tensor, in a commit."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from torch import Tensor

from rl_refit.errors import RefitError
from rl_refit.module_tensors import Holding, ModuleTensors

__all__ = ["check_writable"]


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
            _check_alone(name, tensor)
            own = tensors.objects.get(name)
            counted = bound and (own is None or own.numel() != tensor.numel())  # a binding's view, not all of a tensor
            if tensor.numel() and (tensor.is_contiguous() or not counted):
                extents.setdefault(tensor.untyped_storage().data_ptr(), []).append((*_extent(tensor), name))
    for in_storage in extents.values():
        for (_, end, name), (start, _, other) in itertools.pairwise(sorted(in_storage)):
            if start < end:
                raise RefitError(f"{name!r} and {other!r} overlap in memory without being tied", tensor=other)
    if swap:
        _check_exchangeable(live, tensors)


def _check_alone(name: str, tensor: Tensor) -> None:
    if tensor.is_inference():
        raise RefitError(f"{name!r} was made under torch.inference_mode, which forbids to overwrite it", tensor=name)
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise RefitError(f"{name!r} is expanded: several of its elements are one; make it contiguous", tensor=name)


def _check_exchangeable(live: Mapping[str, tuple[Holding, ...]], tensors: ModuleTensors) -> None:
    advice, objects = "use mode='staged'", tensors.objects
    for name, held in live.items():
        if type(objects[name]).__name__ == "DTensor":
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


def _extent(tensor: Tensor) -> tuple[int, int]:
    """First byte, and the byte behind the last one, in the storage."""
    first, itemsize = int(tensor.storage_offset()), tensor.element_size()
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * itemsize, (last + 1) * itemsize
