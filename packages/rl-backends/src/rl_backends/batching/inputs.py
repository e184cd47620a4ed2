"""What the model reads of a microbatch, and where in its hidden states the asked tokens are predicted.

Two layouts of the same rows, of b rows and their longest w:

    padded    [b, w]       one row each, right-padded: under a causal mask no token sees the padding after it
    packed    [1, sum]     rows one after the other without padding, `cu_seq_lens` telling where each begins

Every index is computed here, on the host, from the examples alone: nothing in the forward depends on numbers, so that
it can be run on fake tensors, compiled, and entered by all ranks alike.

Under context parallelism a rank holds two of 2·cp chunks of each row, as `rl_parallel_plans.shard_sequence` cuts them,
and predicts the asked tokens that follow one of its own.

Axes: b rows of a microbatch, w tokens of its longest, t tokens that the model reads at a time, n asked tokens.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

__all__ = ["Layout", "ModelInputs", "SequenceShard", "make_inputs"]

Layout = Literal["padded", "packed"]


@dataclass(frozen=True, slots=True)
class SequenceShard:
    """This rank's part of every row under context parallelism."""

    rank: int
    """On the context-parallel axis."""

    num_ranks: int
    """Of that axis."""

    def padded(self, length: int) -> int:
        """Tokens of rows of `length` tokens with the padding that makes them 2 · num_ranks equal chunks."""
        return -(-length // (2 * self.num_ranks)) * 2 * self.num_ranks

    def positions(self, length: int) -> Int[Tensor, " t"]:
        """Of this rank's tokens in rows of `length` tokens before padding."""
        chunk = self.padded(length) // (2 * self.num_ranks)
        within = torch.arange(chunk)
        return torch.cat([within + chunk * self.rank, within + chunk * (2 * self.num_ranks - 1 - self.rank)])


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInputs:
    """Tokens as the model reads them, and the tokens that it is asked about."""

    tokens: Int[Tensor, "rows_read t"]
    """Token ids."""

    position_ids: Int[Tensor, "rows_or_one t"] | None
    """Position of each token in its own row; None where it is the token's place in what is read."""

    cu_seq_lens: Int[Tensor, " rows_and_one"] | None
    """Where each packed row begins, and the end of the last (int32); None where rows are padded."""

    longest: int
    """Tokens of the longest row."""

    at: Int[Tensor, " n"]
    """Places in the flattened hidden states `[rows_read * t]` from which the asked tokens are predicted."""

    targets: Int[Tensor, " n"]
    """Ids of the asked tokens."""

    into: Int[Tensor, " n"]
    """Places of the asked tokens in the flattened examples `[b * w]`."""

    def to(self, device: str | torch.device) -> "ModelInputs":
        """The same on `device`."""
        moved: dict[str, Any] = {
            field.name: value.to(device) if isinstance(value := getattr(self, field.name), Tensor) else value
            for field in fields(self)
        }
        return replace(self, **moved)

    def as_arguments(self) -> dict[str, Any]:
        """What a Hugging Face decoder is called with, by its own names."""
        arguments: dict[str, Any] = {"input_ids": self.tokens}
        if self.position_ids is not None:
            arguments["position_ids"] = self.position_ids
        if self.cu_seq_lens is not None:
            arguments |= {"cu_seq_lens_q": self.cu_seq_lens, "cu_seq_lens_k": self.cu_seq_lens}
            arguments |= {"max_length_q": self.longest, "max_length_k": self.longest}
        return arguments


def make_inputs(
    tokens: Int[Tensor, "b w"],
    lengths: Int[Tensor, " b"],
    asked: Bool[Tensor, "b w"],
    *,
    layout: Layout,
    offset: int = 1,
    shard: SequenceShard | None = None,
    pad_token_id: int = 0,
) -> ModelInputs:
    """What the model reads of right-padded rows on the host.

    Args:
        tokens: token ids.
        lengths: tokens of each row that are not padding.
        asked: the tokens that something is wanted of; none beyond its row's length.
        layout: see the head of this file.
        offset: 1 to read at the hidden state before each asked token, which predicts it; 0 to read at its own, as a
            value head does.
        shard: this rank's part of the rows; with the padded layout only.
        pad_token_id: what stands for padding; it is seen by nothing that counts.

    Raises:
        ValueError: packed rows that shall be cut over ranks too.
    """
    if layout == "packed":
        if shard is not None:
            raise ValueError("packed rows cannot be cut over context-parallel ranks: choose one of the two")
        return _packed(tokens, lengths, asked, offset=offset)
    return _padded(tokens, lengths, asked, offset=offset, shard=shard, pad_token_id=pad_token_id)


def _padded(
    tokens: Tensor, lengths: Tensor, asked: Tensor, *, offset: int, shard: SequenceShard | None, pad_token_id: int
) -> ModelInputs:
    width = tokens.shape[1]
    positions = torch.arange(width) if shard is None else shard.positions(width)
    full = torch.arange(width if shard is None else shard.padded(width))
    real = torch.zeros(len(tokens), len(full), dtype=torch.bool)
    real[:, :width] = full[:width] < lengths[:, None]
    padded = torch.full(real.shape, pad_token_id, dtype=tokens.dtype)
    padded[:, :width] = tokens
    padded = padded.where(real, pad_token_id)[:, positions]
    rows, columns = asked.nonzero(as_tuple=True)
    where = torch.full((len(full),), -1)
    where[positions] = torch.arange(len(positions))
    place = where[columns - offset]
    own = place >= 0
    rows, columns, place = rows[own], columns[own], place[own]
    return ModelInputs(
        tokens=padded,
        position_ids=None if shard is None else positions[None],
        cu_seq_lens=None,
        longest=len(full),
        at=rows * len(positions) + place,
        targets=tokens[rows, columns],
        into=rows * width + columns,
    )


def _packed(tokens: Tensor, lengths: Tensor, asked: Tensor, *, offset: int) -> ModelInputs:
    width = tokens.shape[1]
    real = torch.arange(width) < lengths[:, None]
    ends = lengths.cumsum(0)
    starts = ends - lengths
    rows, columns = asked.nonzero(as_tuple=True)
    return ModelInputs(
        tokens=tokens[real][None],
        position_ids=torch.arange(width).expand(tokens.shape)[real][None],
        cu_seq_lens=torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(torch.int32),
        longest=int(lengths.max()),
        at=starts[rows] + columns - offset,
        targets=tokens[rows, columns],
        into=rows * width + columns,
    )
