"""A `Dataset` as token ids: prompts to sample, demonstrations to imitate, pairs to compare, and their held-out kin.

One row may serve several of these. A row that one of them cannot use, because the model has no token for it or because
it does not fit into the model's context, stops the reading, or is left out of all of them and counted.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

from rl_algorithms import dpo
from rl_algorithms.chat import Chat, Demonstration, Prompt, TokenizedConversation, TrainOn
from rl_algorithms.data import ConversationRow, DataError, Dataset, LabelledRow, PreferenceRow, Row, SkippedRows
from rl_algorithms.data.datasets import LabelledData, PreferenceData, held_out_demonstrations
from rl_algorithms.preferences.labelled import LabelledAnswer, answers_from_rows
from rl_algorithms.preferences.pairs import Pair, pairs_from_rows
from rl_algorithms.preferences.scored import PairExamples, prepare_pairs

__all__ = ["Imitated", "LabelledAnswers", "PreferenceExamples", "TokenizedData", "rows_digest", "tokenize"]

Imitated: TypeAlias = Demonstration | TokenizedConversation
"""A tokenized row for SFT."""

AnyRow = TypeVar("AnyRow", bound=Row | ConversationRow | PreferenceRow | LabelledRow)
MadeT = TypeVar("MadeT")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceExamples:
    """Given pairs as tokens; the reference's log-probabilities are still unknown."""

    train: dpo.Examples
    """Pairs to learn from."""

    held_out: dpo.Examples
    """Pairs of prompts that no stage trains on."""

    scored: PairExamples
    """`train` for a reward model, with the margins of the data."""

    held_out_scored: PairExamples
    """`held_out` likewise."""

    @classmethod
    def of(cls, train: Sequence[Pair], held_out: Sequence[Pair]) -> "PreferenceExamples":
        """Pad both, for every algorithm that learns from pairs."""
        return cls(
            train=dpo.prepare(train),
            held_out=dpo.prepare(held_out),
            scored=prepare_pairs(train),
            held_out_scored=prepare_pairs(held_out),
        )

    def digest(self) -> str:
        """SHA-256 of all tokens in order, of which of them are trainable, and of the margins."""
        digest = hashlib.sha256()
        for examples, scored in ((self.train, self.scored), (self.held_out, self.held_out_scored)):
            for tensor in (examples.tokens, examples.lengths, examples.trainable, scored.margin):
                _add(digest, tensor)
        return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledAnswers:
    """Given responses as tokens, each good or bad."""

    train: list[LabelledAnswer]
    """Responses to learn from."""

    held_out: list[LabelledAnswer]
    """Responses to prompts that no stage trains on."""

    def digest(self) -> str:
        """SHA-256 of all tokens in order, of which of them are trainable, and of the labels."""
        digest = hashlib.sha256()
        for answers in (self.train, self.held_out):
            for answer in answers:
                digest.update(json.dumps([answer.tokens, answer.trainable, answer.desirable]).encode() + b"\n")
            digest.update(b"%d\n" % len(answers))
        return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedData:
    """The rows as tokens."""

    chat: Chat
    """What tokenized them."""

    prompts: list[Prompt]
    """Prompts to sample responses to; empty where responses are given."""

    held_out: list[Prompt]
    """Held-out prompts that a response fits behind."""

    held_out_too_long: int
    """Further held-out prompts that leave no room for a response, where none of them is scored."""

    demonstrations: list[Imitated]
    """What SFT imitates; empty without SFT."""

    held_out_demonstrations: list[Imitated]
    """What its loss is measured on; empty without SFT or without held-out responses."""

    pairs: PreferenceExamples | None
    """Pairs of a `PreferenceData`; None of any other."""

    labelled: LabelledAnswers | None = None
    """Responses of a `LabelledData`; None of any other."""

    skipped: SkippedRows
    """Which rows were left out, while reading or since."""


