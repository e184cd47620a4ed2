"""What this rank holds of each tensor of a checkpoint, in the coordinates of the unsharded model.

The tensors of a checkpoint are named

    weights/<name>                              a parameter or persistent buffer
    optimizer/<name>/<key>                      the optimizer's state of that parameter
    optimizer/<name>/<key>/rank-<r>/<inner>     state that cannot be resharded, as that rank holds it
    rng/rank-<r>/<device>                       the state of a random-number generator
"""

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_backends.errors import CheckpointError
from rl_backends.loading.weights import Shard
from rl_backends.rank_agreement import gather_text
from rl_parallel_plans import Box, NamedShard, local_boxes, named_shards, stage_info

WEIGHTS = "weights/"
"""How names of weights begin."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FlatBox:
    """A contiguous part of an unsharded tensor that starts somewhere in this rank's flat memory."""

    offsets: tuple[int, ...]
    """Of its first element in the unsharded tensor."""
    sizes: tuple[int, ...]
    start: int
    """Index of its first element in the flat memory."""

    def of_local(self, local: Tensor) -> Tensor:
        """A view of the box in contiguous memory of any shape."""
        return local.view(-1)[self.start : self.start + math.prod(self.sizes)].view(self.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShard:
    """This rank's part of one tensor of a checkpoint: the source of a save, or the destination of a load."""

    local: Tensor
    shape: tuple[int, ...]
    """Of the unsharded tensor."""
    boxes: tuple[Box | FlatBox, ...]
    """Which parts of the unsharded tensor `local` holds, and where."""
    saved_as: str = ""
    """Name of the tensor in the checkpoint; several shards of a rank may share one, as Megatron's experts do."""
    takes: frozenset[torch.dtype] = frozenset()
    """Other dtypes that may be read into `local`, which are cast to its dtype."""

    @property
    def weight(self) -> str:
        """Name in the model, of a weight."""
        return self.saved_as.removeprefix(WEIGHTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShard:
    """This rank's part of a parameter or buffer, and its boxes, computed once."""

    shard: NamedShard
    boxes: tuple[Box, ...]

    def of(self, tensor: Tensor) -> TensorShard:
        """The shard of the parameter, or of another tensor that is sharded like it, such as a moment."""
        tensor = tensor.detach()
        alike = getattr(tensor, "placements", None) == getattr(self.shard.tensor, "placements", None)
        boxes = self.boxes if alike else tuple(self.shard.boxes(tensor))
        return TensorShard(local=self.shard.local_of(tensor), shape=self.shard.shape, boxes=boxes)


def model_shards(model: nn.Module) -> dict[str, ModelShard]:
    """This rank's part of every parameter and persistent buffer, by name.

    A pipeline stage may hold a copy of a tied weight that an earlier one has under another name, which counts.
    """
    info = stage_info(model)
    first = {} if info is None else {name: holders[0][1] for name, holders in info.tied.items()}
    return {
        first.get(each.name, each.name): ModelShard(shard=each, boxes=tuple(each.boxes()))
        for each in named_shards(model)
    }


def whole_tensor(tensor: Tensor, saved_as: str) -> TensorShard:
    """A tensor that is not sharded."""
    boxes = tuple(local_boxes(tensor))
    return TensorShard(local=tensor.detach(), shape=tuple(tensor.shape), boxes=boxes, saved_as=saved_as)


def this_rank() -> int:
    """0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks() -> int:
    """1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def dtype_name(dtype: torch.dtype) -> str:
    """`float32`, without `torch.`."""
    return str(dtype).removeprefix("torch.")


# ---- Random-number generators.


def rng_shards(device: str) -> list[TensorShard]:
    """Copies of the state of this rank's generators: torch's own, and the device's."""
    states = {"cpu": torch.get_rng_state()}
    if device != "cpu":
        states[device] = torch.get_device_module(device).get_rng_state()
    return [whole_tensor(state, f"rng/rank-{this_rank()}/{name}") for name, state in states.items()]


def has_rng(saved: Collection[str], device: str) -> bool:
    """Whether `saved` names a generator for each rank and kind of device of this run, and no others."""
    wanted = {f"rng/rank-{rank}/{kind}" for rank in range(num_ranks()) for kind in ("cpu", device)}
    return wanted == {name for name in saved if name.startswith("rng/")}


def set_rng(shards: Iterable[TensorShard]) -> None:
    """Restore what `rng_shards` returned."""
    for shard in shards:
        device = shard.saved_as.rpartition("/")[2]
        set_state = torch.set_rng_state if device == "cpu" else torch.get_device_module(device).set_rng_state
        set_state(shard.local)


# ---- Ranges of flattened tensors, which distributed optimizers keep.


def flat_boxes(boxes: Iterable[Box], shape: Sequence[int], *, start: int, end: int) -> list[FlatBox]:
    """The parts of `boxes` that the range [start, end) of this rank's flattened tensor holds.

    A range of a matrix is at most a part of a row, whole rows and a part of a row: three boxes, which count from
    `start`. Each of `boxes` is contiguous in the memory of the tensor of this `shape`.
    """
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    found: list[FlatBox] = []
    for box in boxes:
        sharded = [dim for dim, size in enumerate(box.sizes) if size != 1]
        assert not sharded or box.sizes[sharded[0] + 1 :] == tuple(shape[sharded[0] + 1 :]), (box, shape)
        first = sum(offset * stride for offset, stride in zip(box.local_offsets, strides, strict=True))
        low, high = max(start - first, 0), min(end - first, math.prod(box.sizes))
        for at, inner, sizes in _rectangles(box.sizes, low, high):
            offsets = tuple(outer + offset for outer, offset in zip(box.offsets, inner, strict=True))
            found.append(FlatBox(offsets=offsets, sizes=sizes, start=first + at - start))
    return found


def _rectangles(sizes: tuple[int, ...], low: int, high: int) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Split [low, high) of a flattened tensor of shape `sizes` into (flat start, offsets, sizes) of rectangles."""
    if low >= high:
        return
    if not sizes:
        yield 0, (), ()
        return
    row = math.prod(sizes[1:])
    first, last = -(-low // row), high // row  # whole rows
    if first < last:
        yield first * row, (first, *(0 for _ in sizes[1:])), (last - first, *sizes[1:])
    # Partial rows before and after them; one and the same where the range begins and ends within a row.
    partial = {last: (low, high)} if first > last else {first - 1: (low, first * row), last: (last * row, high)}
    for index, (start, stop) in partial.items():
        for at, offsets, inner in _rectangles(sizes[1:], start - index * row, stop - index * row):
            yield index * row + at, (index, *offsets), (1, *inner)


# ---- Checkpoints of adapters leave the frozen weights out, and remember what they were by a digest of each.
#
# The digest of a tensor is a sum over its elements, modulo 2^64, of the element's bits times a hash of its place in the
# unsharded tensor. Sums add up over shards, so it is the same on every mesh, and no shard moves; like any checksum it
# finds accidents (other weights, another order of them), and is no defence against somebody who wants to deceive.

MULTIPLIER, ADDEND = 0x1E3779B97F4A7C15, 0x2545F4914F6CDD1D
"""Odd numbers of many bits; torch's int64 wraps, as this needs."""

CHUNK = 1 << 22
"""Elements at a time: hashing takes 8 bytes for each, a few times."""


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
    if part.numel() > CHUNK:
        dim = max(range(part.ndim), key=part.shape.__getitem__)
        first, second = part.tensor_split(2, dim)
        later = (*offsets[:dim], offsets[dim] + first.shape[dim], *offsets[dim + 1 :])
        return (_digest(first, offsets, shape) + _digest(second, later, shape)) % 2**64
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[part.element_size()]
    values = part.contiguous().view(bits).to(torch.int64)
    places = torch.zeros((), dtype=torch.int64, device=part.device)  # of each element in the flattened whole
    for dim, (offset, size) in enumerate(zip(offsets, part.shape, strict=True)):
        places = places[..., None] + torch.arange(offset, offset + size, device=part.device) * math.prod(
            shape[dim + 1 :]
        )
    hashed = places * MULTIPLIER + ADDEND
    hashed = (hashed ^ (hashed >> 29)) * MULTIPLIER
    hashed = (hashed ^ (hashed >> 32)) | 1
    return int(((values + 1) * hashed).sum()) % 2**64
