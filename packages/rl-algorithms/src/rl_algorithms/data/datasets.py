"""Data sets in the form that training needs: prompts, conversations or preference pairs, some of them held out.

    load_dataset       reads rows of one form and holds some out
    Dataset            prompts to learn from, prompts to hold out, responses to imitate
    ConversationData   the same, of whole conversations
    PreferenceData     the same, of pairs of responses
    LabelledData       the same, of single responses that are each good or bad

No prompt is both trained on and held out, whatever its form; a data set that violates this is refused by the row.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

from rl_algorithms.choices import check_choice, check_fields
from rl_algorithms.contracts import Message
from rl_algorithms.data.mixing import Mixture
from rl_algorithms.data.reading import PromptTemplate, SkippedRows, read_rows, stream_rows
from rl_algorithms.data.sources import Source
from rl_algorithms.rows import ConversationRow, DataError, LabelledRow, PreferenceRow, Question, Row

__all__ = [
    "ConversationData",
    "Dataset",
    "Form",
    "LabelledData",
    "MixedSource",
    "PreferenceData",
    "RowSource",
    "are_conversations",
    "check_rows",
    "held_out_demonstrations",
    "load_dataset",
    "split_held_out",
]

RowT = TypeVar("RowT", Row, ConversationRow, PreferenceRow, LabelledRow)

RowSource: TypeAlias = str | Path | Source | Iterable[Mapping[str, object]]
"""Whatever `read_rows` reads."""

Form: TypeAlias = Literal["prompts", "conversations", "preferences", "labelled"]

HELD_OUT_SHARE = 0.1
MOST_REPEATED = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """What a run trains on and is evaluated on."""

    train: Sequence[Row]
    """Prompts to learn from."""

    held_out: Sequence[Row]
    """Prompts that no stage trains on; their text never occurs among the others."""

    demonstrations: Sequence[Row | ConversationRow]
    """What SFT imitates: prompts with their `answer`, often `train` itself, or conversations."""

    @property
    def columns(self) -> set[str]:
        """The columns of the rows that are learnt from: what a reward function may use."""
        return {name for row in self.train or self.demonstrations for name in row.columns}

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationData(Dataset):
    """Conversations to imitate. Their prompts, if there are any, are the messages before the first trained response."""

    held_out_demonstrations: Sequence[ConversationRow]
    """Conversations that the loss is measured on."""

    def __post_init__(self) -> None:
        seen = {question for row in self.demonstrations for question in _questions(row)}
        for row in self.held_out_demonstrations:
            if row.question in seen:
                raise DataError(
                    f"{row.where}: the held-out conversation begins with what is also trained on, later in another "
                    f"one; its loss would measure memory. Remove it from one of the two"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceData(Dataset):
    """Pairs of responses. `train` and `held_out` hold each prompt once; demonstrations are the chosen responses."""

    pairs: Sequence[PreferenceRow]
    """Pairs to learn from."""

    held_out_pairs: Sequence[PreferenceRow]
    """Pairs of prompts that no stage trains on."""

    held_out_demonstrations: Sequence[ConversationRow]
    """The chosen responses of `held_out_pairs`, which the imitation loss is measured on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledData(Dataset):
    """Single responses, each good or bad. `train` and `held_out` hold each prompt once; demonstrations are good."""

    labelled: Sequence[LabelledRow]
    """Responses to learn from."""

    held_out_labelled: Sequence[LabelledRow]
    """Responses to prompts that no stage trains on."""

    held_out_demonstrations: Sequence[ConversationRow]
    """The good responses of `held_out_labelled`, which the imitation loss is measured on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedSource:
    """A further set to learn from, and how often."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid"}

    source: str
    """As `data.source`; no function."""

    weight: float = 1.0
    """How often a row is drawn from this set, relative to the weights of the others."""

    split: str | None = None
    """As `data.split`."""

    name: str | None = None
    """As `data.name`."""

    revision: str | None = None
    """As `data.revision`."""

    columns: dict[str, str] = field(default_factory=dict)
    """As `data.columns`."""

    def __post_init__(self) -> None:
        check_fields(self, above={"weight": 0})

    @property
    def rows(self) -> Source:
        """Where the rows are."""
        return Source(path=self.source, split=self.split, name=self.name, revision=self.revision)


