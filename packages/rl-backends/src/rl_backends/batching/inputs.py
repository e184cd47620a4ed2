"""What the model reads of a microbatch, and where in its hidden states the asked tokens are predicted.

Two layouts of the same rows, of b rows and their longest w:

    padded    [b, w]       one row each, right-padded: under a causal mask no token sees the padding after it
    packed    [1, sum]     rows one after the other, `cu_seq_lens` telling where each begins

Every index is computed here, on the host, from the examples alone: nothing in the forward depends on numbers, so that
it can be run on fake tensors, compiled, and entered by all ranks alike.

Under context parallelism a rank holds two of 2·cp chunks of each row, as `rl_parallel_plans.shard_sequence` cuts them,
and predicts the asked tokens that follow one of its own. Packed rows are padded to 2·cp equal chunks each, and cut one
by one; padded ones all to the longest.

Axes: b rows of a microbatch, w tokens of its longest, t tokens that the model reads at a time, n asked tokens, k words.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

__all__ = ["Layout", "ModelInputs", "SequenceShard", "SharedPlaces", "make_inputs"]

Layout = Literal["padded", "packed"]


@dataclass(frozen=True, slots=True)
class SequenceShard:
    """This rank's part of every row under context parallelism: chunks `rank` and 2 · num_ranks - 1 - `rank`."""

    rank: int
    """On the context-parallel axis."""

    num_ranks: int
    """Of that axis."""

    def padded(self, length: int) -> int:
        """Tokens of rows of `length` tokens with the padding that makes them 2 · num_ranks equal chunks."""
        return -(-length // (2 * self.num_ranks)) * 2 * self.num_ranks

    def positions(self, length: int) -> Int[Tensor, " t"]:
        """Of this rank's tokens in rows of `length` tokens before padding."""
        return self.positions_of_rows(torch.tensor([self.padded(length) // self.num_ranks]))[0]

    def positions_of_rows(self, held: Int[Tensor, " b"]) -> Int[Tensor, "b t"]:
        """The same of rows of which this rank holds `held` tokens each, padding included.

        A row of which it holds fewer than of another ends before the last column.
        """
        columns, chunk = torch.arange(int(held.max())), _half(held)[:, None]
        last = 2 * self.num_ranks - 1 - self.rank
        return torch.where(columns < chunk, columns + chunk * self.rank, columns + chunk * (last - 1))

    def columns(self, positions: Int[Tensor, " n"], held: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
        """The reverse, of one position a row: in which column it is there; -1 where another rank has it."""
        chunk = _half(held)
        number, within = positions // chunk, positions % chunk
        last = 2 * self.num_ranks - 1 - self.rank
        return torch.where(number == self.rank, within, torch.where(number == last, within + chunk, -1))


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPlaces:
    """How attention finds the rows in a pack that has the tokens which rows begin with alike once; see `prefixes`."""

    of_rows: Int[Tensor, " N"]
    """Place in the pack of each token of each row, row by row."""

    of_pack: Int[Tensor, " t"]
    """The reverse: for each place of the pack, one of the rows' tokens that is read there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInputs:
    """Tokens as the model reads them, and the tokens that it is asked about."""

    tokens: Int[Tensor, "rows_read t"]
    """Token ids."""

    position_ids: Int[Tensor, "rows_or_one t"] | None
    """Position of each token in its own row; None where it is the token's place in what is read."""

    cu_seq_lens: Int[Tensor, " rows_and_one"] | None
    """Where each packed row begins, and the end of the last (int32); None where rows are padded.

    Of whole rows with their padding, over all context-parallel ranks: Megatron's `cu_seqlens_q_padded`. A rank holds
    its share of each, which begins at its share of these. Padding that no row asks for is one more row, the last.
    """

    longest: int
    """Tokens of the longest row, over all context-parallel ranks, padding included where rows are padded."""

    at: Int[Tensor, " n"]
    """Places in the flattened hidden states `[rows_read * t]` from which the asked tokens are predicted."""

    targets: Int[Tensor, " n"]
    """Ids of the asked tokens."""

    into: Int[Tensor, " n"]
    """Places of the asked tokens in the flattened examples `[b * w]`."""

    words: Int[Tensor, "n k"] | None = None
    """Ids of words whose log-probabilities are wanted in each asked token's place, where a loss asks for them."""

    shared: SharedPlaces | None = None
    """Where `cu_seq_lens` are of rows that share what they begin with; None where each is read by itself."""

    def to(self, device: str | torch.device) -> "ModelInputs":
        """The same on `device`."""
        moved: dict[str, Any] = {
            field.name: value.to(device) if isinstance(value := getattr(self, field.name), Tensor) else value
            for field in fields(self)
        }
        if self.shared is not None:
            moved["shared"] = SharedPlaces(
                of_rows=self.shared.of_rows.to(device), of_pack=self.shared.of_pack.to(device)
            )
        return replace(self, **moved)

    def as_arguments(self) -> dict[str, Any]:
        """What a Hugging Face decoder is called with, by its own names."""
        arguments: dict[str, Any] = {"input_ids": self.tokens}
        if self.position_ids is not None:
            arguments["position_ids"] = self.position_ids
        if self.cu_seq_lens is not None:
            arguments |= {"cu_seq_lens_q": self.cu_seq_lens, "cu_seq_lens_k": self.cu_seq_lens}
            arguments |= {"max_length_q": self.longest, "max_length_k": self.longest}
        if self.shared is not None:
            arguments |= {"places_of_rows": self.shared.of_rows, "places_of_pack": self.shared.of_pack}
        return arguments


def make_inputs(
    tokens: Int[Tensor, "b w"],
    lengths: Int[Tensor, " b"],
    asked: Bool[Tensor, "b w"],
    *,
    layout: Layout,
    offset: int = 1,
    shard: SequenceShard | None = None,
    multiple: int = 1,
    pad_token_id: int = 0,
    words: Int[Tensor, "b w k"] | None = None,
) -> ModelInputs:
    """What the model reads of right-padded rows on the host.

    Args:
        tokens: token ids.
        lengths: tokens of each row that are not padding.
        asked: the tokens that something is wanted of; none beyond its row's length.
        layout: see the head of this file.
        offset: 1 to read at the hidden state before each asked token, which predicts it; 0 to read at its own, as a
            value head does.
        shard: this rank's part of the rows.
        multiple: t, of each rank, is padded to a multiple of it: sequence parallelism needs one of its ranks. Padded
            rows get more columns, packed ones another row of padding alone.
        pad_token_id: what stands for padding; it is seen by nothing that counts.
        words: ids that are asked about in each asked token's place, besides its own.
    """
    width = tokens.shape[1]
    held = _held(lengths, width, layout=layout, shard=shard, multiple=multiple)
    whole = SequenceShard(0, 1) if shard is None else shard
    rows, columns = asked.nonzero(as_tuple=True)
    place = whole.columns(columns - offset, held[rows])
    own = place >= 0
    rows, columns, place = rows[own], columns[own], place[own]

    positions = whole.positions_of_rows(held)
    ids = _ids_at(positions, tokens, lengths, pad_token_id=pad_token_id)
    ends = held.cumsum(0)
    packed = layout == "packed"
    if packed:
        read = torch.arange(positions.shape[1]) < held[:, None]
        ids, positions = ids[read][None], positions[read][None]
    return ModelInputs(
        tokens=ids,
        position_ids=positions[:1] if packed or shard is not None else None,
        cu_seq_lens=F.pad(ends * whole.num_ranks, (1, 0)).to(torch.int32) if packed else None,
        longest=int(held.max()) * whole.num_ranks,
        at=(ends - held)[rows] + place,
        targets=tokens[rows, columns],
        into=rows * width + columns,
        words=None if words is None else words[rows, columns],
    )


def _held(lengths: Tensor, width: int, *, layout: Layout, shard: SequenceShard | None, multiple: int) -> Tensor:
    """Tokens of each row that the model reads on one rank, padding included; of packed rows maybe one more, of padding.

    A shard is two equal chunks, of every row.
    """
    chunks, ranks = (1, 1) if shard is None else (2, shard.num_ranks)
    multiple = math.lcm(multiple, chunks)
    if layout == "padded":
        return torch.full_like(lengths, multiple * -(-width // (multiple * ranks)))
    held = chunks * -(-lengths // (chunks * ranks))
    missing = -int(held.sum()) % multiple
    return torch.cat([held, held.new_tensor([missing])]) if missing else held


def _ids_at(positions: Tensor, tokens: Tensor, lengths: Tensor, *, pad_token_id: int) -> Tensor:
    """Ids at `positions` [b or b + 1, t] of rows [b, w]: padding beyond a row's length, and in the row after all."""
    num_rows, width = tokens.shape
    own = positions[:num_rows]
    ids = positions.new_full(positions.shape, pad_token_id)
    ids[:num_rows] = tokens.gather(1, own.clamp(max=width - 1)).where(own < lengths[:, None], pad_token_id)
    return ids


def _half(held: Tensor) -> Tensor:
    return -(-held // 2)
