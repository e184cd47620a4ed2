"""What a run trains on and what it is judged by, kept apart. Knows no file and no order."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from rl_algorithms.data.rows import ConversationRow, DataError, LabelledRow, PreferenceRow, Question, Row

__all__ = ["Dataset", "split_held_out"]

RowT = TypeVar("RowT", Row, ConversationRow, PreferenceRow, LabelledRow)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """What a run trains on and is judged by."""

    train: Sequence[Row]
    """Prompts to learn from."""

    held_out: Sequence[Row]
    """Prompts that no stage trains on; their text never occurs among the others."""

    demonstrations: Sequence[Row | ConversationRow]
    """What SFT imitates: prompts with their `answer`, often `train` itself, or conversations."""

    def __post_init__(self) -> None:
        for name in ("train", "held_out"):
            if not getattr(self, name):
                raise DataError(f"the data set has no {name} rows")
        seen = {question for rows in (self.train, self.demonstrations) for row in rows for question in _questions(row)}
        for row in self.held_out:
            if row.question in seen:
                raise DataError(
                    f"{row.where}: the held-out prompt {row.prompt!r} is also trained on; held-out accuracy would "
                    f"measure memory. Remove it from one of the two"
                )


def _questions(row: Row | ConversationRow) -> tuple[Question, ...]:
    return row.questions if isinstance(row, ConversationRow) else (row.question,)


def split_held_out(rows: Sequence[RowT], *, share: float, seed: int) -> tuple[list[RowT], list[RowT]]:
    """Cut `rows` into those to train on and those to hold out, by distinct prompt: no prompt is in both, none empty.

    Raises:
        DataError: fewer than two distinct prompts, so that one of the sides would be empty.
        ValueError: the share is not between 0 and 1.
    """
    if not 0 < share < 1:
        raise ValueError(f"share={share} must be between 0 and 1: the part of the distinct prompts that is held out")
    if not rows:
        raise DataError("there are no rows to split")
    prompts = sorted({row.question for row in rows})
    if len(prompts) < 2:
        raise DataError(f"{rows[0].where}: one distinct prompt cannot be both trained on and held out; add rows")
    random.Random(seed).shuffle(prompts)
    held_out = set(prompts[: min(len(prompts) - 1, max(1, round(share * len(prompts))))])
    return [row for row in rows if row.question not in held_out], [row for row in rows if row.question in held_out]
