"""A task with a long tail of answer lengths: sort the digits, and write them as often as is asked for, counting down.

`4271*3>` is answered by `3 1247 2 1247 1 1247`. Six prompts in seven ask for one; answers have from 7 to 90 tokens, the
mean 15, the median 9. Half of the demonstrations have two digits swapped, for reinforcement to repair.
"""

import random
from collections.abc import Iterator

from rl_algorithms.data import Dataset, Row, make_row

NUM_HELD_OUT, NUM_DEMONSTRATIONS, NUM_TRAIN = 1000, 6000, 8000
CORRUPTED_SHARE = 0.5
SHARE_OF_ONE, MOST = 0.85, 9
DIGITS = "0123456789"


def dataset() -> Dataset:
    """Disjoint questions to hold out, to demonstrate and to learn from. The same ones in every run."""
    questions = _questions(random.Random(4321))
    corruption = random.Random(78)
    held_out = [_row(*next(questions), where=f"long_tail held-out row {index}") for index in range(NUM_HELD_OUT)]
    demonstrations = [
        _row(*next(questions), where=f"long_tail demonstration {index}", corruption=corruption)
        for index in range(NUM_DEMONSTRATIONS)
    ]
    train = [_row(*next(questions), where=f"long_tail train row {index}") for index in range(NUM_TRAIN)]
    return Dataset(train=train, held_out=held_out, demonstrations=demonstrations)


def _questions(rng: random.Random) -> Iterator[tuple[str, int]]:
    seen: set[tuple[str, int]] = set()
    while True:
        digits = "".join(rng.choice(DIGITS) for _ in range(rng.randint(4, 7)))
        question = digits, 1 if rng.random() < SHARE_OF_ONE else rng.randint(2, MOST)
        if question not in seen:
            seen.add(question)
            yield question


def _row(digits: str, times: int, *, where: str, corruption: random.Random | None = None) -> Row:
    ordered = "".join(sorted(digits))
    if corruption is not None and corruption.random() < CORRUPTED_SHARE:
        at, other = corruption.sample(range(len(ordered)), 2)
        swapped = list(ordered)
        swapped[at], swapped[other] = swapped[other], swapped[at]
        ordered = "".join(swapped)
    answer = " ".join(f"{left} {ordered}" for left in range(times, 0, -1))
    return make_row({"prompt": f"{digits}*{times}>", "answer": answer}, where=where)
