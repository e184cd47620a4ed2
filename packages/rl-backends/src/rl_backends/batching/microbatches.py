"""Cut the examples of a step over ranks and microbatches, and make the model inputs of each.

    padded    units of like length, so that little padding is computed: neighbours in the order of lengths
    packed    any units, filled up to the bound on tokens: best fit, longest first

First as few microbatches as the bounds allow, then, of as many as all ranks must have, alike ones: the largest decides
the memory that a step takes.

Two layouts of the same rows, of b rows and their longest w:

    padded    [b, w]       one row each, right-padded: under a causal mask no token sees the padding after it
    packed    [1, sum]     rows one after the other, `cu_seq_lens` telling where each begins

Every index is computed here, on the host, from the examples alone: nothing in the forward depends on numbers, so that
it can be run on fake tensors, compiled, and entered by all ranks alike.

Under context parallelism a rank holds two of 2·cp chunks of each row, as `rl_parallel_plans.shard_sequence` cuts them,
and predicts the asked tokens that follow one of its own. Packed rows are padded to 2·cp equal chunks each, and cut one
by one; padded ones all to the longest.

Axes: b rows of a microbatch, w tokens of its longest, t tokens that the model reads at a time, n asked tokens, k words.

Axes: B rows of the batch, b of the microbatch, T tokens of the longest row of the batch.

Every rank works this out by itself, from the same lengths, and all must find the same: ties go by index, and costs are
whole numbers.

A row of T tokens costs T (for all that is linear in tokens) plus T² / 24576 (for attention). In a decoder layer of H
features, projections and feed-forward take about 24·H² operations a token and causal attention 2·H·T, so that attention
costs as much as everything else at T = 12·H: 24576 tokens for H = 2048.

Every rank works out the whole cut from the same lengths, and takes its own part. All ranks get equally many
microbatches, because the collectives of a sharded model must be entered by all of them equally often: a rank with too
few units repeats the shortest one of the batch, and does not count it.

Axes: B rows of the batch, T tokens of its longest row. A unit is `rows_per_unit` consecutive rows, never parted.
"""

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from rl_backends.errors import BatchError
from rl_backends.examples import BatchT, TokenBatch

__all__ = [
    "Bounds",
    "Layout",
    "Microbatch",
    "MicrobatchLimits",
    "ModelInputs",
    "SequenceShard",
    "SharedPlaces",
    "cut",
    "cut_all",
    "make_inputs",
    "moved",
    "packed_groups",
    "padded_groups",
    "row_cost",
    "share_out",
]

Groups = list[list[int]]


@dataclass(frozen=True, slots=True)
class Bounds:
    """On one microbatch."""

    units: int
    """Most units."""

    tokens: int | None
    """Most tokens, as the model reads them."""


def padded_groups(units: Sequence[int], tokens: Sequence[int], bounds: Bounds) -> Callable[[int], Groups]:
    """How to cut a rank's units, most tokens first; the result cuts into at least the number that it is given.

    units: unit numbers, in descending order of `tokens`.
    tokens: of each unit (by its number), padded to its own longest row.
    """
    ordered = [tokens[unit] for unit in units]
    fewest = len(_starts(ordered, bounds.units, bounds.tokens))

    def into(number: int) -> Groups:
        wanted = max(number, fewest)
        starts = _starts(ordered, bounds.units, _smallest_bound(ordered, bounds, wanted))
        groups = [list(units[start:end]) for start, end in zip(starts, [*starts, len(units)][1:], strict=True)]
        return _split_up(groups, lambda group: tokens[group[0]] * len(group), wanted)

    return into


def packed_groups(units: Sequence[int], tokens: Sequence[int], bounds: Bounds) -> Callable[[int], Groups]:
    """As `padded_groups`, for rows without padding: the tokens of a microbatch are the sum of its units'."""
    fitted = _best_fit(units, tokens, bounds)

    def into(number: int) -> Groups:
        wanted = max(number, len(fitted))
        spread = _spread(units, tokens, bounds, number=min(wanted, len(units)))
        if spread is None:
            spread = _split_up(fitted, lambda group: sum(tokens[unit] for unit in group), wanted)
        return sorted(spread, key=lambda group: (-sum(tokens[unit] for unit in group), group))

    return into


