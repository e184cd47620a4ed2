"""The changed elements of a tensor against a base: lossless, checked on both ends, its own way back.

Elements are compared as words of their own size, so that -0.0 is not 0.0 and a NaN is itself. A tensor is cut into
segments of 4 MiB, each of which is written in the way that takes the fewest bytes:

    unchanged   nothing
    sparse      base XOR new of each changed element, and where they are: see `rl_refit.delta.gaps`
    dense       base XOR new of all elements

A delta is one flat uint8 tensor: a header (sizes, digest of the base, digest of the result, digest of all that
follows), a row for each segment, and the segments.

Why XOR, and not the new values: the same delta leads from the base to the result and back, so that an aborted refit is
undone without a copy of what was overwritten. Its price is that it must be applied once; the digest of the base sees to
that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_refit.delta.format import WORDS, DeltaInfo, Segment, aligned, read_delta, write_delta
from rl_refit.delta.gaps import WIDTHS, pack_gaps, unpack_gaps
from rl_refit.digest import digest_tensor
from rl_refit.errors import DigestError, RefitError

__all__ = ["apply", "encode", "inspect", "revert"]

_SEGMENT_BYTES = 4 * 2**20
_BLOCK_BYTES = 2**20  # compared and searched in a core's cache
_SPARSE_SHARE = 1 / 32  # of changed elements, up to which it pays to search eight bytes at a time first
_SAMPLE = 4096  # elements that are counted to guess that share


def encode(base: Tensor, new: Tensor, *, base_digest: str | None = None) -> Tensor:
    """What leads from `base` to `new`: a delta, flat uint8 on the CPU, of a multiple of 8 bytes.

    Any dtype, any shape, any strides. Takes some MiB of memory beside twice the delta.

    Args:
        base: What the other side has.
        new: What it is to have.
        base_digest: `digest_tensor(base)`, if the caller knows it.

    Raises:
        ValueError: The two differ in shape, dtype or device.
    """
    if (base.shape, base.dtype, base.device) != (new.shape, new.dtype, new.device):
        raise ValueError(
            f"a delta leads from a tensor to another one of its kind; got {list(base.shape)} in {base.dtype} on "
            f"{base.device} and {list(new.shape)} in {new.dtype} on {new.device}"
        )
    old, fresh = _words(base.contiguous()), _words(new.contiguous())
    segments, payload = [], []
    for part in _segments(old):
        segment, tensors = _encode_segment(old[part], fresh[part])
        segments.append(segment)
        payload += tensors
    info = DeltaInfo(
        word_bytes=old.element_size(),
        segments=tuple(segments),
        base_digest=base_digest or digest_tensor(base),
        result_digest=digest_tensor(new),
    )
    return write_delta(info, payload)


def apply(base: Tensor, delta: Tensor) -> DeltaInfo:
    """Turn `base`, in place, into the tensor that `delta` was made for.

    Nothing is written before base and delta are checked; the result is checked too.

    Raises:
        DigestError: `base` is not the base of `delta`, and is left alone; or the result is not what was encoded, and
            `base` is as it was.
        RefitError: `delta` is truncated, corrupted, or no delta; `base` is left alone.
        ValueError: `base` is not contiguous.
    """
    info = read_delta(delta)
    _step(base, delta, info, before=info.base_digest, after=info.result_digest)
    return info


def revert(result: Tensor, delta: Tensor) -> DeltaInfo:
    """Turn `result`, in place, back into the base of `delta`. Raises what `apply` does."""
    info = read_delta(delta)
    _step(result, delta, info, before=info.result_digest, after=info.base_digest)
    return info


def inspect(delta: Tensor) -> DeltaInfo:
    """What `delta`, flat uint8, says of itself, after every byte of it was checked.

    Raises:
        RefitError: It is truncated, corrupted, or no delta.
    """
    return read_delta(delta)


def _encode_segment(old: Tensor, new: Tensor) -> tuple[Segment, list[Tensor]]:
    found = [] if torch.equal(old, new) else _find_changes(old, new)
    if found == []:
        return Segment("unchanged", old.numel()), []
    if found is not None:
        positions, values = map(torch.cat, zip(*found, strict=True))
        width, units = pack_gaps(positions.diff(prepend=positions.new_tensor([-1])) - 1)
        segment = Segment("sparse", old.numel(), values.numel(), width, units.numel())
        if segment.nbytes(old.element_size()) < aligned(old.nbytes):
            return segment, [values, units]
    difference = old ^ new
    return Segment("dense", old.numel(), int(difference.count_nonzero())), [difference]


def _find_changes(old: Tensor, new: Tensor) -> list[tuple[Tensor, Tensor]] | None:
    """Positions, int64, and XOR of the changed words, block by block; None once they take more bytes than all words."""
    length, limit = _BLOCK_BYTES // old.element_size(), old.nbytes // (old.element_size() + 1)
    found = []
    for start in range(0, old.numel(), length):
        block = old[start : start + length] ^ new[start : start + length]
        positions = _nonzero(block)
        found.append((positions + start, block[positions]))
        limit -= positions.numel()
        if limit < 0:
            return None
    return found


def _nonzero(block: Tensor) -> Tensor:
    """What `block.nonzero()` finds; where little is, by a look at eight bytes at once and then into those not zero."""
    sample = block[:_SAMPLE]
    if block.nbytes % 8 or int(sample.count_nonzero()) > _SPARSE_SHARE * sample.numel():
        return block.nonzero().view(-1)
    per_word = 8 // block.element_size()
    words = block.view(torch.int64).nonzero().view(-1)
    inside = block.view(-1, per_word)[words].view(-1).nonzero().view(-1)
    return words[inside // per_word] * per_word + inside % per_word


def _step(tensor: Tensor, delta: Tensor, info: DeltaInfo, *, before: str, after: str) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"a delta is applied in place to a contiguous tensor; got strides {tensor.stride()}")
    words = _words(tensor)
    if (words.numel(), words.element_size()) != (info.numel, info.word_bytes):
        raise RefitError(
            f"a delta of {info.numel:,} elements of {info.word_bytes} bytes does not fit {list(tensor.shape)} in "
            f"{tensor.dtype}"
        )
    present = digest_tensor(tensor)
    if present != before:
        raise DigestError(f"this is not the base of the delta: its digest is {present}, and the delta needs {before}")
    _exchange(words, delta, info)
    reached = digest_tensor(tensor)
    if reached != after:
        _exchange(words, delta, info)
        raise DigestError(f"the delta leads to {reached}, and was made to lead to {after}")


def _exchange(words: Tensor, delta: Tensor, info: DeltaInfo) -> None:
    """XOR every segment into its place: its own inverse."""
    delta = delta if delta.storage_offset() % 8 == 0 else delta.clone()
    start = info.payload_start
    for part, segment in zip(_segments(words), info.segments, strict=True):
        end = start + segment.nbytes(info.word_bytes)
        if segment.changed:
            _exchange_segment(words[part], delta[start:end].to(words.device), segment)
        start = end


def _exchange_segment(words: Tensor, payload: Tensor, segment: Segment) -> None:
    if segment.kind == "dense":
        words ^= payload[: words.nbytes].view(words.dtype)
        return
    end = segment.changed * words.element_size()
    values = payload[:end].view(words.dtype)
    units = payload[aligned(end) :][: segment.num_gaps * segment.gap_bytes].view(WIDTHS[segment.gap_bytes])
    positions = unpack_gaps(units, segment.gap_bytes)
    words.scatter_(0, positions, words.gather(0, positions) ^ values)


def _segments(words: Tensor) -> list[slice]:
    length = _SEGMENT_BYTES // words.element_size()
    return [slice(start, start + length) for start in range(0, words.numel(), length)]


def _words(tensor: Tensor) -> Tensor:
    """The elements, flat, as integers of their size; in the same memory if `tensor` is contiguous."""
    flat = tensor.detach().view(-1)
    return flat.view(WORDS[min(flat.element_size(), 8)])
