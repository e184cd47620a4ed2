"""Digests of tensors and the sampled verification of a refit.

The bytes are read as 8-byte words, 256 to a row and 512 rows to a block; x[r, c] is a word of a block. Modulo 2**64,
with fixed odd pseudo-random weights w,

    row[r] = sum_c w[c] * x[r, c]            column[c] = sum_r x[r, c]

and BLAKE2b runs over the number of bytes, the sums of every block, and the bytes behind the last whole row. So the slow
hash reads less than a hundredth of the data.

What it catches, always: any change within one or two words, such as flipped bits, overwritten elements, or two elements
that changed places. For in different rows each changes its row's sum by an odd multiple of a difference that is not
zero, and in one row they change two columns. More than two words: missed with a chance of about 2**(t - 64) if all
differences are multiples of 2**t, which for rows in wrong order, zeroed or shifted stretches means never. Who wants two
tensors of the same digest will construct them easily.

The weights are the outputs of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014), made odd.

A `Sample` is a share of the chunks of all boxes, which both sides compute alike. A chunk is at most a MiB; the phase
says which comes first, so that `stride` refits in a row see every byte.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, final

import torch
from torch import Tensor

from rl_refit.buckets import split
from rl_refit.config import Verify
from rl_refit.errors import DigestError
from rl_refit.layout import Region

__all__ = [
    "CHUNK_BYTES",
    "ROW_WORDS",
    "Boxes",
    "Digest",
    "Sample",
    "as_bytes",
    "choose_sample",
    "combine_digests",
    "digest_regions",
    "digest_tensor",
    "digest_tensors",
    "digest_views",
]

ROW_WORDS = 256
"""8-byte words of a row."""

_BLOCK_BYTES = 512 * ROW_WORDS * 8  # 1 MiB: read twice, the second time from a core's cache
_READ_BACK_BYTES = 16 * 2**20  # sums of 2.7 GB


@dataclass(frozen=True)
class Digest:
    """The digests of a set of tensors."""

    tensors: Mapping[str, str]
    """Tensor name → 32 hex digits."""

    @property
    def hex(self) -> str:
        """One value for the whole set, in 64 hex digits; the order of the tensors does not matter."""
        lines = "\n".join(f"{name} {value}" for name, value in sorted(self.tensors.items()))
        return hashlib.sha256(lines.encode()).hexdigest()

    def differing(self, other: Digest) -> tuple[str, ...]:
        """The tensors of either whose digests differ or are missing on one side, in order."""
        names = dict.fromkeys((*self.tensors, *other.tensors))
        return tuple(name for name in names if self.tensors.get(name) != other.tensors.get(name))


def digest_regions(regions: Iterable[Region], read: Callable[[Region], Tensor | None]) -> Digest:
    """One digest a tensor name, over the boxes of `regions` that bear it, in their order.

    Args:
        regions: The boxes; those of one name need not follow one another.
        read: From a box to a tensor that holds just it; None leaves the whole tensor out, as one that cannot be read.
    """
    regions = tuple(regions)
    views = ((region, read(region)) for region in dict.fromkeys(regions))
    return digest_views(regions, ((region, view) for region, view in views if view is not None))


def digest_views(regions: Iterable[Region], views: Iterable[tuple[Region, Tensor]]) -> Digest:
    """What `digest_regions` makes of `regions`, whose tensors come in any order; each may change when the next comes.

    Raises:
        DigestError: A box comes several times, and not as the same.
    """
    regions, came = tuple(regions), list[Region]()
    digests: dict[Region, str | None] = dict.fromkeys(regions)

    def tensors() -> Iterator[Tensor]:
        for region, view in views:
            came.append(region)
            yield view

    for number, value in enumerate(digest_tensors(tensors())):
        region = came[number]
        if digests[region] not in (None, value):
            raise DigestError(f"{region} lies in several places, which differ", tensors=(region.name,))
        digests[region] = value
    return combine_digests(regions, digests)


def combine_digests(regions: Iterable[Region], digests: Mapping[Region, str | None]) -> Digest:
    """One digest a tensor name, from the digests of its boxes, in the order of `regions`; None leaves the name out."""
    totals: dict[str, Any] = {}
    unreadable: set[str] = set()
    for region in regions:
        value = digests[region]
        if value is None:
            unreadable.add(region.name)
        else:
            total = totals.setdefault(region.name, hashlib.blake2b(digest_size=16))
            total.update(f"{region.offsets} {region.shape} {value}".encode())
    return Digest({name: total.hexdigest() for name, total in totals.items() if name not in unreadable})


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, flat uint8, in the memory of that tensor."""
    # Not `view(-1)`: a tensor of one element is contiguous with any stride, keeps it, and then has no view as bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def digest_tensor(tensor: Tensor) -> str:
    """32 hex digits that depend on every byte of `tensor` and on its place, in row-major order.

    Any dtype, any shape, any strides; shape and dtype themselves do not enter. Takes some KiB of memory for a
    contiguous tensor, and a copy of any other. The sums are done on the tensor's device.
    """
    return next(digest_tensors([tensor]))


