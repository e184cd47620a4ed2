"""What a run needs before its model is loaded: backend selection, environment, data, tokenized rows.

Knows no file and no format of rows: `rl_algorithms.data` reads them, and `rl_algorithms.preferences` tokenises them.

Knows no file: `rl_algorithms.data` reads them.

A function returns a `Dataset` that it has cut itself; whatever else `rl_algorithms.data` reads is cut here. Rows are
prompts; conversations, where sft is all that learns; or pairs, where dpo takes given ones.

A row may be asked, imitated and measured by: what one of these cannot use is left out of all. Knows no format of rows.

In two steps, since the first costs little, and should refuse before a model is loaded. Starts nothing.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import torch

from rl_algorithms import dpo
from rl_algorithms.chat import Chat, Demonstration, Prompt, TokenizedConversation, TrainOn
from rl_algorithms.data import (
    ConversationRow,
    DataError,
    Dataset,
    PreferenceRow,
    Row,
    SkippedRows,
    Source,
    read_rows,
    split_held_out,
    stream_rows,
)
from rl_algorithms.preferences.pairs import Pair, pairs_from_rows
from rl_backends import BackendSelection, MissingDependencyError, ModelError, select_backend
from rl_launcher.environments import load_environment
from rl_launcher.errors import Refusal
from rl_launcher.load_model import stop_token_ids
from rl_launcher.run_parts import Judge
from rl_launcher.schema import HEADLINES, HOW_TO_JUDGE, DataConfig, Recipe
from rl_launcher.user_code import NO_OBJECTS, Objects, call, is_import_string

__all__ = [
    "BadRows",
    "ContextLength",
    "ConversationData",
    "DataPairs",
    "Inputs",
    "PreferenceData",
    "TokenizedData",
    "TokenizedPair",
    "closing",
    "columns_of",
    "cut_conversations",
    "cut_preferences",
    "held_out_demonstrations",
    "load_dataset",
    "read_inputs",
    "tokenize",
    "tokenize_pair",
]


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
    return preference_data(train, held_out, imitate=imitate)


def preference_data(
    train: Sequence[PreferenceRow], held_out: Sequence[PreferenceRow], *, imitate: bool
) -> PreferenceData:
    """Pairs to learn from and pairs to hold out.

    Raises:
        DataError: there are none, or a prompt is in both.
    """
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
    return conversation_data(train, held_out)


def conversation_data(train: Sequence[ConversationRow], held_out: Sequence[ConversationRow]) -> ConversationData:
    """Conversations to learn from and conversations to hold out.

    Raises:
        DataError: a held-out one is trained on in the middle of another row.
    """
    return ConversationData(
        train=_prompts_loading_conversations(train),
        held_out=_prompts_loading_conversations(held_out),
        demonstrations=train,
        held_out_demonstrations=held_out,
    )


def held_out_demonstrations(dataset: Dataset) -> Sequence[Row | ConversationRow]:
    """What an imitation of `dataset` is measured by; nothing where held-out rows have no answer, or weight 0."""
    if isinstance(dataset, ConversationData | PreferenceData):
        return [row for row in dataset.held_out_demonstrations if row.weight]
    return [row for row in dataset.held_out if row.answer is not None]


def _prompts_loading_conversations(rows: Sequence[ConversationRow]) -> list[Row]:
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


RowT = TypeVar("RowT", Row, ConversationRow, PreferenceRow)

HELD_OUT_SHARE = 0.1


def load_dataset(recipe: Recipe, objects: Objects = NO_OBJECTS) -> tuple[Dataset, SkippedRows]:
    """Read the data set in the form that the recipe's stages need; also return which of its rows were left out.

    Args:
        recipe: names the data by `data.source`, unless `objects.data` is given.
        objects: `data` and `held_out` may each be a list of dicts, a `datasets.Dataset` or a path. Rows replace
            `data.source` and what selects a part of it (`split`, `name`, `revision`); held-out ones replace
            `data.held_out_share`.

    Raises:
        DataError: the data cannot be read, or one of the rows is bad; the message names file, line and field.
        Refusal: an object is of no kind that can be read; the function of `data.source` fails; a package is missing
            that reads the format; or nothing that is held out could measure the run.
    """
    recipe, rows = _data_object(recipe, objects.data)
    held_out = _held_out_object(objects.held_out)
    dataset, skipped = (rows, SkippedRows()) if isinstance(rows, Dataset) else _load(recipe, rows, held_out)
    judged = recipe.env is not None or objects.reward is not None or objects.environment is not None
    if not judged and [*recipe.stages] == ["sft"] and not held_out_demonstrations(dataset):
        raise Refusal(
            f"env is missing, and no held-out row of data.source={recipe.data.source} has an answer that counts, so "
            f"that nothing would be measured; give them answers, or {HOW_TO_JUDGE}"
        )
    return dataset, skipped


def columns_of(dataset: Dataset) -> set[str]:
    """Of the rows that are learnt from: what a reward may ask for."""
    return {name for row in dataset.train or dataset.demonstrations for name in row.columns}


Rows: TypeAlias = Source | Sequence[Mapping[str, object]]
"""Rows that were not read yet: where they are, or the rows themselves."""


def _data_object(recipe: Recipe, data: Any) -> tuple[Recipe, Rows | Dataset | None]:
    """The recipe with the path that `data` may be, and its rows; None where a function of `data.source` makes them."""
    config = recipe.data
    if data is None or isinstance(data, str | Path):
        if data is not None:
            recipe = replace(recipe, data=replace(config, source=str(data)))
        return recipe, None if is_import_string(recipe.data.source) else _source(recipe.data)
    if isinstance(data, Dataset):
        return recipe, data
    return recipe, _rows_of_object("data", data)


def _held_out_object(held_out: Any) -> Rows | None:
    if held_out is None:
        return None
    if isinstance(held_out, str | Path):
        return Source(path=str(held_out))
    return _rows_of_object("held_out", held_out)


def _rows_of_object(name: str, rows: Any) -> Sequence[Mapping[str, object]]:
    """`rows`, if they can be read more than once, each one a mapping of columns."""
    said = f"{name} must be a list of dicts, a datasets.Dataset or a path"
    if isinstance(rows, Mapping):  # a datasets.DatasetDict is one
        splits = ", ".join(map(repr, rows))
        raise Refusal(f"{said}, found {type(rows).__name__} with {splits or 'nothing'}; give one of its values")
    if hasattr(rows, "to_dict") and hasattr(rows, "columns"):
        raise Refusal(f"{said}, found {type(rows).__name__}; give its rows, {name}.to_dict('records')")
    if not (hasattr(rows, "__getitem__") and hasattr(rows, "__len__")) or isinstance(rows, bytes):
        hint = "; call it and give what it returns" if callable(rows) else "; give list(...) of it"
        raise Refusal(
            f"{said}, found {type(rows).__name__}{hint if callable(rows) or hasattr(rows, '__iter__') else ''}"
        )
    sequence: Sequence[Mapping[str, object]] = rows
    return sequence


def _load(recipe: Recipe, source: Rows | None, held_out: Rows | None) -> tuple[Dataset, SkippedRows]:
    config = recipe.data
    share = config.held_out_share or HELD_OUT_SHARE
    if recipe.dpo is not None and recipe.dpo.pairs == "data":
        if source is None:
            raise Refusal(
                f"dpo.pairs=data reads columns chosen and rejected, and data.source={config.source} is a function, "
                f"which returns prompts; name a file or a data set, or say dpo.pairs=sampled"
            )
        pairs, skipped = _read(config, source, kind=PreferenceRow)
        imitate = recipe.sft is not None
        if held_out is not None:
            return preference_data(
                pairs, _read_held_out(config, held_out, kind=PreferenceRow), imitate=imitate
            ), skipped
        return cut_preferences(pairs, share=share, seed=recipe.seed, imitate=imitate), skipped
    if source is None:
        if held_out is not None:
            raise Refusal(
                f"data.source={config.source} is a function, which holds out rows of its own; leave held_out out"
            )
        return _made_by_function(config), SkippedRows()
    asking = [name for name in HEADLINES if name in recipe.stages]
    if not asking and _are_conversations(config, source, unreadable=recipe.sft is not None):
        conversations, skipped = _read(config, source, kind=ConversationRow)
        if held_out is not None:
            return conversation_data(conversations, _read_held_out(config, held_out, kind=ConversationRow)), skipped
        return cut_conversations(conversations, share=share, seed=recipe.seed), skipped
    try:
        rows, skipped = _read(config, source, kind=Row)
    except DataError as error:
        if asking and _are_conversations(config, source, unreadable=False):
            raise DataError(
                f"{error}; {asking[0]} asks prompts, and conversations are for a recipe whose only stage is sft: give "
                f"rows with a prompt, or set {asking[0]}=null"
            ) from error
        raise
    if held_out is not None:
        return Dataset(train=rows, held_out=_read_held_out(config, held_out, kind=Row), demonstrations=rows), skipped
    train, measured = split_held_out(rows, share=share, seed=recipe.seed)
    return Dataset(train=train, held_out=measured, demonstrations=train), skipped


def _read(config: DataConfig, source: Rows, *, kind: type[RowT]) -> tuple[list[RowT], SkippedRows]:
    skipped = SkippedRows()
    report = skipped if config.on_bad_row == "skip" else None
    name = f"data.source={config.source}" if isinstance(source, Source) else "data"
    try:
        return read_rows(source, kind=kind, columns=config.columns, skipped=report, name="data"), skipped
    except ImportError as error:
        raise Refusal(f"{name}: {error}") from error


def _read_held_out(config: DataConfig, source: Rows, *, kind: type[RowT]) -> list[RowT]:
    """Held-out rows are never left out silently: what is measured must not depend on `data.on_bad_row`."""
    try:
        return read_rows(source, kind=kind, columns=config.columns, name="held_out")
    except ImportError as error:
        raise Refusal(f"held_out: {error}") from error


def _source(config: DataConfig) -> Source:
    return Source(path=config.source, split=config.split, name=config.name, revision=config.revision)


def _are_conversations(config: DataConfig, source: Rows, *, unreadable: bool) -> bool:
    """Whether the first good row says more than a prompt and its answer; `unreadable` where there is none.

    Then whoever reads the rows says what is wrong with them, and that is who will say most.
    """
    if {"prompt", "answer"} <= config.columns.keys():
        return False
    try:
        rows = stream_rows(source, kind=ConversationRow, columns=config.columns, skipped=SkippedRows())
        first = next(rows)
    except (DataError, ImportError):
        return unreadable
    given = {name for name, value in first.columns.items() if value is not None}
    return bool(given & {"messages", "conversations"}) or {"prompt", "completion"} <= given or "prompt" not in given


def _made_by_function(config: DataConfig) -> Dataset:
    for name, unset in (
        ("held_out_share", None),
        ("columns", {}),
        ("on_bad_row", "stop"),
        ("split", None),
        ("name", None),
        ("revision", None),
    ):
        if (value := getattr(config, name)) != unset:
            raise Refusal(
                f"data.{name}={value} is for rows that are read from a file or a data set, and data.source="
                f"{config.source} is a function, which reads, checks and holds out its own; leave data.{name} out"
            )
    dataset = call(config.source, wanted="a function that returns a Dataset (data.source)")
    if not isinstance(dataset, Dataset):
        raise Refusal(
            f"data.source={config.source} returned {type(dataset).__name__}, and must return a "
            f"rl_algorithms.data.Dataset"
        )
    return dataset


class Placed(Protocol):
    """A row of the data."""

    @property
    def where(self) -> str:
        """File and line."""
        ...


class Tokenized(Protocol):
    """What was made of a row."""

    @property
    def row(self) -> Placed:
        """The row."""
        ...


PlacedT = TypeVar("PlacedT", bound=Placed)
TokenizedT = TypeVar("TokenizedT", bound=Tokenized)


@dataclass(slots=True)
class BadRows:
    """Hears of each bad row once."""

    skipped: SkippedRows
    """Rows that were left out before; and with `skip`, those of here."""

    skip: bool
    """False: the first bad row is an error."""

    reasons: dict[str, DataError] = field(default_factory=dict)
    """Why a row is of no use, by its place."""

    @classmethod
    def after(cls, skipped: SkippedRows, *, skip: bool) -> "BadRows":
        """Those that come after what reading left out; `skipped` itself stays as it is."""
        return cls(replace(skipped, first=[*skipped.first]), skip)

    def each(self, rows: Sequence[PlacedT], make: Callable[[PlacedT], TokenizedT], *, what: str) -> "Made[TokenizedT]":
        """`make` of each row, but for those of which it raises a DataError.

        Raises:
            DataError: a row is bad, and bad rows are not to be left out.
        """
        made = []
        for row in rows:
            try:
                made.append(make(row))
            except DataError as error:
                if not self.skip:
                    raise
                if row.where not in self.reasons:
                    self.reasons[row.where] = error
                    self.skipped.leave_out(error)
        return Made(made, num_rows=len(rows), what=what)

    def without(self, made: "Made[TokenizedT]") -> list[TokenizedT]:
        """What was made, without any row that is bad elsewhere; to be asked when all rows were seen.

        Raises:
            DataError: there were rows, and none is left.
        """
        good = [each for each in made.tokenized if each.row.where not in self.reasons]
        if made.num_rows and not good:
            first = next(iter(self.reasons.values()))
            raise DataError(f"data.on_bad_row=skip left out all {made.num_rows} {made.what}; the first: {first}")
        return good


@dataclass(frozen=True, slots=True)
class Made(Generic[TokenizedT]):
    """What was made of rows."""

    tokenized: Sequence[TokenizedT]
    num_rows: int
    """How many they were."""

    what: str
    """What they are to the run, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextLength:
    """Each method returns the row that it is given, or raises a DataError that names it and says what to do."""

    tokens: int | None
    """Tokens that the model can read at most; None where it does not say."""

    max_new_tokens: int
    """Tokens of an answer to a prompt."""

    @classmethod
    def of(cls, model: Any, *, max_new_tokens: int) -> "ContextLength":
        """As the configuration of a Hugging Face model has it."""
        return cls(tokens=getattr(model.config, "max_position_embeddings", None), max_new_tokens=max_new_tokens)

    def leaves_room_for_an_answer(self, prompt: Prompt) -> bool:
        """Whether an answer of `max_new_tokens` fits behind the prompt."""
        return self.tokens is None or len(prompt.tokens) + self.max_new_tokens <= self.tokens

    def prompt(self, prompt: Prompt) -> Prompt:
        """A prompt that is asked."""
        if not self.leaves_room_for_an_answer(prompt):
            raise DataError(
                f"{prompt.row.where}: the prompt has {len(prompt.tokens)} tokens, and with "
                f"policy.generation.max_new_tokens={self.max_new_tokens} it does not fit into the model's context of "
                f"{self.tokens} (max_position_embeddings); shorten it, lower max_new_tokens, or leave such rows out by "
                f"data.on_bad_row=skip"
            )
        return prompt

    def lesson(self, lesson: Demonstration | TokenizedConversation) -> Demonstration | TokenizedConversation:
        """A row that is imitated."""
        said = "prompt and answer have" if isinstance(lesson, Demonstration) else "the conversation has"
        self._refuse_longer(len(lesson.tokens), f"{lesson.row.where}: {said}")
        return lesson

    def pair(self, pair: TokenizedPair) -> TokenizedPair:
        """Two answers, of which one is preferred."""
        for name, tokens in (("chosen", pair.tokens.chosen), ("rejected", pair.tokens.rejected)):
            self._refuse_longer(len(tokens), f"{pair.row.where}: field '{name}': prompt and answer have")
        return pair

    def _refuse_longer(self, length: int, said: str) -> None:
        if self.tokens is not None and length > self.tokens:
            raise DataError(
                f"{said} {length} tokens, and the model's context {self.tokens} (max_position_embeddings); shorten the "
                f"answer, or leave such rows out by data.on_bad_row=skip"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What is read before any model."""

    selection: BackendSelection
    """Which backend trains, and why."""

    environment: Judge
    """What judges answers."""

    dataset: Dataset
    """The rows."""

    skipped: SkippedRows
    """Which were left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedData:
    """The rows as tokens."""

    chat: Chat
    prompts: list[Prompt]
    held_out: list[Prompt]
    unasked: int
    """Further ones, that are too long to be answered where nobody would judge it."""

    demonstrations: list[Demonstration | TokenizedConversation]
    """Empty without an sft stage."""

    held_out_demonstrations: list[Demonstration | TokenizedConversation]
    """What its loss is measured by; as empty, and where held-out rows have no answer."""

    pairs: DataPairs | None
    """Of data that prefer one answer to another."""

    skipped: SkippedRows
    """Which rows were left out, when they were read or since."""

    pad_token_id: int
    """A token for places that nobody sees."""


def read_inputs(recipe: Recipe, objects: Objects = NO_OBJECTS) -> Inputs:
    """Read what costs little, or refuse; objects take precedence over what the recipe names.

    Raises:
        ValueError: the backend is not installed, the reward is none, the data are bad, or lack what the reward needs.
    """
    selection = select_backend(recipe.policy)
    try:
        selection.require_installed()
    except MissingDependencyError as error:
        raise Refusal(f"policy.megatron_cfg.enabled=true: {error}") from error
    except ModelError as error:
        raise Refusal(f"policy.dtensor_cfg.lora_cfg: {error}") from error
    if recipe.cluster.runtime == "in_process":
        _refuse_what_is_not_here(recipe, device=selection.config.device)
    environment = load_environment(recipe.env, objects)
    dataset, skipped = load_dataset(recipe, objects)
    environment.check(columns_of(dataset))
    return Inputs(selection=selection, environment=environment, dataset=dataset, skipped=skipped)


def _refuse_what_is_not_here(recipe: Recipe, *, device: str) -> None:
    """What a model would be loaded for in vain."""
    if device == "cuda" and not torch.cuda.is_available():
        section = "megatron_cfg" if recipe.policy.megatron_cfg.enabled else "dtensor_cfg"
        raise Refusal(f"policy.{section}.device=cuda, and torch sees no GPU here; say device=cpu")
    if recipe.policy.generation.backend == "vllm" and find_spec("vllm") is None:
        raise Refusal(
            "policy.generation.backend=vllm, and vLLM is not installed: pip install 'rl-launcher[vllm]', or say "
            "backend=transformers"
        )


def tokenize(recipe: Recipe, inputs: Inputs, *, model: Any, tokenizer: Any) -> TokenizedData:
    """The rows as the model will read them. Of `model` only its configurations are looked at.

    Raises:
        DataError: a row cannot be read by the model, and `data.on_bad_row` is stop; or none can be.
    """
    chat = Chat(tokenizer, prompt_format=recipe.data.prompt_format, stop_token_ids=stop_token_ids(model, tokenizer))
    context = ContextLength.of(model, max_new_tokens=recipe.policy.generation.max_new_tokens)
    bad = BadRows.after(inputs.skipped, skip=recipe.data.on_bad_row == "skip")
    plan = _Plan.of(recipe, inputs.dataset)

    def asked(row: Row) -> Prompt:
        return context.prompt(chat.prompt(row))

    def imitated(row: Row | ConversationRow) -> Demonstration | TokenizedConversation:
        return context.lesson(_lesson(row, chat, plan.train_on))

    def preferred(row: PreferenceRow) -> TokenizedPair:
        return context.pair(tokenize_pair(row, chat))

    prompts = bad.each(plan.prompts, asked, what="prompts")
    # Without a judge, answers to held-out prompts are only looked at, and nothing hangs on any of them.
    held_out = bad.each(inputs.dataset.held_out, chat.prompt if recipe.env is None else asked, what="held-out prompts")
    demonstrations = bad.each(plan.demonstrations, imitated, what="answers to imitate")
    measured = bad.each(plan.held_out_demonstrations, imitated, what="held-out answers to imitate")
    pairs = bad.each(plan.pairs, preferred, what="pairs")
    held_out_pairs = bad.each(plan.held_out_pairs, preferred, what="held-out pairs")
    readable = bad.without(held_out)
    askable = [prompt for prompt in readable if context.leaves_room_for_an_answer(prompt)]
    return TokenizedData(
        chat=chat,
        prompts=bad.without(prompts),
        held_out=askable,
        unasked=len(readable) - len(askable),
        demonstrations=bad.without(demonstrations),
        held_out_demonstrations=bad.without(measured),
        pairs=_examples(bad.without(pairs), bad.without(held_out_pairs)) if plan.pairs else None,
        skipped=bad.skipped,
        pad_token_id=chat.stop_token_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
    )


def closing(*parts: object) -> Callable[[], None]:
    """A function that closes what has a `close`, in this order, and only once; an error of one keeps no other open."""
    with ExitStack() as stack:
        for part in reversed(parts):
            close = getattr(part, "close", None)
            if callable(close):
                stack.callback(close)
        return stack.pop_all().close


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Which rows are read in which way."""

    prompts: Sequence[Row]
    demonstrations: Sequence[Row | ConversationRow]
    held_out_demonstrations: Sequence[Row | ConversationRow]
    pairs: Sequence[PreferenceRow]
    held_out_pairs: Sequence[PreferenceRow]
    train_on: TrainOn

    @classmethod
    def of(cls, recipe: Recipe, dataset: Dataset) -> "_Plan":
        pairs, held_out_pairs = (
            (dataset.pairs, dataset.held_out_pairs) if isinstance(dataset, PreferenceData) else ((), ())
        )
        # Where answers are given, nobody answers the prompts that are trained on.
        is_given = bool(pairs) or [*recipe.stages] == ["sft"]
        learns = recipe.sft is not None
        measured = held_out_demonstrations(dataset)[: recipe.evaluation.max_prompts_while_training] if learns else ()
        return cls(
            prompts=() if is_given else dataset.train,
            demonstrations=dataset.demonstrations if learns else (),
            held_out_demonstrations=measured,
            pairs=pairs,
            held_out_pairs=held_out_pairs,
            train_on="all" if recipe.sft is None else recipe.sft.train_on,
        )


def _examples(pairs: Sequence[TokenizedPair], held_out: Sequence[TokenizedPair]) -> DataPairs:
    train, measured = (dpo.prepare([each.tokens for each in part]) for part in (pairs, held_out))
    return DataPairs(train=train, held_out=measured)


def _lesson(row: Row | ConversationRow, chat: Chat, train_on: TrainOn) -> Demonstration | TokenizedConversation:
    if isinstance(row, ConversationRow):
        return chat.conversation(row, train_on=train_on)
    if train_on != "all" or row.answer is None:
        return chat.demonstration(row)
    answered = (*row.messages, {"role": "assistant", "content": row.answer})
    return chat.conversation(row, messages=answered, train_on=train_on)