def tokenize(
    dataset: Dataset,
    chat: Chat,
    *,
    context_length: int | None,
    max_new_tokens: int,
    sample: bool = True,
    score: bool = True,
    imitate: TrainOn | None = None,
    max_held_out_demonstrations: int | None = None,
    skipped: SkippedRows | None = None,
    skip_bad_rows: bool = False,
) -> TokenizedData:
    """Tokenize what training needs of `dataset`.

    Args:
        dataset: its rows.
        chat: renders and tokenizes them.
        context_length: tokens that the model can read (`max_position_embeddings`); None if unknown.
        max_new_tokens: tokens that must fit behind a prompt.
        sample: whether responses to the training prompts are sampled. Never where pairs or labels are given.
        score: whether responses to held-out prompts are scored. If not, those that do not fit are counted, not refused.
        imitate: which messages SFT trains on; None without SFT.
        max_held_out_demonstrations: at most so many of them are tokenized.
        skipped: what reading left out; it is copied, not changed.
        skip_bad_rows: leave rows out that cannot be used, instead of refusing the first.

    Raises:
        DataError: naming the row that cannot be tokenized or is too long; or with `skip_bad_rows`, all rows of a kind.
    """
    skipped = SkippedRows() if skipped is None else replace(skipped, first=[*skipped.first])
    usable = _UsableRows(skipped, skip=skip_bad_rows)
    too_long = "leave such rows out (data.on_bad_row=skip in a recipe)"

    def fits(prompt: Prompt) -> bool:
        return context_length is None or len(prompt.tokens) + max_new_tokens <= context_length

    def sampled(row: Row) -> Prompt:
        prompt = chat.prompt(row)
        if not fits(prompt):
            raise DataError(
                f"{row.where}: the prompt has {len(prompt.tokens)} tokens, and with max_new_tokens={max_new_tokens} "
                f"(policy.generation.max_new_tokens in a recipe) it does not fit into the model's context of "
                f"{context_length} (max_position_embeddings); shorten it, lower max_new_tokens, or {too_long}"
            )
        return prompt

    def refuse_longer(length: int, said: str) -> None:
        if context_length is not None and length > context_length:
            raise DataError(
                f"{said} {length} tokens, and the model's context is {context_length} (max_position_embeddings); "
                f"shorten the response, or {too_long}"
            )

    def imitated(row: Row | ConversationRow) -> Imitated:
        made = _demonstration(row, chat, imitate or "all")
        said = "prompt and response have" if isinstance(made, Demonstration) else "the conversation has"
        refuse_longer(len(made.tokens), f"{row.where}: {said}")
        return made

    def compared(row: PreferenceRow) -> Pair:
        (pair,) = pairs_from_rows([row], chat)
        for name, tokens in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            refuse_longer(len(tokens), f"{row.where}: field '{name}': prompt and response have")
        return pair

    def judged(row: LabelledRow) -> LabelledAnswer:
        (answer,) = answers_from_rows([row], chat)
        refuse_longer(len(answer.tokens), f"{row.where}: prompt and response have")
        return answer

    given = dataset if isinstance(dataset, PreferenceData) else None
    single = dataset if isinstance(dataset, LabelledData) else None
    samples = sample and given is None and single is None
    measured = held_out_demonstrations(dataset)[:max_held_out_demonstrations] if imitate else ()
    # Every kind is tokenized before any is filtered: a row that one kind cannot use is left out of the others too.
    prompts = usable.each(dataset.train if samples else (), sampled, kind="prompts")
    held_out = usable.each(dataset.held_out, sampled if score else chat.prompt, kind="held-out prompts")
    demonstrations = usable.each(dataset.demonstrations if imitate else (), imitated, kind="responses to imitate")
    held_out_imitated = usable.each(measured, imitated, kind="held-out responses to imitate")
    pairs = usable.each(given.pairs if given else (), compared, kind="pairs")
    held_out_pairs = usable.each(given.held_out_pairs if given else (), compared, kind="held-out pairs")
    labelled = usable.each(single.labelled if single else (), judged, kind="responses")
    held_out_labelled = usable.each(single.held_out_labelled if single else (), judged, kind="held-out responses")
    readable = held_out()
    short_enough = [prompt for prompt in readable if fits(prompt)]
    return TokenizedData(
        chat=chat,
        prompts=prompts(),
        held_out=short_enough,
        held_out_too_long=len(readable) - len(short_enough),
        demonstrations=demonstrations(),
        held_out_demonstrations=held_out_imitated(),
        pairs=PreferenceExamples.of(pairs(), held_out_pairs()) if given else None,
        labelled=LabelledAnswers(train=labelled(), held_out=held_out_labelled()) if single else None,
        skipped=skipped,
    )


@dataclass(slots=True)
class _UsableRows:
    """Which rows cannot be used, each counted once."""

    skipped: SkippedRows
    skip: bool
    """False: the first bad row is an error."""

    reasons: dict[str, DataError] = field(default_factory=dict)
    """Why a row cannot be used, by its place."""

    def each(self, rows: Sequence[AnyRow], make: Callable[[AnyRow], MadeT], *, kind: str) -> Callable[[], list[MadeT]]:
        """Make every row; the returned function gives those that are good, and is called when all kinds were made."""
        made: list[tuple[str, Any]] = []
        for row in rows:
            try:
                made.append((row.where, make(row)))
            except DataError as error:
                if not self.skip:
                    raise
                if row.where not in self.reasons:
                    self.reasons[row.where] = error
                    self.skipped.leave_out(error)

        def good() -> list[MadeT]:
            kept = [each for where, each in made if where not in self.reasons]
            if rows and not kept:
                first = next(self.reasons[row.where] for row in rows if row.where in self.reasons)
                raise DataError(f"none of the {len(rows)} {kind} can be used; the first: {first}")
            return kept

        return good


def _demonstration(row: Row | ConversationRow, chat: Chat, train_on: TrainOn) -> Imitated:
    if isinstance(row, ConversationRow):
        return chat.conversation(row, train_on=train_on)
    if train_on != "all" or row.answer is None:
        return chat.demonstration(row)
    answered = (*row.messages, {"role": "assistant", "content": row.answer})
    return chat.conversation(row, messages=answered, train_on=train_on)


def rows_digest(
    groups: Iterable[Sequence[Prompt | Imitated]], *given: PreferenceExamples | LabelledAnswers | None
) -> str:
    """SHA-256 of tokens and columns of rows in order, and of given responses: equal in every process for equal data."""
    digest = hashlib.sha256()
    for rows in groups:
        digest.update(b"%d\n" % len(rows))
        for row in rows:
            digest.update(json.dumps([row.tokens, _plain(getattr(row.row, "columns", {}))]).encode() + b"\n")
    for each in given:
        if each is not None:
            digest.update(each.digest().encode())
    return digest.hexdigest()


def _add(digest: Any, tensor: Tensor) -> None:
    digest.update(f"{tuple(tensor.shape)}\n".encode())
    digest.update(tensor.contiguous().numpy().data)


def _plain(value: object) -> Any:
    """Return a column's value in a form that is the same in every process: no memory addresses, no set order."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {
            "mapping": sorted(([repr(key), _plain(inner)] for key, inner in value.items()), key=lambda pair: pair[0])
        }
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, set | frozenset):
        return {"set": sorted(map(repr, value))}
    text = repr(value)
    return {"type": type(value).__qualname__, "text": "" if " at 0x" in text else text}
