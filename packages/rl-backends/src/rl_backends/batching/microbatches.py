"""Microbatches of the rows of a step, of like size, and the model inputs of each. `RowDealing.cut` makes them.

`make_inputs` lays the b rows of a microbatch, of which the longest has w tokens, out in one of two layouts:

    padded    [b, w]       rows of like length, right-padded: under a causal mask no token sees the padding after it
    packed    [1, sum]     rows one after the other; `cu_seq_lens` says where each begins

Every index is computed here, on the host, from the examples alone: nothing in the forward depends on values, so that it
can run on fake tensors, be compiled, and be entered by all ranks alike. Under context parallelism a rank holds two of
2·cp chunks of each row, as `rl_parallel_plans.shard_sequence` cuts them, and predicts the asked tokens that follow one
of its own. Packed rows are padded to 2·cp equal chunks each and cut one by one; padded ones all to the longest.

Axes: B rows of the batch, T tokens of its longest row, b rows of a microbatch, w tokens of its longest, t tokens that
the model reads at a time, n asked tokens, k words. A unit is `rows_per_unit` consecutive rows, never parted.
"""

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from rl_backends.examples import BatchT, changed, row_fields

Groups = list[list[int]]


def padded_groups(
    units: Sequence[int], tokens: Sequence[int], *, most_units: int, most_tokens: int | None, number: int = 0
) -> Groups:
    """Cut a rank's units into neighbours in the order of lengths: as few groups as possible, but at least `number`.

    units: unit numbers, in descending order of `tokens`.
    tokens: of each unit (by its number), padded to its own longest row.
    most_units, most_tokens: of a group; tokens as the model reads them.
    """
    ordered = [tokens[unit] for unit in units]
    wanted = max(number, len(_starts(ordered, most_units, most_tokens)))
    # The smallest bound on tokens that still gives that number of runs makes them alike.
    if ordered:
        low, high = ordered[0], ordered[0] * most_units
        if most_tokens is not None:
            high = max(low, min(high, most_tokens))
        while low < high:
            middle = (low + high) // 2
            if len(_starts(ordered, most_units, middle)) <= wanted:
                high = middle
            else:
                low = middle + 1
        most_tokens = low
    starts = _starts(ordered, most_units, most_tokens)
    groups = [list(units[start:end]) for start, end in zip(starts, [*starts, len(units)][1:], strict=True)]
    if len(groups) < wanted:
        groups = _split_up(groups, lambda group: tokens[group[0]] * len(group), wanted)
    return sorted(groups, key=lambda group: (-tokens[group[0]] * len(group), group))


def packed_groups(
    units: Sequence[int], tokens: Sequence[int], *, most_units: int, most_tokens: int | None, number: int = 0
) -> Groups:
    """As `padded_groups`, for rows without padding: the tokens of a microbatch are the sum of its units'."""
    fitted = _best_fit(units, tokens, most_units=most_units, most_tokens=most_tokens)
    wanted = max(number, len(fitted))
    groups = spread(units, tokens, number=min(wanted, len(units)), most_units=most_units, most_load=most_tokens)
    if groups is None:
        groups = _split_up(fitted, lambda group: sum(tokens[unit] for unit in group), wanted)
    return sorted(groups, key=lambda group: (-sum(tokens[unit] for unit in group), group))


