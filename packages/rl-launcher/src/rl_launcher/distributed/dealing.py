"""Which prompts are asked together, of engines that share them: pure arithmetic. Knows neither engines nor answers.

    an even share of three quarters of the work for each engine, the longest prompts dealt first, to whoever has least
    the rest in ever smaller pieces, each for whoever is done first

Nobody knows how long an answer becomes: the first part keeps batches full, the second makes up for what was misjudged
and for engines that are slower. Equal prompts that stand side by side, a group's, stay together, so that their engine
prefills them once.
"""

import itertools
from collections.abc import Sequence

from rl_generation import Sampling

__all__ = ["deal"]

DEALT_FIRST = 0.75
"""Part of the work that is dealt at once. More leaves less to even out, less breaks batches up."""


def deal(prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling], *, num_engines: int) -> list[tuple[int, ...]]:
    """Chunks of prompts' places, in the order in which engines take them: each prompt in one of them.

    The cost of a prompt is its length and the most that may be answered.

    >>> [len(chunk) for chunk in deal([[1, n] for n in range(16)], [Sampling(max_new_tokens=8)] * 16, num_engines=2)]
    [6, 6, 1, 1, 1, 1]
    """
    if not prompts:
        return []
    if num_engines == 1:
        return [tuple(range(len(prompts)))]
    groups = [
        tuple(places) for _, places in itertools.groupby(range(len(prompts)), key=lambda place: tuple(prompts[place]))
    ]

    def cost(group: tuple[int, ...]) -> int:
        return sum(len(prompts[place]) + samplings[place].max_new_tokens * samplings[place].n for place in group)

    longest_first = sorted(groups, key=lambda group: (-cost(group), group))
    shares, rest = _shares(longest_first, [cost(group) for group in longest_first], num_engines)
    return [share for share in shares if share] + list(_smaller_and_smaller(rest, num_engines))


def _shares(
    groups: Sequence[tuple[int, ...]], costs: Sequence[int], num_engines: int
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """A share for each engine, and what is left."""
    limit = DEALT_FIRST * sum(costs) / num_engines
    shares: list[list[int]] = [[] for _ in range(num_engines)]
    loads = [0] * num_engines
    for number, (group, cost) in enumerate(zip(groups, costs, strict=True)):
        least = loads.index(min(loads))
        if loads[least] and loads[least] + cost > limit:
            return [tuple(sorted(share)) for share in shares], list(groups[number:])
        shares[least] += group
        loads[least] += cost
    return [tuple(sorted(share)) for share in shares], []


def _smaller_and_smaller(groups: list[tuple[int, ...]], num_engines: int) -> list[tuple[int, ...]]:
    chunks = []
    while groups:
        size = max(1, len(groups) // (2 * num_engines))
        taken, groups = groups[:size], groups[size:]
        chunks.append(tuple(sorted(itertools.chain.from_iterable(taken))))
    return chunks
