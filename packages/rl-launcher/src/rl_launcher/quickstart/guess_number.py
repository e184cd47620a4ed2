"""Rows for the game of guessing a number, with demonstrations that show the format but not how to win."""

import random

from rl_algorithms.data import Dataset, Row, make_row

__all__ = ["dataset"]

NUM_HELD_OUT, NUM_DEMONSTRATIONS, NUM_TRAIN = 200, 1000, 2000
HIGH = 9


def dataset() -> Dataset:
    """Return games with secrets from 0 to 9, the same in every run. The environment writes the first message."""
    rng = random.Random(4321)
    return Dataset(
        train=[_game("train", index, rng) for index in range(NUM_TRAIN)],
        held_out=[_game("held-out", index, rng) for index in range(NUM_HELD_OUT)],
        demonstrations=[_guess(index, rng) for index in range(NUM_DEMONSTRATIONS)],
    )


def _game(part: str, index: int, rng: random.Random) -> Row:
    # The prompts differ so that no held-out one is trained on; the environment's first message replaces them.
    columns = {"prompt": f"{part.replace('-', ' ')} game {index}", "secret": rng.randint(0, HIGH)}
    return make_row(columns, where=f"guess_number {part} row {index}")


def _guess(index: int, rng: random.Random) -> Row:
    columns = {"prompt": "guess", "answer": str(rng.randint(0, HIGH))}
    return make_row(columns, where=f"guess_number demonstration {index}")
