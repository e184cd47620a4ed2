"""Rows for the game of guessing a number, and demonstrations that teach its form and nothing of its art."""

import random

from rl_algorithms.data import Dataset, Row, make_row

__all__ = ["dataset"]

NUM_HELD_OUT, NUM_DEMONSTRATIONS, NUM_TRAIN = 200, 1000, 2000
HIGH = 9


def dataset() -> Dataset:
    """Games with secrets from 0 to 9; the episode says how each begins. The same ones in every run."""
    rng = random.Random(4321)
    return Dataset(
        train=[_game("train", index, rng) for index in range(NUM_TRAIN)],
        held_out=[_game("held-out", index, rng) for index in range(NUM_HELD_OUT)],
        demonstrations=[_guess(index, rng) for index in range(NUM_DEMONSTRATIONS)],
    )


def _game(part: str, index: int, rng: random.Random) -> Row:
    # Prompts differ, so that none is held out and trained on; the episode's own opening takes their place.
    columns = {"prompt": f"{part.replace('-', ' ')} game {index}", "secret": rng.randint(0, HIGH)}
    return make_row(columns, where=f"guess_number {part} row {index}")


def _guess(index: int, rng: random.Random) -> Row:
    columns = {"prompt": "guess", "answer": str(rng.randint(0, HIGH))}
    return make_row(columns, where=f"guess_number demonstration {index}")
