"""Checkpoints of adapters leave the frozen weights out, and remember what they were by a digest of each.

The digest of a tensor is a sum over its elements, modulo 2^64, of the element's bits times a hash of its place in the
unsharded tensor. Sums add up over shards, so it is the same on every mesh, and no shard moves; like any checksum it
finds accidents (other weights, another order of them), and is no defence against somebody who wants to deceive.
"""

import json
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_backends.errors import CheckpointError
from rl_backends.loading.weights import Shard
from rl_backends.rank_agreement import gather_text
from rl_parallel_plans import named_shards

MULTIPLIER, ADDEND = 0x1E3779B97F4A7C15, 0x2545F4914F6CDD1D
"""Odd numbers of many bits; torch's int64 wraps, as this needs."""

CHUNK = 1 << 22
"""Elements at a time: hashing takes 8 bytes for each, a few times."""


def frozen_digests(model: nn.Module, *, group: dist.ProcessGroup | None) -> dict[str, int]:
    """The digest of every parameter of `model` that does not train, by name; every rank must call it."""
    return tensor_digests(
        (
            each
            for each in named_shards(model)
            if isinstance(each.tensor, nn.Parameter) and not each.tensor.requires_grad
        ),
        group=group,
    )


def check_frozen_weights(
    source: object, saved: Mapping[str, int], shards: Iterable[Shard], *, group: dist.ProcessGroup | None
) -> None:
    """Refuse a checkpoint of adapters that were trained on other frozen weights; every rank must call it.

    saved: the digests in the checkpoint.
    shards: what this rank holds of the model, among them of each tensor that has a digest.
    """
    here = tensor_digests((each for each in shards if each.name in saved), group=group)
    apart = [name for name, digest in saved.items() if here.get(name) != digest]
    if apart:
        raise CheckpointError(
            f"{source} holds adapters, and {len(apart)} of the {len(saved)} frozen weights that they were trained on "
            f"are not those of this model, {apart[0]} first: load the model that training began with"
        )


@torch.no_grad()
def tensor_digests(shards: Iterable[Shard], *, group: dist.ProcessGroup | None) -> dict[str, int]:
    """The digest of each tensor that the ranks together hold, by name; every rank must call it."""
    own: dict[str, list[list[int]]] = {}
    for each in shards:  # of Megatron several may have one name: the experts of a stack
        own.setdefault(each.name, []).extend(
            [*box.offsets, *box.sizes, _digest(box.of_local(each.local), box.offsets, each.shape)]
            for box in each.boxes()
        )
    sums: dict[str, int] = {}
    boxes: set[tuple[str, tuple[int, ...]]] = set()
    for text in gather_text(json.dumps(own), group=group):
        for name, parts in json.loads(text).items():
            sums.setdefault(name, 0)
            for *box, digest in parts:
                if (name, tuple(box)) not in boxes:  # ranks that hold copies tell the same
                    boxes.add((name, tuple(box)))
                    sums[name] = (sums[name] + digest) % 2**64
    return sums


def _digest(part: Tensor, offsets: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """The sum over a box, whose first element is at `offsets` of a tensor of this `shape`."""
    dims: list[
        tuple[int, int, int]
    ] = []  # (offset, size, size of the tensor); a dim that is here in full joins the last
    for offset, size, whole in zip(offsets, part.shape, shape, strict=True):
        before = dims.pop() if dims and size == whole else None
        dims.append(
            (offset, size, whole) if before is None else (before[0] * whole, before[1] * whole, before[2] * whole)
        )
    flat = part.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[part.element_size()])
    flat, total = flat.flatten(), 0
    for start in range(0, flat.numel(), CHUNK):
        values = flat[start : start + CHUNK].to(torch.int64)
        left = torch.arange(start, start + values.numel(), device=part.device)
        places, stride = torch.zeros_like(left), 1
        for dim, (offset, size, whole) in reversed(list(enumerate(dims))):
            places += ((left % size if dim else left) + offset) * stride
            left, stride = left // size if dim else left, stride * whole
        hashed = places * MULTIPLIER + ADDEND
        hashed = (hashed ^ (hashed >> 29)) * MULTIPLIER
        hashed = (hashed ^ (hashed >> 32)) | 1
        total += int(((values + 1) * hashed).sum())
    return total % 2**64
