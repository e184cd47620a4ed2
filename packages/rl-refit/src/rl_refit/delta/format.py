"""How a delta is laid out in bytes: a header, a row a segment, the segments; written and checked.

Knows the sizes of what is inside, and not how it comes about. Every part begins at a multiple of 8 bytes, numbers are
little-endian.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from rl_refit.digest import as_bytes, digest_tensor
from rl_refit.errors import RefitError

__all__ = ["WORDS", "DeltaInfo", "Kind", "Segment", "aligned", "read_delta", "write_delta"]

Kind = Literal["unchanged", "sparse", "dense"]

WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element, and the dtype as which elements are compared."""

_KINDS: Final[tuple[Kind, ...]] = ("unchanged", "sparse", "dense")
_MAGIC: Final = b"rldelta1"
_HEADER: Final = struct.Struct("<8sII16s16s16s")  # magic, bytes of an element, segments, base, result, seal
_ROW: Final = struct.Struct("<BB2xIII")  # kind, bytes of a gap, elements, changed, gaps


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment of a delta."""

    kind: Kind
    numel: int
    """Elements of the segment."""

    changed: int = 0
    """Elements that differ."""

    gap_bytes: int = 0
    """Bytes of a unit of the gaps; 0 where there are none."""

    num_gaps: int = 0
    """Units of the gaps."""

    def nbytes(self, word_bytes: int) -> int:
        """Bytes that it takes, of elements of `word_bytes`."""
        num_values = {"unchanged": 0, "sparse": self.changed, "dense": self.numel}[self.kind]
        return aligned(num_values * word_bytes) + aligned(self.num_gaps * self.gap_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaInfo:
    """What a delta says of itself."""

    word_bytes: int
    """Bytes of an element; those of complex128 count as two."""

    segments: tuple[Segment, ...]

    base_digest: str
    """`digest_tensor` of the base."""

    result_digest: str
    """`digest_tensor` of what it becomes."""

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return sum(segment.numel for segment in self.segments)

    @property
    def changed(self) -> int:
        """Elements that differ."""
        return sum(segment.changed for segment in self.segments)

    def count(self, kind: Kind) -> int:
        """How many segments are written as `kind`."""
        return sum(segment.kind == kind for segment in self.segments)

    @property
    def payload_start(self) -> int:
        """Bytes before the first segment."""
        return _HEADER.size + len(self.segments) * _ROW.size

    @property
    def nbytes(self) -> int:
        """Bytes of the delta."""
        return self.payload_start + sum(segment.nbytes(self.word_bytes) for segment in self.segments)


def write_delta(info: DeltaInfo, payload: Iterable[Tensor]) -> Tensor:
    """The bytes of a delta, from its segments' tensors one after the other."""
    delta = torch.zeros(info.nbytes, dtype=torch.uint8)
    rows = ((_KINDS.index(s.kind), s.gap_bytes, s.numel, s.changed, s.num_gaps) for s in info.segments)
    table = b"".join(_ROW.pack(*row) for row in rows)
    delta[_HEADER.size : info.payload_start] = _from_bytes(table)
    start = info.payload_start
    for tensor in payload:
        delta[start : start + tensor.nbytes] = as_bytes(tensor).cpu()
        start += aligned(tensor.nbytes)
    digests = bytes.fromhex(info.base_digest), bytes.fromhex(info.result_digest)
    fields = (_MAGIC, info.word_bytes, len(info.segments), *digests)
    seal = _seal(_HEADER.pack(*fields, b""), delta)
    delta[: _HEADER.size] = _from_bytes(_HEADER.pack(*fields, seal))
    return delta


def read_delta(delta: Tensor) -> DeltaInfo:
    """What `write_delta` was given, after every byte of `delta` was checked.

    Raises:
        RefitError: It is truncated, corrupted, or no delta.
    """
    if delta.dtype != torch.uint8 or delta.dim() != 1 or delta.numel() < _HEADER.size:
        raise RefitError(
            f"a delta is a flat uint8 tensor of at least {_HEADER.size} bytes; "
            f"got {list(delta.shape)} in {delta.dtype}: it is truncated, or no delta"
        )
    header = bytes(delta[: _HEADER.size].tolist())
    magic, word_bytes, num_segments, base, result, seal = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise RefitError(f"no delta, or one of another release of rl-refit: it begins with {magic!r}, not {_MAGIC!r}")
    if _seal(header, delta) != seal:
        raise RefitError(f"a delta of {delta.numel():,} bytes was truncated or corrupted: it does not have its digest")
    table = bytes(delta[_HEADER.size : _HEADER.size + num_segments * _ROW.size].tolist())
    rows = _ROW.iter_unpack(table)
    return DeltaInfo(
        word_bytes=word_bytes,
        segments=tuple(
            Segment(_KINDS[kind], numel, changed, width, gaps) for kind, width, numel, changed, gaps in rows
        ),
        base_digest=base.hex(),
        result_digest=result.hex(),
    )


def aligned(nbytes: int) -> int:
    """The next multiple of 8."""
    return -(-nbytes // 8) * 8


def _seal(header: bytes, delta: Tensor) -> bytes:
    """16 bytes over the header without its seal, and all that follows it."""
    return hashlib.blake2b(header[:-16] + bytes.fromhex(digest_tensor(delta[_HEADER.size :])), digest_size=16).digest()


def _from_bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