def digest_tensors(tensors: Iterable[Tensor]) -> Iterator[str]:
    """`digest_tensor` of each, in order. A tensor may change as soon as the next one is asked for.

    What a device has summed is read back for many tensors at once, since each reading waits for the device.
    """
    summed: list[tuple[int, Tensor]] = []  # bytes of a tensor, and its sums, uint8 on its device
    nbytes = 0
    for tensor in tensors:
        sums = _sums(as_bytes(tensor.detach().contiguous()))
        if summed and (nbytes + sums.numel() > _READ_BACK_BYTES or summed[0][1].device != sums.device):
            yield from _read_back(summed)
            summed, nbytes = [], 0
        summed.append((tensor.nbytes, sums))
        nbytes += sums.numel()
    yield from _read_back(summed)


def _read_back(summed: list[tuple[int, Tensor]]) -> Iterator[str]:
    if not summed:
        return
    read = torch.cat([sums for _, sums in summed]).cpu()
    start = read.data_ptr()
    for nbytes, sums in summed:
        total = hashlib.blake2b(nbytes.to_bytes(8, "little"), digest_size=16)
        total.update(ctypes.string_at(start, sums.numel()))  # without NumPy torch has no shorter way to bytes
        start += sums.numel()
        yield total.hexdigest()


def _sums(data: Tensor) -> Tensor:
    """The sums of every block of `data`, uint8, and the bytes behind its last whole row; uint8, on the same device."""
    whole = data.numel() // (8 * ROW_WORDS) * (8 * ROW_WORDS)
    weights = _weights(data.device)
    sums: list[Tensor] = []
    for start in range(0, whole, _BLOCK_BYTES):
        block = data[start : min(start + _BLOCK_BYTES, whole)]
        if data.storage_offset() % 8:  # int64 views start on a multiple of 8 bytes
            block = block.clone()
        words = block.view(torch.int64).view(-1, ROW_WORDS)
        if data.device.type == "cpu":
            row_sums = torch.mv(words, weights)  # one pass, no temporary
        else:
            row_sums = (words * weights).sum(dim=1)  # other devices have no product of integer matrices
        sums += (row_sums.view(torch.uint8), words.sum(dim=0).view(torch.uint8))
    return torch.cat([*sums, data[whole:]])


@lru_cache(maxsize=8)
def _weights(device: torch.device) -> Tensor:
    """The odd weights of a row, int64 [ROW_WORDS], made once a device."""
    modulus = 2**64
    weights = []
    for k in range(1, ROW_WORDS + 1):
        z = k * 0x9E3779B97F4A7C15 % modulus
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % modulus
        z = (z ^ z >> 27) * 0x94D049BB133111EB % modulus
        z = (z ^ z >> 31) | 1
        weights.append(z - modulus if z >= modulus // 2 else z)
    return torch.tensor(weights, device=device)


CHUNK_BYTES = 2**20


@final
class Boxes:
    """The boxes that travel one way, none of them empty, and their chunks, cut once.

    Args:
        boxes: Each with the bytes of one of its elements.
    """

    def __init__(self, boxes: Iterable[tuple[Region, int]] = ()) -> None:
        self._boxes = [(box, itemsize) for box, itemsize in boxes if box.numel]

    @cached_property
    def whole(self) -> tuple[Region, ...]:
        """The boxes as they are."""
        return tuple(box for box, _ in self._boxes)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all boxes."""
        return sum(box.numel * itemsize for box, itemsize in self._boxes)

    def nbytes_of(self, sample: Sample) -> int:
        """Bytes of what `sample` takes of the boxes."""
        if sample.stride == 1:
            return self.nbytes
        itemsizes = {box.name: itemsize for box, itemsize in self._boxes}
        return sum(region.numel * itemsizes[region.name] for region in sample.of(self))

    @cached_property
    def chunks(self) -> tuple[Region, ...]:
        """The boxes cut into chunks, in order."""
        return tuple(
            chunk for box, itemsize in self._boxes for chunk in split(box, max_elements=CHUNK_BYTES // itemsize)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Every `stride`-th chunk, beginning with number `phase` modulo `stride`; 1 is every byte, 0 is nothing."""

    stride: int = 1
    phase: int = 0

    def __post_init__(self) -> None:
        if self.stride < 0 or self.phase < 0:
            raise ValueError(f"a sample needs a stride and a phase ≥ 0; got stride={self.stride}, phase={self.phase}")

    def of(self, boxes: Boxes) -> tuple[Region, ...]:
        """The chunks of `boxes` to digest; the boxes themselves where that is every byte."""
        if self.stride == 0:
            return ()
        return boxes.whole if self.stride == 1 else boxes.chunks[self.phase % self.stride :: self.stride]


SAMPLE_STRIDE = 16
SMALL_BYTES = 64 * 2**20
"""What takes a few milliseconds to digest is never sampled."""


def choose_sample(verify: Verify, *, refit: int, largest_bytes: int) -> Sample:
    """The sample of refit number `refit`, counted from 1, of which a rank moves `largest_bytes` at most."""
    if verify == "off":
        return Sample(stride=0)
    if verify == "full" or refit == 1 or largest_bytes <= SMALL_BYTES:
        return Sample()
    return Sample(stride=SAMPLE_STRIDE, phase=refit)
