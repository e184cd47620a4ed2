"""Rows that prefer one answer to another, as a run needs them: pairs, prompts to ask, answers to imitate.

Knows no file and no format of rows: `rl_algorithms.data` reads them, and `rl_algorithms.preferences` tokenises them.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from rl_algorithms import dpo
from rl_algorithms.chat import Chat
from rl_algorithms.data import ConversationRow, Dataset, PreferenceRow, Row, split_held_out
from rl_algorithms.preferences.pairs import Pair, pairs_from_rows

__all__ = ["DataPairs", "PreferenceData", "TokenizedPair", "cut_preferences", "tokenize_pair"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceData(Dataset):
    """Pairs to learn from and to hold out; as a `Dataset`, their prompts, each once, and chosen answers to imitate."""

    pairs: Sequence[PreferenceRow]
    """To learn from."""

    held_out_pairs: Sequence[PreferenceRow]
    """Of prompts that no stage trains on."""

    held_out_demonstrations: Sequence[ConversationRow]
    """Their chosen answers, which the loss of imitation is measured by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedPair:
    """A row with its two answers as token ids."""

    row: PreferenceRow
    tokens: Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPairs:
    """Given pairs as tokens; nothing is known of a reference yet."""

    train: dpo.Examples
    """To learn from."""

    held_out: dpo.Examples
    """Of prompts that no stage trains on."""

    def digest(self) -> str:
        """A fingerprint of all tokens, in their order, and of which are answers."""
        digest = hashlib.sha256()
        for examples in (self.train, self.held_out):
            for tensor in (examples.tokens, examples.lengths, examples.trainable):
                digest.update(f"{tuple(tensor.shape)}\n".encode())
                digest.update(tensor.numpy().data)
        return digest.hexdigest()


def cut_preferences(rows: Sequence[PreferenceRow], *, share: float, seed: int, imitate: bool) -> PreferenceData:
    """Hold out a share of the distinct prompts; with `imitate` SFT learns the chosen answers to the others.

    Raises:
        DataError: there are fewer than two distinct prompts, or a held-out one stands within an answer to imitate.
    """
    train, held_out = split_held_out(rows, share=share, seed=seed)
    return PreferenceData(
        train=_prompts(train),
        held_out=_prompts(held_out),
        demonstrations=[_demonstration(row) for row in train] if imitate else [],
        pairs=train,
        held_out_pairs=held_out,
        held_out_demonstrations=[_demonstration(row) for row in held_out] if imitate else [],
    )


def tokenize_pair(row: PreferenceRow, chat: Chat) -> TokenizedPair:
    """A pair as the model will read it.

    Raises:
        DataError: naming the row: its answers cannot be told from its prompt, or from each other.
    """
    (tokens,) = pairs_from_rows([row], chat)
    return TokenizedPair(row=row, tokens=tokens)


def _prompts(rows: Sequence[PreferenceRow]) -> list[Row]:
    """Each prompt once, as its first pair has it; its `answer` is the chosen one, unless a column is called so."""
    first = {row.question: row for row in reversed(rows)}
    return [
        Row(messages=row.messages, columns=_answered(row), where=row.where, tools=row.tools)
        for row in rows
        if first[row.question] is row
    ]


def _answered(row: PreferenceRow) -> dict[str, object]:
    return {"answer": row.chosen[-1]["content"], **row.columns}


def _demonstration(row: PreferenceRow) -> ConversationRow:
    context = tuple({**message, "train": False} for message in row.messages)  # of the prompt nothing is learnt
    return ConversationRow(messages=(*context, *row.chosen), columns=row.columns, where=row.where, tools=row.tools)
