"""From raw columns to the kinds of row: which columns make which kind, and in which of their forms.

The forms:

    Row              prompt [answer]
    ConversationRow  messages | conversations (ShareGPT) | prompt + completion | prompt + answer | text; [weight]
    PreferenceRow    prompt + chosen + rejected | chosen + rejected that begin alike; [margin]
    LabelledRow      prompt + completion + label

each with `tools` or without. A prompt or an answer is text or messages. Formats: TRL's dataset formats, and ShareGPT.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import TypeAlias

from rl_algorithms.contracts import Message
from rl_algorithms.data.fields import (
    RawRow,
    check_answers,
    check_messages,
    check_prompt,
    read_answers,
    read_messages,
    read_number,
    read_tools,
)
from rl_algorithms.rows import ConversationRow, DataError, LabelledRow, PreferenceRow, Row, answer_text

__all__ = ["NAMES", "make", "make_row"]

AnyRow: TypeAlias = Row | ConversationRow | PreferenceRow | LabelledRow

SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "observation": "tool",
    "tool": "tool",
}


def make_row(columns: Mapping[str, object], *, where: str) -> Row:
    """Check one prompt's columns and make it a `Row`.

    Raises:
        DataError: `prompt` is missing, empty or neither text nor messages.
    """
    return _row(RawRow(columns=columns, where=where))


def make(kind: type[AnyRow], raw: RawRow) -> AnyRow:
    """A row of `kind`.

    Raises:
        DataError: a column is missing, or is not what it should be.
    """
    return _MAKERS[kind](raw)


def _row(raw: RawRow) -> Row:
    raw.require("prompt")
    return Row(messages=read_messages(raw, "prompt"), columns=raw.columns, where=raw.where, tools=read_tools(raw))


def _answer(raw: RawRow) -> str:
    answer = answer_text(raw.get("answer"))
    if answer is None:
        found = raw.get("answer")
        raise raw.error("answer", f"must be text or a number to imitate, found {type(found).__name__} {found!r:.60}")
    return answer


# -- Conversations -------------------------------------------------------------------------------------------------


def _conversation(raw: RawRow) -> ConversationRow:
    form = _form(raw)
    messages = _FORMS[form](raw)
    if not any(message["role"] == "assistant" and message.get("train", True) for message in messages):
        raise raw.error(form[-1], "has no assistant's message to train on")
    weight = read_number(raw, "weight", default=1.0)
    if weight < 0:
        raise raw.error("weight", f"must not be negative, found {weight!r}")
    return ConversationRow(
        messages=messages, columns=raw.columns, where=raw.where, tools=read_tools(raw), weight=weight
    )


def _form(raw: RawRow) -> tuple[str, ...]:
    # Columns that the caller mapped are meant, whatever else the row has.
    forms = sorted(_FORMS, key=lambda form: -len(set(form) & set(raw.names)))
    for form in forms:
        if all(raw.get(name) is not None for name in form):
            return form
    wanted = ", or ".join(" + ".join(map(repr, form)) for form in _FORMS)
    raise DataError(
        f"{raw.where}: the fields of a conversation are missing: {wanted}; "
        f"the row has {', '.join(map(repr, raw.columns)) or 'no fields'}"
    )


def _spoken(raw: RawRow) -> tuple[Message, ...]:
    return check_messages(raw, "messages", value=raw.get("messages"))


def _sharegpt(raw: RawRow) -> tuple[Message, ...]:
    turns = raw.get("conversations")
    if isinstance(turns, list):
        turns = [_sharegpt_turn(raw, index=index, turn=turn) for index, turn in enumerate(turns)]
    return check_messages(raw, "conversations", value=turns)


def _sharegpt_turn(raw: RawRow, *, index: int, turn: object) -> object:
    if not isinstance(turn, Mapping) or turn.get("from") is None:
        return turn  # many such files have `role` and `content` all the same
    sender = turn["from"]
    if not isinstance(sender, str) or sender not in SHAREGPT_ROLES:
        known = ", ".join(SHAREGPT_ROLES)
        raise raw.error("conversations", f"must be one of {known}, found {sender!r:.60}", path=f"[{index}].from")
    rest = {key: value for key, value in turn.items() if key not in {"from", "value"}}
    return {**rest, "role": SHAREGPT_ROLES[sender], "content": turn.get("value")}


def _completed(raw: RawRow) -> tuple[Message, ...]:
    return (*_context(raw), *read_answers(raw, "completion"))


def _answered(raw: RawRow) -> tuple[Message, ...]:
    return (*_context(raw), {"role": "assistant", "content": _answer(raw)})


def _context(raw: RawRow) -> tuple[Message, ...]:
    # Answers within a prompt are given, not to be imitated, unless they say otherwise.
    return tuple(
        {"train": False, **message} if message["role"] == "assistant" else message
        for message in read_messages(raw, "prompt")
    )


def _plain_text(raw: RawRow) -> tuple[Message, ...]:
    text = raw.get("text")
    if not isinstance(text, str) or not text:
        raise raw.error("text", f"must be text that is not empty, found {type(text).__name__} {text!r:.60}")
    return ({"role": "assistant", "content": text},)


_FORMS: dict[tuple[str, ...], Callable[[RawRow], tuple[Message, ...]]] = {
    ("messages",): _spoken,
    ("conversations",): _sharegpt,
    ("prompt", "completion"): _completed,
    ("prompt", "answer"): _answered,
    ("text",): _plain_text,
}


# -- Preferences ---------------------------------------------------------------------------------------------------


def _preference(raw: RawRow) -> PreferenceRow:
    chosen, rejected = raw.require("chosen"), raw.require("rejected")
    if chosen == rejected and chosen is not None:
        raise raw.error("chosen", "is the same as the rejected one, so that there is nothing to prefer")
    if isinstance(chosen, str) and isinstance(rejected, str):
        prompt, answers = _text_pair(raw, chosen, rejected)
    else:
        prompt, answers = _message_pair(raw)
    return PreferenceRow(
        messages=prompt,
        chosen=answers[0],
        rejected=answers[1],
        columns=raw.columns,
        where=raw.where,
        tools=read_tools(raw),
        margin=read_number(raw, "margin", default=0.0),
    )


Pair: TypeAlias = tuple[tuple[Message, ...], tuple[Message, ...]]


def _text_pair(raw: RawRow, chosen: str, rejected: str) -> tuple[tuple[Message, ...], Pair]:
    if raw.get("prompt") is not None:
        return read_messages(raw, "prompt"), (_said(chosen), _said(rejected))
    alike = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
    # Back to a space, which the answers keep, so that no word is cut. Where exactly matters little: what both answers
    # begin with cancels out of a difference of log-probabilities.
    cut = max((index for index in range(alike) if chosen[index].isspace()), default=0)
    prompt = chosen[:cut]
    if not prompt.strip():
        raise raw.error(
            "chosen",
            "begins with no whole word, up to a space, that 'rejected' begins with, too, so that they hold no prompt; "
            "add a field 'prompt'",
        )
    return ({"role": "user", "content": prompt},), (_said(chosen[cut:]), _said(rejected[cut:]))


def _said(text: str) -> tuple[Message, ...]:
    return ({"role": "assistant", "content": text},)


def _message_pair(raw: RawRow) -> tuple[tuple[Message, ...], Pair]:
    spoken = {name: _turns(raw, name) for name in ("chosen", "rejected")}
    given = read_messages(raw, "prompt") if raw.get("prompt") is not None else ()
    if given and all(messages[0]["role"] == "assistant" for messages in spoken.values()):
        return given, (_checked(raw, "chosen", spoken["chosen"]), _checked(raw, "rejected", spoken["rejected"]))
    alike = _num_alike(spoken["chosen"], spoken["rejected"])
    prompt = spoken["chosen"][:alike]
    if not prompt:
        raise raw.error(
            "chosen",
            "begins with no message that 'rejected' begins with, too, so that they hold no prompt; add a field "
            "'prompt'",
        )
    if prompt[-len(given) :] != given and given:
        raise raw.error("chosen", "and 'rejected' begin with another prompt than that of the field 'prompt'")
    check_prompt(raw, "chosen", messages=prompt)
    answers = {name: messages[alike:] for name, messages in spoken.items()}
    return prompt, (_checked(raw, "chosen", answers["chosen"]), _checked(raw, "rejected", answers["rejected"]))


def _turns(raw: RawRow, name: str) -> tuple[Message, ...]:
    value = raw.get(name)
    return _said(value) if isinstance(value, str) else check_messages(raw, name, value=value)


def _num_alike(first: tuple[Message, ...], second: tuple[Message, ...]) -> int:
    same = (left == right for left, right in zip(first, second, strict=False))
    alike = sum(1 for _ in itertools.takewhile(bool, same))
    while alike and first[alike - 1]["role"] == "assistant":  # an answer that both begin with is still an answer
        alike -= 1
    return alike


def _checked(raw: RawRow, name: str, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    if not messages:
        raise raw.error(name, "is the prompt without an answer")
    return check_answers(raw, name, messages=messages)


# -- Labelled answers ----------------------------------------------------------------------------------------------


def _labelled(raw: RawRow) -> LabelledRow:
    label = raw.require("label")
    if label not in (0, 1) or not isinstance(label, int):  # Parquet often has numbers for truth values
        raise raw.error("label", f"must be true or false, found {type(label).__name__} {label!r:.60}")
    return LabelledRow(
        messages=read_messages(raw, "prompt"),
        completion=read_answers(raw, "completion"),
        label=bool(label),
        columns=raw.columns,
        where=raw.where,
        tools=read_tools(raw),
    )


_MAKERS: dict[type[AnyRow], Callable[[RawRow], AnyRow]] = {
    Row: _row,
    ConversationRow: _conversation,
    PreferenceRow: _preference,
    LabelledRow: _labelled,
}

NAMES: dict[type[AnyRow], tuple[str, ...]] = {
    Row: ("prompt", "answer", "tools"),
    ConversationRow: (*dict.fromkeys(itertools.chain.from_iterable(_FORMS)), "tools", "weight"),
    PreferenceRow: ("prompt", "chosen", "rejected", "margin", "tools"),
    LabelledRow: ("prompt", "completion", "label", "tools"),
}
"""The columns that each kind is made from, by our names."""
