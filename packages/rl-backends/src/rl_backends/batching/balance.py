"""Which rank computes which units of rows, such that no rank waits long for another. Integers only, no tensors.

Every rank works this out by itself, from the same lengths, and all must find the same: ties go by index, and costs are
whole numbers.

A row of T tokens costs T (for all that is linear in tokens) plus T² / 24576 (for attention). In a decoder layer of H
features, projections and feed-forward take about 24·H² operations a token and causal attention 2·H·T, so that attention
costs as much as everything else at T = 12·H: 24576 tokens for H = 2048.
"""

import heapq
from collections.abc import Sequence

__all__ = ["row_cost", "share_out"]

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