def load_dataset(
    source: RowSource,
    *,
    form: Form,
    columns: Mapping[str, str] | None = None,
    held_out: RowSource | None = None,
    held_out_share: float | None = None,
    seed: int = 0,
    imitate_chosen: bool = False,
    skipped: SkippedRows | None = None,
    prompts: PromptTemplate | None = None,
    mix: Mapping[str, MixedSource] | None = None,
    weight: float = 1.0,
) -> Dataset:
    """Read a data set and hold some of its prompts out.

    Args:
        source: a path, the id of a data set on the Hugging Face hub, a `Source`, or rows; see `read_rows`.
        form: `"prompts"` gives a `Dataset`, `"conversations"` a `ConversationData`, `"preferences"` a `PreferenceData`,
            `"labelled"` a `LabelledData`.
        columns: our name -> their column, for `source` and `held_out` alike.
        held_out: rows to hold out, of the same form. None cuts `held_out_share` of the distinct prompts from `source`.
        held_out_share: share of the distinct prompts, 0.1 by default.
        seed: which prompts are held out.
        imitate_chosen: with `"preferences"` or `"labelled"`, chosen or good responses become demonstrations for SFT.
        skipped: None: the first bad row is an error. A report: bad rows of `source` are left out and counted in it. A
            bad held-out row is always an error, so that what is measured does not change silently.
        prompts: what every prompt is put into.
        mix: further sets to learn from, by name. One pass over the data then draws from each in proportion to its
            weight, until every row of every set was drawn.
        weight: of `source` beside them.

    Raises:
        DataError: the data cannot be read, a row is bad, there are fewer than two distinct prompts to split, or a
            prompt is both trained on and held out. Rows without a file are named `data[3]` and `held_out[3]`.
        ValueError: no such form, or a share that is not between 0 and 1.
        ImportError: reading needs the extra `rl-algorithms[data]`.
    """
    check_choice("form", form, Form)

    def read(kind: type[RowT]) -> tuple[list[RowT], list[RowT]]:
        how: dict[str, Any] = {"kind": kind, "prompts": prompts}
        sets = {"data": read_rows(source, columns=columns, skipped=skipped, name="data", **how)}
        for name, each in (mix or {}).items():
            sets[name] = read_rows(each.rows, columns=each.columns, skipped=skipped, name=name, **how)
        if held_out is not None:
            measured = read_rows(held_out, columns=columns, name="held_out", **how)
        else:
            share = HELD_OUT_SHARE if held_out_share is None else held_out_share
            split = {name: split_held_out(rows, share=share, seed=seed) for name, rows in sets.items()}
            measured = [row for _, held in split.values() for row in held]
            theirs = {row.question for row in measured}
            # A prompt that one set holds out is left out of the others, too.
            sets = {name: [row for row in rows if row.question not in theirs] for name, (rows, _) in split.items()}
        weights = {"data": weight, **{name: each.weight for name, each in (mix or {}).items()}}
        return _mixed(sets, weights=weights, seed=seed), measured

    if form == "prompts":
        questions, measured = read(Row)
        return Dataset(train=questions, held_out=measured, demonstrations=questions)
    if form == "conversations":
        conversations, held_out_conversations = read(ConversationRow)
        return ConversationData(
            train=_prompts_of_conversations(conversations),
            held_out=_prompts_of_conversations(held_out_conversations),
            demonstrations=conversations,
            held_out_demonstrations=held_out_conversations,
        )
    if form == "labelled":
        labelled, held_out_labelled = read(LabelledRow)
        return LabelledData(
            train=_prompts_of_responses(labelled),
            held_out=_prompts_of_responses(held_out_labelled),
            demonstrations=_good_responses(labelled) if imitate_chosen else [],
            labelled=labelled,
            held_out_labelled=held_out_labelled,
            held_out_demonstrations=_good_responses(held_out_labelled) if imitate_chosen else [],
        )
    pairs, held_out_pairs = read(PreferenceRow)
    return PreferenceData(
        train=_prompts_of_responses(pairs),
        held_out=_prompts_of_responses(held_out_pairs),
        demonstrations=_good_responses(pairs) if imitate_chosen else [],
        pairs=pairs,
        held_out_pairs=held_out_pairs,
        held_out_demonstrations=_good_responses(held_out_pairs) if imitate_chosen else [],
    )


def _mixed(sets: Mapping[str, list[RowT]], *, weights: Mapping[str, float], seed: int) -> list[RowT]:
    """Rows of all sets in the proportions of their weights, each row at least once."""
    if len(sets) == 1:
        return next(iter(sets.values()))
    for name, rows in sets.items():
        if not rows:
            raise DataError(f"{name}: every prompt of the set is held out, and none is left to train on")
    share = {name: len(rows) / weights[name] for name, rows in sets.items()}
    longest, total = max(share, key=share.__getitem__), sum(map(len, sets.values()))
    draws = share[longest] * sum(weights.values())
    if draws > MOST_REPEATED * total:
        raise DataError(
            f"with the weights {dict(weights)} one pass over {longest!r} takes {draws:.0f} draws from {total} rows: "
            f"others would be repeated more than {MOST_REPEATED} times; raise the weight of {longest!r}, or give fewer "
            f"of its rows (split='train[:1000]')"
        )
    drawn = dict.fromkeys(sets, 0)
    mixed: list[RowT] = []
    for each in Mixture(sets, weights=weights, seed=seed):
        mixed.append(each.item)
        drawn[each.name] += 1
        if all(drawn[name] >= len(rows) for name, rows in sets.items()):
            break
    return mixed