def _starts(ordered: Sequence[int], most_units: int, most_tokens: int | None) -> list[int]:
    """Where each run of neighbours begins. The first of a run is its longest, to which the others are padded."""
    starts, at = [], 0
    while at < len(ordered):
        starts.append(at)
        at += most_units if most_tokens is None else max(1, min(most_units, most_tokens // ordered[at]))
    return starts


def _smallest_bound(ordered: Sequence[int], bounds: Bounds, number: int) -> int | None:
    """The smallest bound on tokens that still gives `number` runs."""
    if not ordered:
        return None
    low, high = ordered[0], ordered[0] * bounds.units
    if bounds.tokens is not None:
        high = max(low, min(high, bounds.tokens))
    while low < high:
        middle = (low + high) // 2
        if len(_starts(ordered, bounds.units, middle)) <= number:
            high = middle
        else:
            low = middle + 1
    return low


def _split_up(groups: Groups, size: Callable[[list[int]], int], number: int) -> Groups:
    """Halve the largest groups until there are `number`, or nothing is left to halve."""
    heap = [(-size(group), index, group) for index, group in enumerate(groups)]
    heapq.heapify(heap)
    whole: list[tuple[int, list[int]]] = []
    while heap and len(heap) + len(whole) < number:
        _, index, group = heapq.heappop(heap)
        if len(group) == 1:
            whole.append((index, group))
            continue
        half = len(group) // 2
        for part, rows in enumerate((group[:half], group[half:])):
            heapq.heappush(heap, (-size(rows), 2 * index + part + len(groups), rows))
    return sorted([group for _, group in whole] + [group for _, _, group in heap], key=lambda g: (-size(g), g))


def _best_fit(units: Sequence[int], tokens: Sequence[int], bounds: Bounds) -> Groups:
    """Each unit, longest first, into the fullest group that still takes it (best fit decreasing: Johnson, 1973)."""
    if bounds.tokens is None:
        return [list(units[start : start + bounds.units]) for start in range(0, len(units), bounds.units)]
    groups: Groups = []
    free: list[tuple[int, int]] = []
    for unit in units:
        found = bisect_left(free, (tokens[unit], -1))
        if found < len(free):
            left, index = free.pop(found)
        else:
            left, index = bounds.tokens, len(groups)
            groups.append([])
        groups[index].append(unit)
        if len(groups[index]) < bounds.units:
            insort(free, (left - tokens[unit], index))
    return groups


def _spread(units: Sequence[int], tokens: Sequence[int], bounds: Bounds, *, number: int) -> Groups | None:
    """Exactly `number` groups of like numbers of tokens, longest units first; None where the bounds do not let it."""
    groups: Groups = [[] for _ in range(number)]
    loads = [(0, index) for index in range(number)]
    for unit in units:
        if not loads:
            return None
        load, index = loads[0]
        if bounds.tokens is not None and load + tokens[unit] > bounds.tokens:
            return None
        groups[index].append(unit)
        if len(groups[index]) < bounds.units:
            heapq.heapreplace(loads, (load + tokens[unit], index))
        else:
            heapq.heappop(loads)
    return groups


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


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Which rows, and whether they count."""

    rows: Int[Tensor, " b"]
    """Indices along B."""

    width: int
    """Tokens of the longest of them: columns beyond are padding."""

    counted: bool
    """False for a repetition that only keeps this rank in step with the others."""

    def of(self, examples: BatchT, *, device: str) -> BatchT:
        """These rows of `examples`, on no more columns than they fill, on `device`."""
        instance = cast("Any", examples)  # the protocol cannot say that it is a dataclass
        length = instance.tokens.shape[1]
        taken = {
            field.name: _take(getattr(instance, field.name), self.rows, width=self.width, length=length).to(device)
            for field in fields(instance)
        }
        cut: BatchT = replace(instance, **taken)
        return cut


def moved(examples: BatchT, *, device: str) -> BatchT:
    """The same examples on `device`; themselves where they are there."""
    instance = cast("Any", examples)
    tensors = {field.name: getattr(instance, field.name) for field in fields(instance)}
    if all(tensor.device.type == device for tensor in tensors.values()):
        return examples
    there: BatchT = replace(instance, **{name: tensor.to(device) for name, tensor in tensors.items()})
    return there


def _take(tensor: Tensor, rows: Tensor, *, width: int, length: int) -> Tensor:
    along_tokens = tensor.ndim > 1 and tensor.shape[1] == length
    return tensor[rows, :width] if along_tokens else tensor[rows]


_TOKENS_AT_WHICH_ATTENTION_IS_HALF = 24576


def row_cost(length: int) -> int:
    """What a row costs, in 1/24576 of a token's linear part."""
    return length * (_TOKENS_AT_WHICH_ATTENTION_IS_HALF + length)


def share_out(costs: Sequence[int], *, num_ranks: int) -> list[list[int]]:
    """The units of each rank, dearest first; all ranks get ceil(units / num_ranks) at most.

    The dearest unit that is left goes to the rank with the least load that still takes units (LPT: Graham, 1969). Units
    dealt in turn are taken instead where their dearest rank is cheaper.
    """
    order = sorted(range(len(costs)), key=costs.__getitem__, reverse=True)  # stable: ties in the order of the batch
    if num_ranks == 1:
        return [order]
    dealt = [order[rank::num_ranks] for rank in range(num_ranks)]
    balanced = _least_loaded_first(order, costs, num_ranks=num_ranks)
    return min((balanced, dealt), key=lambda ranks: max(sum(costs[unit] for unit in units) for units in ranks))


def _least_loaded_first(order: Sequence[int], costs: Sequence[int], *, num_ranks: int) -> list[list[int]]:
    most = -(-len(order) // num_ranks)
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    for unit in order:
        load, rank = loads[0]
        ranks[rank].append(unit)
        if len(ranks[rank]) < most:
            heapq.heapreplace(loads, (load + costs[unit], rank))
        else:
            heapq.heappop(loads)
    return ranks


_ROWS_CHECKED_AT_A_TIME = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchLimits:
    """How large a microbatch may be."""

    rows: int = 64
    """Most rows."""

    tokens: int | None = None
    """Most tokens as the model reads them, padding included; None bounds by rows alone."""

    layout: Layout = "padded"
    """Whether rows are padded to the longest of their microbatch, or laid one after the other."""

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"rows={self.rows} must be >= 1")
        if self.tokens is not None and self.tokens < 1:
            raise ValueError(f"tokens={self.tokens} must be >= 1, or None for no bound")


def cut(
    examples: TokenBatch, *, limits: MicrobatchLimits, rank: int, num_ranks: int, token_multiple: int = 1
) -> list[Microbatch]:
    """The microbatches of one rank; see `cut_all`."""
    lengths, planned = _planned(examples, limits, num_ranks=num_ranks, token_multiple=token_multiple)
    return _microbatches(planned, rank, lengths=lengths, rows_per_unit=examples.rows_per_unit)


def cut_all(
    examples: TokenBatch,
    *,
    limits: MicrobatchLimits,
    num_ranks: int,
    token_multiple: int = 1,
    vocabulary_size: int | None = None,
) -> list[list[Microbatch]]:
    """The microbatches of each rank, equally many, those with most tokens first.

    Args:
        examples: the whole batch.
        limits: of one microbatch.
        num_ranks: data-parallel ranks.
        token_multiple: what a row's tokens are rounded up to: 2 · ranks under context parallelism.
        vocabulary_size: ids are below it; None does not look at them.

    Raises:
        BatchError: no rows, rows that no model can compute, or a unit that is too large for a microbatch.
    """
    lengths, planned = _planned(examples, limits, num_ranks=num_ranks, token_multiple=token_multiple)
    if vocabulary_size is not None:
        _check_ids(examples, vocabulary_size)
    return [
        _microbatches(planned, rank, lengths=lengths, rows_per_unit=examples.rows_per_unit) for rank in range(num_ranks)
    ]


@dataclass(frozen=True, slots=True)
class _Plan:
    ranks: list[list[list[int]]]
    """Units of each microbatch of each rank."""

    shortest: int
    """The unit to repeat."""


def _planned(
    examples: TokenBatch, limits: MicrobatchLimits, *, num_ranks: int, token_multiple: int
) -> tuple[list[int], _Plan]:
    lengths = examples.lengths.tolist()
    _check_rows(examples, lengths)
    unit = examples.rows_per_unit
    _check_units(len(lengths), unit, limits)
    packed = limits.layout == "packed"
    units = [lengths[start : start + unit] for start in range(0, len(lengths), unit)] if unit > 1 else None
    tokens = _tokens_read(lengths, units, packed=packed, unit=unit, multiple=token_multiple)
    _check_tokens(tokens, lengths, limits, unit=unit)
    costs = list(map(row_cost, lengths)) if units is None else [sum(map(row_cost, rows)) for rows in units]
    bounds = Bounds(limits.rows // unit, limits.tokens)
    group = packed_groups if packed else padded_groups
    cutters = []
    for share in share_out(costs, num_ranks=num_ranks):
        share.sort()
        share.sort(key=tokens.__getitem__, reverse=True)  # stable: ties stay in the order of the batch
        cutters.append(group(share, tokens, bounds))
    number = max(len(into(0)) for into in cutters)
    shortest = min(range(len(tokens)), key=lambda unit: (tokens[unit], unit))
    return lengths, _Plan([into(number) for into in cutters], shortest)


def _tokens_read(
    lengths: list[int], units: list[list[int]] | None, *, packed: bool, unit: int, multiple: int
) -> list[int]:
    """Tokens that the model reads of each unit, where it is alone in a microbatch."""
    if packed:
        read = lengths if multiple == 1 else [multiple * -(-length // multiple) for length in lengths]
        return read if units is None else [sum(read[start : start + unit]) for start in range(0, len(read), unit)]
    longest = lengths if units is None else [max(rows) for rows in units]
    return longest if unit == multiple == 1 else [unit * multiple * -(-length // multiple) for length in longest]


def _microbatches(plan: _Plan, rank: int, *, lengths: list[int], rows_per_unit: int) -> list[Microbatch]:
    own = plan.ranks[rank]
    number = max(map(len, plan.ranks))
    out = []
    for index in range(number):
        counted = index < len(own)
        units = own[index] if counted else [plan.shortest]
        rows = [unit * rows_per_unit + row for unit in units for row in range(rows_per_unit)]
        out.append(Microbatch(torch.tensor(rows), max(lengths[row] for row in rows), counted))
    return out


def _check_rows(examples: TokenBatch, lengths: list[int]) -> None:
    if not lengths:
        raise BatchError("the batch has no rows (B=0): there is nothing to compute; do not ask with an empty batch")
    num_tokens = examples.tokens.shape[1]
    for row, length in enumerate(lengths):
        if not 1 <= length <= num_tokens:
            raise BatchError(
                f"row {row} has length {length}, where tokens hold {num_tokens}: lengths must be from 1 to that; "
                f"leave out rows without tokens"
            )
    trainable = examples.trainable
    if bool(trainable[:, 0].any()):
        row = int(trainable[:, 0].int().argmax())
        raise BatchError(f"row {row}: its first token is marked trainable, and nothing precedes it to predict it from")
    if (place := _trained_padding(trainable, examples.lengths.to(trainable.device))) is not None:
        row, column = place
        raise BatchError(
            f"row {row}: token {column} is marked trainable, and its length is {lengths[row]}: "
            f"padding is nothing to train on"
        )


def _trained_padding(trainable: Tensor, lengths: Tensor) -> tuple[int, int] | None:
    """A place beyond its row's length that is marked trainable.

    Rows of like length at a time: columns that are padding to all of them need no comparison.
    """
    for rows in torch.split(lengths.argsort(), _ROWS_CHECKED_AT_A_TIME):
        shortest, longest = int(lengths[rows[0]]), int(lengths[rows[-1]])
        padding = torch.arange(shortest, longest, device=lengths.device) >= lengths[rows, None]
        if bool(trainable[rows, longest:].any()) or bool((trainable[rows, shortest:longest] & padding).any()):
            beyond = torch.arange(trainable.shape[1], device=lengths.device) >= lengths[rows, None]
            row, column = (trainable[rows] & beyond).nonzero()[0].tolist()
            return int(rows[row]), column
    return None


def _check_ids(examples: TokenBatch, vocabulary_size: int) -> None:
    """Of tokens that are not padding; all are looked at, and rows one by one only where something is wrong."""
    tokens = examples.tokens
    if int(tokens.min()) >= 0 and int(tokens.max()) < vocabulary_size:
        return
    real = torch.arange(tokens.shape[1], device=tokens.device) < examples.lengths.to(tokens.device)[:, None]
    wrong = (real & ((tokens < 0) | (tokens >= vocabulary_size))).nonzero()
    if len(wrong):
        row, column = wrong[0].tolist()
        raise BatchError(
            f"row {row}: token {column} has the id {int(tokens[row, column])}, and the model's ids are from 0 to "
            f"{vocabulary_size - 1}: give the tokens of the model's own tokenizer"
        )


def _check_units(num_rows: int, unit: int, limits: MicrobatchLimits) -> None:
    if num_rows % unit:
        raise BatchError(f"{num_rows} rows, of which {unit} belong together each: B must be a multiple of {unit}")
    if unit > limits.rows:
        raise BatchError(
            f"{unit} rows belong together, and a microbatch holds {limits.rows}; micro_batch_size must be at "
            f"least {unit}"
        )


def _check_tokens(tokens: list[int], lengths: list[int], limits: MicrobatchLimits, *, unit: int) -> None:
    if limits.tokens is None or not tokens or max(tokens) <= limits.tokens:
        return
    worst = max(range(len(tokens)), key=tokens.__getitem__)
    row = max(range(worst * unit, (worst + 1) * unit), key=lengths.__getitem__)
    together = "" if unit == 1 else f", and the {unit} rows that belong together"
    raise BatchError(
        f"row {row} has {lengths[row]} tokens{together}: {tokens[worst]} as the model reads them, more than "
        f"micro_batch_tokens={limits.tokens}; raise it to {tokens[worst]}, or shorten the row"
    )
