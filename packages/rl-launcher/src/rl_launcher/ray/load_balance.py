"""How prompts are divided among several engines, so that all are done at about the same time.

Three quarters of the estimated work are dealt out evenly at once, longest prompts first, each to the engine with the
least work. The rest goes in ever smaller chunks to whichever engine is done first. The first part keeps batches full;
the second makes up for response lengths, which nobody knows in advance, and for slower engines. Equal prompts side by
side, a group's, stay together, so that their engine prefills them once.
"""

import itertools
from collections.abc import Sequence

from rl_generation import Sampling

FIRST_SHARE = 0.75
"""Share of the work that is dealt out at once. More leaves less to balance with, less makes batches smaller."""


def split_prompts(
    prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling], *, num_engines: int
) -> list[tuple[int, ...]]:
    """Split prompts into chunks of their places, in the order in which engines take them; each prompt is in one.

    The cost of a prompt is its length plus the longest possible response.

    >>> prompts = [[1, n] for n in range(16)]
    >>> [len(chunk) for chunk in split_prompts(prompts, [Sampling(max_new_tokens=8)] * 16, num_engines=2)]
    [6, 6, 1, 1, 1, 1]
    """
    if num_engines == 1:
        return [tuple(range(len(prompts)))] if prompts else []
    groups = [
        tuple(places) for _, places in itertools.groupby(range(len(prompts)), key=lambda place: tuple(prompts[place]))
    ]

    def cost(group: tuple[int, ...]) -> int:
        return sum(len(prompts[place]) + samplings[place].max_new_tokens * samplings[place].n for place in group)

    groups.sort(key=lambda group: (-cost(group), group))
    limit = FIRST_SHARE * sum(map(cost, groups)) / num_engines
    chunks: list[list[int]] = [[] for _ in range(num_engines)]
    loads = [0] * num_engines
    dealt = 0
    for group in groups:
        least = loads.index(min(loads))
        if loads[least] and loads[least] + cost(group) > limit:
            break
        chunks[least] += group
        loads[least] += cost(group)
        dealt += 1
    rest = groups[dealt:]
    while rest:
        size = max(1, len(rest) // (2 * num_engines))
        chunks.append([*itertools.chain.from_iterable(rest[:size])])
        rest = rest[size:]
    return [tuple(sorted(chunk)) for chunk in chunks if chunk]
