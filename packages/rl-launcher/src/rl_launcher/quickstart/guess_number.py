"""Rows for the game of guessing a number, with demonstrations that show the format but not how to win."""

import random

from rl_algorithms.data import Dataset, make_row

__all__ = ["dataset"]

NUM_HELD_OUT, NUM_DEMONSTRATIONS, NUM_TRAIN = 200, 1000, 2000
HIGH = 9


def dataset() -> Dataset:
    """Return games with secrets from 0 to 9, the same in every run. The environment writes the first message."""
    rng = random.Random(4321)
    # The prompts differ so that no held-out one is trained on; the environment's first message replaces them.
    train, held_out = (
        [
            make_row({"prompt": f"{part} game {index}", "secret": rng.randint(0, HIGH)}, where=f"{part} game {index}")
            for index in range(number)
        ]
        for part, number in (("train", NUM_TRAIN), ("held out", NUM_HELD_OUT))
    )
    demonstrations = [
        make_row({"prompt": "guess", "answer": str(rng.randint(0, HIGH))}, where=f"demonstration {index}")
        for index in range(NUM_DEMONSTRATIONS)
    ]
    return Dataset(train=train, held_out=held_out, demonstrations=demonstrations)
