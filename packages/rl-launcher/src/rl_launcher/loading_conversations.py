"""Conversations as a run needs them: those to imitate, those to measure by, and the prompts that they begin with.

Knows no file: `rl_algorithms.data` reads them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rl_algorithms.data import ConversationRow, DataError, Dataset, Row, split_held_out
from rl_launcher.loading_preferences import PreferenceData

__all__ = ["ConversationData", "cut_conversations", "held_out_demonstrations"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationData(Dataset):
    """Conversations; as a `Dataset`, what stands before their first answers, where anything does."""

    held_out_demonstrations: Sequence[ConversationRow]
    """What the loss is measured by."""

    def __post_init__(self) -> None:
        seen = {question for row in self.demonstrations for question in _questions(row)}
        for row in self.held_out_demonstrations:
            if row.question in seen:
                raise DataError(
                    f"{row.where}: the held-out conversation begins with what is also trained on, later in another "
                    f"one; its loss would measure memory. Remove it from one of the two"
                )


def cut_conversations(rows: Sequence[ConversationRow], *, share: float, seed: int) -> ConversationData:
    """Hold out a share of the distinct prompts.

    Raises:
        DataError: there are fewer than two of them, or a held-out one is trained on in the middle of another row.
    """
    train, held_out = split_held_out(rows, share=share, seed=seed)
    return ConversationData(
        train=_prompts(train), held_out=_prompts(held_out), demonstrations=train, held_out_demonstrations=held_out
    )


def held_out_demonstrations(dataset: Dataset) -> Sequence[Row | ConversationRow]:
    """What an imitation of `dataset` is measured by; nothing where held-out rows have no answer, or weight 0."""
    if isinstance(dataset, ConversationData | PreferenceData):
        return [row for row in dataset.held_out_demonstrations if row.weight]
    return [row for row in dataset.held_out if row.answer is not None]


def _prompts(rows: Sequence[ConversationRow]) -> list[Row]:
    """What stands before the first answer that is learnt, which is its `answer` unless a column is called so.

    A text that answers nothing has none.
    """
    prompts = []
    for row in rows:
        length = len(row.question)
        before, answers = row.messages[:length], row.messages[length:]
        if before[-1]["role"] != "assistant":
            columns = {"answer": answers[0]["content"], **row.columns}
            prompts.append(Row(messages=before, columns=columns, where=row.where, tools=row.tools))
    return prompts


def _questions(row: Row | ConversationRow) -> tuple[object, ...]:
    return row.questions if isinstance(row, ConversationRow) else (row.question,)