def check_rows(name: str, rows: Any) -> Sequence[Mapping[str, object]]:
    """Return `rows` if they are a list of dicts, a `datasets.Dataset` or alike: they can be read more than once.

    Raises:
        DataError: they are not; the message says what to give instead of them.
    """
    wanted = f"{name} must be a list of dicts, a datasets.Dataset or a path, found {type(rows).__name__}"
    if isinstance(rows, Mapping):  # a datasets.DatasetDict is one
        raise DataError(f"{wanted} with {', '.join(map(repr, rows)) or 'nothing'}; give one of its values")
    if hasattr(rows, "to_dict") and hasattr(rows, "columns"):
        raise DataError(f"{wanted}; give its rows, {name}.to_dict('records')")
    if callable(rows):
        raise DataError(f"{wanted}; call it and give what it returns")
    if not (hasattr(rows, "__getitem__") and hasattr(rows, "__len__")) or isinstance(rows, bytes):
        raise DataError(wanted + "; give list(...) of it" * hasattr(rows, "__iter__"))
    sequence: Sequence[Mapping[str, object]] = rows
    return sequence


def are_conversations(source: RowSource, *, columns: Mapping[str, str] | None = None) -> bool | None:
    """Whether the first readable row holds more than a prompt and its answer; None if no row can be read.

    Raises:
        ImportError: reading needs the extra `rl-algorithms[data]`.
    """
    if {"prompt", "answer"} <= {*(columns or ())}:
        return False
    try:
        first = next(stream_rows(source, kind=ConversationRow, columns=columns, skipped=SkippedRows()))
    except DataError:
        return None
    given = {name for name, value in first.columns.items() if value is not None}
    return bool(given & {"messages", "conversations"}) or {"prompt", "completion"} <= given or "prompt" not in given


def held_out_demonstrations(dataset: Dataset) -> Sequence[Row | ConversationRow]:
    """What the imitation loss is measured on: held-out responses, if there are any; rows of weight 0 are left out."""
    if isinstance(dataset, ConversationData | PreferenceData | LabelledData):
        return [row for row in dataset.held_out_demonstrations if row.weight]
    return [row for row in dataset.held_out if row.answer is not None]


def split_held_out(rows: Sequence[RowT], *, share: float, seed: int) -> tuple[list[RowT], list[RowT]]:
    """Split `rows` into training and held-out rows by distinct prompt; no prompt is in both, and neither is empty.

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


def _questions(row: Row | ConversationRow) -> tuple[Question, ...]:
    return row.questions if isinstance(row, ConversationRow) else (row.question,)


def _prompts_of_conversations(rows: Sequence[ConversationRow]) -> list[Row]:
    """The messages before the first trained response, which becomes the `answer` unless a column has that name.

    A text without a prompt has none.
    """
    prompts = []
    for row in rows:
        length = len(row.question)
        before, responses = row.messages[:length], row.messages[length:]
        if before[-1]["role"] != "assistant":
            columns = {"answer": responses[0]["content"], **row.columns}
            prompts.append(Row(messages=before, columns=columns, where=row.where, tools=row.tools))
    return prompts


def _prompts_of_responses(rows: Sequence[PreferenceRow | LabelledRow]) -> list[Row]:
    """Each prompt once, from its first row; its good response becomes the `answer` unless a column has that name."""
    first = {row.question: row for row in reversed(rows)}
    prompts = []
    for row in rows:
        if first[row.question] is not row:
            continue
        good = _good_response(row)
        columns = {**({} if good is None else {"answer": good[-1]["content"]}), **row.columns}
        prompts.append(Row(messages=row.messages, columns=columns, where=row.where, tools=row.tools))
    return prompts


def _good_responses(rows: Sequence[PreferenceRow] | Sequence[LabelledRow]) -> list[ConversationRow]:
    conversations = []
    for row in rows:
        prompt = tuple({**message, "train": False} for message in row.messages)
        if (good := _good_response(row)) is not None:
            conversations.append(
                ConversationRow(messages=(*prompt, *good), columns=row.columns, where=row.where, tools=row.tools)
            )
    return conversations


def _good_response(row: PreferenceRow | LabelledRow) -> tuple[Message, ...] | None:
    """The chosen response of a pair, a response whose label is good; None of a bad one."""
    if isinstance(row, PreferenceRow):
        return row.chosen
    return row.completion if row.label else None