def _starts(ordered: Sequence[int], most_units: int, most_tokens: int | None) -> list[int]:
    """Where each run of neighbours begins. The first of a run is its longest, to which the others are padded."""
    starts, at = [], 0
    while at < len(ordered):
        starts.append(at)
        at += most_units if most_tokens is None else max(1, min(most_units, most_tokens // ordered[at]))
    return starts


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
    return [group for _, group in whole] + [group for _, _, group in heap]


def _best_fit(units: Sequence[int], tokens: Sequence[int], *, most_units: int, most_tokens: int | None) -> Groups:
    """Each unit, longest first, into the fullest group that still takes it (best fit decreasing: Johnson, 1973)."""
    if most_tokens is None:
        return [list(units[start : start + most_units]) for start in range(0, len(units), most_units)]
    groups: Groups = []
    free: list[tuple[int, int]] = []
    for unit in units:
        found = bisect_left(free, (tokens[unit], -1))
        if found < len(free):
            left, index = free.pop(found)
        else:
            left, index = most_tokens, len(groups)
            groups.append([])
        groups[index].append(unit)
        if len(groups[index]) < most_units:
            insort(free, (left - tokens[unit], index))
    return groups


def spread(
    units: Sequence[int], loads: Sequence[int], *, number: int, most_units: int, most_load: int | None = None
) -> Groups | None:
    """Exactly `number` groups of like loads: each unit, in the order of `units`, to the group with the least load.

    loads: of each unit (by its number).

    Given the largest first this is LPT (Graham, 1969). Returns None where a unit fits into no group.
    """
    groups: Groups = [[] for _ in range(number)]
    open_groups = [(0, index) for index in range(number)]
    for unit in units:
        if not open_groups:
            return None
        load, index = open_groups[0]
        if most_load is not None and load + loads[unit] > most_load:
            return None
        groups[index].append(unit)
        if len(groups[index]) < most_units:
            heapq.heapreplace(open_groups, (load + loads[unit], index))
        else:
            heapq.heappop(open_groups)
    return groups


Layout = Literal["padded", "packed"]


@dataclass(frozen=True, slots=True)
class SequenceShard:
    """This rank's part of every row under context parallelism: chunks `rank` and 2 · num_ranks - 1 - `rank`."""

    rank: int
    """On the context-parallel axis."""
    num_ranks: int

    def padded(self, length: int) -> int:
        """Tokens of rows of `length` tokens with the padding that makes them 2 · num_ranks equal chunks."""
        return -(-length // (2 * self.num_ranks)) * 2 * self.num_ranks

    def positions_of_rows(self, held: Int[Tensor, " b"]) -> Int[Tensor, "b t"]:
        """Of this rank's tokens in rows of which it holds `held` each, padding included.

        A row of which it holds fewer than of another ends before the last column.
        """
        columns, chunk = torch.arange(int(held.max())), -(-held // 2)[:, None]
        last = 2 * self.num_ranks - 1 - self.rank
        return torch.where(columns < chunk, columns + chunk * self.rank, columns + chunk * (last - 1))

    def columns(self, positions: Int[Tensor, " n"], held: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
        """The reverse, of one position a row: in which column it is there; -1 where another rank has it."""
        chunk = -(-held // 2)
        number, within = positions // chunk, positions % chunk
        last = 2 * self.num_ranks - 1 - self.rank
        return torch.where(number == self.rank, within, torch.where(number == last, within + chunk, -1))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInputs:
    """Tokens as the model reads them, and the tokens that it is asked about."""

    tokens: Int[Tensor, "rows_read t"]
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
    """Ids of tokens whose log-probabilities are wanted in each asked token's place, where a loss asks for them."""
    row_lengths: tuple[int, ...] | None = None
    """Tokens of each packed row, the differences of `cu_seq_lens`, as numbers of the host; None where rows are padded.
    """
    places_of_rows: Int[Tensor, " N"] | None = None
    """Place in the pack of each token of each row, row by row, where rows share what they begin with;
    `cu_seq_lens` are then of these. None where each row is read by itself."""
    places_of_pack: Int[Tensor, " t"] | None = None
    """The reverse: for each place of the pack, one of the rows' tokens that is read there."""

    def to(self, device: str | torch.device) -> "ModelInputs":
        """The same on `device`."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        there: dict[str, Any] = {name: value.to(device) for name, value in own.items() if isinstance(value, Tensor)}
        return replace(self, **there)

    def as_arguments(self) -> dict[str, Any]:
        """What a Hugging Face decoder is called with, by its own names."""
        arguments: dict[str, Any] = {"input_ids": self.tokens}
        if self.position_ids is not None:
            arguments["position_ids"] = self.position_ids
        if self.cu_seq_lens is not None:
            arguments |= {"cu_seq_lens_q": self.cu_seq_lens, "cu_seq_lens_k": self.cu_seq_lens}
            arguments |= {"max_length_q": self.longest, "max_length_k": self.longest}
        if self.places_of_rows is not None:
            arguments |= {"places_of_rows": self.places_of_rows, "places_of_pack": self.places_of_pack}
        return arguments


def lengths_read(lengths: Int[Tensor, " b"], asked: Bool[Tensor, "b w"], *, offset: int) -> Int[Tensor, " b"]:
    """Tokens of each row up to the last at which something is read: no result depends on those after it. At least 1.

    The last token of a row predicts nothing, and neither does what follows the last trainable one.
    """
    ends = (asked * torch.arange(1, asked.shape[1] + 1)).amax(1) - offset
    return ends.clamp(min=1).to(lengths.dtype)


def make_inputs(
    tokens: Int[Tensor, "b w"],
    lengths: Int[Tensor, " b"],
    asked: Bool[Tensor, "b w"],
    *,
    layout: Layout,
    offset: int = 1,
    shard: SequenceShard | None = None,
    multiple: int = 1,
    words: Int[Tensor, "b w k"] | None = None,
) -> ModelInputs:
    """What the model reads of right-padded rows on the host.

    Args:
        tokens: token ids.
        lengths: tokens of each row that are not padding.
        asked: the tokens that something is wanted of; none beyond its row's length.
        layout: see above, at the top of this file.
        offset: 1 to read at the hidden state before each asked token, which predicts it; 0 to read at its own, as a
            value head does.
        shard: this rank's part of the rows.
        multiple: t, of each rank, is padded to a multiple of it: sequence parallelism needs one of its ranks. Padded
            rows get more columns, packed ones another row of padding alone.
        words: ids that are asked about in each asked token's place, besides its own.
    """
    num_rows, width = tokens.shape
    whole = SequenceShard(0, 1) if shard is None else shard
    packed = layout == "packed"

    # Tokens of each row that one rank reads, padding included. A shard is two equal chunks of every row.
    chunks = 1 if shard is None else 2
    multiple = math.lcm(multiple, chunks)
    if packed:
        held = chunks * -(-lengths // (chunks * whole.num_ranks))
        if missing := -int(held.sum()) % multiple:
            held = torch.cat([held, held.new_tensor([missing])])  # one more row, of padding alone
    else:
        held = torch.full_like(lengths, multiple * -(-int(lengths.max()) // (multiple * whole.num_ranks)))

    # The asked tokens that follow one of this rank's own, and where that one is.
    rows, columns = asked.nonzero(as_tuple=True)
    place = whole.columns(columns - offset, held[rows])
    own = place >= 0
    rows, columns, place = rows[own], columns[own], place[own]

    # Ids at this rank's positions: 0 beyond a row's length, and in the row of padding alone, which nobody looks at.
    positions = whole.positions_of_rows(held)
    read = positions[:num_rows]
    ids = torch.zeros_like(positions)
    ids[:num_rows] = tokens.gather(1, read.clamp(max=width - 1)).where(read < lengths[:, None], 0)
    if packed:
        kept = torch.arange(positions.shape[1]) < held[:, None]
        ids, positions = ids[kept][None], positions[kept][None]

    ends = held.cumsum(0)
    return ModelInputs(
        tokens=ids,
        position_ids=positions[:1] if packed or shard is not None else None,
        cu_seq_lens=F.pad(ends * whole.num_ranks, (1, 0)).to(torch.int32) if packed else None,
        longest=int(held.max()) * whole.num_ranks,
        row_lengths=tuple((held * whole.num_ranks).tolist()) if packed else None,
        at=(ends - held)[rows] + place,
        targets=tokens[rows, columns],
        into=rows * width + columns,
        words=None if words is None else words[rows, columns],
    )


# ---- Rows that begin alike, read once: the prompt of a group of rollouts, and what their answers have in common.
#
# A token's hidden state is a function of the tokens of its row up to itself. Rows that are equal up to there have it in
# common, so the model reads a tree instead of rows: each token once for all rows that have come to it the same way.
# Only attention needs rows, and unfolds them: it alone costs what it costs without sharing. Gradients add up where rows
# meet. N tokens of all rows; t that are left to read.
#
#     rows      1 5 9 2      the tree, read as one pack      1 5 9 2 4 7
#               1 5 4 7                                      places of its rows: 0 1 2 3, 0 1 4 5, 0 1 4
#               1 5 4

_MULTIPLE = 4  # rows unfold to lengths of multiples of it: attention runs once for all rows of one length


def make_shared_inputs(
    tokens: Int[Tensor, "b w"],
    lengths: Int[Tensor, " b"],
    asked: Bool[Tensor, "b w"],
    *,
    offset: int = 1,
    words: Int[Tensor, "b w k"] | None = None,
) -> ModelInputs:
    """What the model reads of right-padded rows on the host, what they begin with alike once; see `make_inputs`."""
    # The rows in an order in which those that begin alike are neighbours.
    own = [row[:length] for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True)]
    alike = torch.tensor(sorted(range(len(own)), key=own.__getitem__))
    place, is_first = _tree(tokens[alike], lengths[alike])
    unfolded, starts = _unfolded(place, lengths[alike])
    place = place[alike.argsort()]
    rows, columns = asked.nonzero(as_tuple=True)
    return ModelInputs(
        tokens=tokens[alike][is_first][None],
        position_ids=is_first.nonzero()[None, :, 1],
        cu_seq_lens=starts,
        longest=int(starts.diff().max()),
        row_lengths=tuple(starts.diff().tolist()),
        at=place[rows, columns - offset],
        targets=tokens[rows, columns],
        into=rows * tokens.shape[1] + columns,
        words=None if words is None else words[rows, columns],
        places_of_rows=unfolded,
        # For each place of the pack the first of the unfolded rows' tokens that is read there.
        places_of_pack=unfolded.new_full((int(is_first.sum()),), len(unfolded)).scatter_reduce(
            0, unfolded, torch.arange(len(unfolded)), reduce="amin"
        ),
    )


def _tree(tokens: Tensor, lengths: Tensor) -> tuple[Int[Tensor, "b w"], Bool[Tensor, "b w"]]:
    """Where in the pack each token of alphabetical rows is read, and whether its row is the first that has it."""
    columns = torch.arange(tokens.shape[1])
    real = columns < lengths[:, None]
    same = (tokens[1:] == tokens[:-1]) & real[1:] & real[:-1]
    is_first = real & ~F.pad(same.long().cumprod(1).bool(), (0, 0, 1, 0))
    number = torch.where(is_first, is_first.flatten().cumsum(0).view_as(is_first) - 1, -1)
    return number.cummax(0).values, is_first  # the latest row that had something new in this column is the one it joins


def _unfolded(place: Tensor, lengths: Tensor) -> tuple[Int[Tensor, " N"], Int[Tensor, " b_and_one"]]:
    """Places of rows one after the other, longest first, and where each begins; each ends with its last token again.

    A row that the next one begins with is left out: all that is read of it is read there too.
    """
    shared = (place[1:] == place[:-1]) & (torch.arange(place.shape[1]) < lengths[1:, None])
    beginning = F.pad(shared.sum(1) == lengths[:-1], (0, 1))
    order = lengths.argsort(descending=True, stable=True)
    order = order[~beginning[order]]
    held = _MULTIPLE * -(-lengths[order] // _MULTIPLE)
    columns = torch.arange(int(held.max())).expand(len(held), -1)
    wanted = torch.minimum(columns, lengths[order, None] - 1)
    return place[order].gather(1, wanted)[columns < held[:, None]], F.pad(held.cumsum(0), (1, 0)).to(torch.int32)


# ---- Microbatches of a pipeline, whose stages send one another tensors of one shape.


def of_one_shape(inputs: Sequence[ModelInputs]) -> list[ModelInputs]:
    """The same microbatches, padded to the rows and tokens of the largest; nothing that is asked for moves.

    Padded rows get more columns, and there are more of them; of packed rows another one of padding alone follows.
    """
    rows = max(each.tokens.shape[0] for each in inputs)
    tokens = max(each.tokens.shape[1] for each in inputs)
    made = []
    for each in inputs:
        held_rows, held = each.tokens.shape
        if each.cu_seq_lens is None:
            padded = F.pad(each.tokens, (0, tokens - held, 0, rows - held_rows))
            at = each.at // held * tokens + each.at % held
            made.append(replace(each, tokens=padded, at=at, longest=tokens))
        elif missing := tokens - held:
            assert each.position_ids is not None
            assert each.row_lengths is not None
            positions = torch.arange(missing, device=each.position_ids.device)[None]
            another = replace(
                each,
                tokens=F.pad(each.tokens, (0, missing)),
                position_ids=torch.cat([each.position_ids, positions], dim=1),
                cu_seq_lens=F.pad(each.cu_seq_lens, (0, 1), value=tokens),
                row_lengths=(*each.row_lengths, missing),
                longest=max(each.longest, missing),
            )
            made.append(another)
        else:
            made.append(each)
    return made


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

        def taken(name: str, tensor: Tensor) -> Tensor:
            along_tokens = tensor.ndim > 1 and name not in row_fields(examples)
            return (tensor[self.rows, : self.width] if along_tokens else tensor[self.rows]).to(device)

        return changed(examples, taken)


_TOKENS_AT_WHICH_ATTENTION_IS_HALF = 24576


def row_cost(length: int) -> int:
    """What a row costs, in 1/24576 of a token's linear part: T tokens cost T + T² / 24576, the square for attention.

    In a decoder layer of H features, projections and feed-forward take about 24·H² operations a token and causal
    attention 2·H·T, so attention costs as much as everything else at T = 12·H: 24576 tokens for H = 2048.
    """
    return length * (_TOKENS_AT_WHICH_ATTENTION_IS_HALF + length)


def share_out(costs: Sequence[int], *, num_ranks: int) -> list[list[int]]:
    """The units of each rank, dearest first; all ranks get ceil(units / num_ranks) at most.

    They are spread; units dealt in turn are taken instead where their dearest rank is cheaper.
    """
    order = sorted(range(len(costs)), key=costs.__getitem__, reverse=True)  # stable: ties in the order of the batch
    if num_ranks == 1:
        return [order]
    dealt = [order[rank::num_ranks] for rank in range(num_ranks)]
    balanced = spread(order, costs, number=num_ranks, most_units=-(-len(order) // num_ranks))
    assert balanced is not None  # there is room for all units
    return min((balanced, dealt), key=lambda ranks: max(sum(costs[unit] for unit in units) for units in ranks))
