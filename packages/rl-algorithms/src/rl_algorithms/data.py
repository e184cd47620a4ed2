"""Rows of data: prompts, with or without a right answer, from JSONL or from a function.

Knows no tokenizer and no algorithm. A row is `{"prompt": "text" or messages, "answer": "text", ...}`; every other
column is kept and handed to the reward function as it is.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rl_algorithms.contracts import Message

__all__ = ["DataError", "Dataset", "Row", "batches", "make_row", "read_jsonl", "split_held_out"]

ItemT = TypeVar("ItemT")


class DataError(ValueError):
    """A row of data that cannot be used; the message names file, line and field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One prompt."""

    messages: tuple[Message, ...]
    """The prompt as chat messages; the last one is what the policy answers."""

    columns: Mapping[str, object]
    """Every column of the row, `prompt` and `answer` included, untouched."""

    where: str
    """File and line, or the name of the generator and the row's index: for error messages."""

    @property
    def prompt(self) -> str:
        """The text of the last message."""
        return self.messages[-1]["content"]

    @property
    def question(self) -> tuple[tuple[str, str], ...]:
        """All messages: what makes two rows the same prompt."""
        return tuple((message["role"], message["content"]) for message in self.messages)

    @property
    def answer(self) -> str | None:
        """The right answer, where the data has one."""
        answer = self.columns.get("answer")
        return answer if isinstance(answer, str) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """What a run trains on and is judged by."""

    train: Sequence[Row]
    """Prompts to learn from."""

    held_out: Sequence[Row]
    """Prompts that no stage trains on; their text never occurs among the others."""

    demonstrations: Sequence[Row]
    """Prompts whose `answer` is to be imitated by SFT; often `train` itself."""

    def __post_init__(self) -> None:
        for name in ("train", "held_out"):
            if not getattr(self, name):
                raise DataError(f"the data set has no {name} rows")
        seen = {row.question for rows in (self.train, self.demonstrations) for row in rows}
        for row in self.held_out:
            if row.question in seen:
                raise DataError(
                    f"{row.where}: the held-out prompt {row.prompt!r} is also trained on; held-out accuracy would "
                    f"measure memory. Remove it from one of the two"
                )


def read_jsonl(path: str | Path) -> list[Row]:
    """Read one row per line; blank lines are skipped.

    Raises:
        DataError: the file is missing or empty, or a line is not a JSON object with a usable `prompt` (and a text
            `answer`, if there is one). The message names file, line and field.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # JSON strings may hold what else ends a line
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}); give a JSONL file with one row per line"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 text (byte {error.start}); JSONL is UTF-8") from error
    rows = [_parse_line(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not rows:
        raise DataError(f'{path}: has no rows; each line is a JSON object such as {{"prompt": "2+2=", "answer": "4"}}')
    return rows


def _parse_line(line: str, where: str) -> Row:
    try:
        columns = json.loads(line)
        json.dumps(columns, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: is not valid JSON ({error.msg} at column {error.colno}): {line[:60]!r}") from error
    except (ValueError, RecursionError) as error:  # a number of 5000 digits, half a character, a thousand brackets
        raise DataError(f"{where}: cannot be read ({error}): {line[:60]!r}") from error
    if not isinstance(columns, dict):
        raise DataError(f"{where}: each line must be a JSON object, found {type(columns).__name__}")
    return make_row(columns, where=where)


def make_row(columns: Mapping[str, object], *, where: str) -> Row:
    """Check one row's columns and make it a `Row`.

    Raises:
        DataError: `prompt` is missing, empty or neither text nor messages; `answer` is there and is not text.
    """
    if "prompt" not in columns:
        raise DataError(
            f"{where}: field 'prompt' is missing; the row has {', '.join(map(repr, columns)) or 'no fields'}"
        )
    answer = columns.get("answer")
    if answer is not None and not isinstance(answer, str):
        raise DataError(f"{where}: field 'answer' must be text, found {type(answer).__name__} {answer!r}")
    return Row(messages=_messages(columns["prompt"], where), columns=columns, where=where)


def _messages(prompt: object, where: str) -> tuple[Message, ...]:
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise DataError(
            f"{where}: field 'prompt' must be text or a list of messages, found {type(prompt).__name__} {prompt!r:.60}"
        )
    for index, message in enumerate(prompt):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise DataError(
                f"{where}: field 'prompt[{index}]' must have a text 'role' and 'content', found {message!r:.60}"
            )
    if not prompt[-1]["content"] or prompt[-1]["role"] == "assistant":
        what = "ends with the assistant's message" if prompt[-1]["content"] else "is empty"
        raise DataError(f"{where}: field 'prompt' {what}; the last message is what the policy answers")
    return tuple(prompt)


def split_held_out(rows: Sequence[Row], *, share: float, seed: int) -> tuple[list[Row], list[Row]]:
    """Cut `rows` into those to train on and those to hold out, by distinct prompt: no prompt is in both.

    Raises:
        DataError: fewer than two distinct prompts, so that one of the sides would be empty.
    """
    prompts = sorted({row.question for row in rows})
    if len(prompts) < 2:
        raise DataError(f"{rows[0].where}: one distinct prompt cannot be both trained on and held out; add rows")
    random.Random(seed).shuffle(prompts)
    held_out = set(prompts[: min(len(prompts) - 1, max(1, round(share * len(prompts))))])
    return [row for row in rows if row.question not in held_out], [row for row in rows if row.question in held_out]


def batches(items: Sequence[ItemT], *, size: int, seed: int) -> Iterator[list[ItemT]]:
    """Batches of `size`, forever: each pass over `items` is a new shuffle, and a batch may span two passes.

    Raises:
        DataError: there is nothing to draw from.
    """
    if not items:
        raise DataError("there are no rows to draw batches from")
    shuffle = random.Random(seed).shuffle
    queue: list[ItemT] = []
    while True:
        while len(queue) < size:
            again = list(items)
            shuffle(again)
            queue += again
        yield queue[:size]
        queue = queue[size:]
