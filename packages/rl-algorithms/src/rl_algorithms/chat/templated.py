"""Chat format: messages through the tokenizer's chat template, and what to do where a template hides what is whose.

A template gives text, not whose tokens are whose. An answer's tokens are found in one of three ways: by the template's
own `{% generation %}` marks; by rendering k and k + 1 messages and requiring that the one continues the other; or,
where a template renders an answer differently once others follow it (Qwen3 leaves out the thinking of earlier turns),
turn by turn: each answer as it is rendered while it is the last, and between two of them what an episode of several
turns is given there. The row is then token for token what the policy would have sampled.

What stands between a sampled answer and the next is found by rendering the conversation with a word that occurs nowhere
else in the answer's place, and taking what follows it.

What an observation says is text: where it spells a special token, it is tokenised in pieces that hold none.
"""

import contextlib
import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rl_algorithms.chat.showing import Shown, unused
from rl_algorithms.chat.tokenizer import Encoded, SpecialTokens, TextError, Tokenizer, encode, shared_length
from rl_algorithms.chat.transcript import Answered, Span, Transcript
from rl_algorithms.contracts import Message
from rl_algorithms.rows import DataError

__all__ = ["Templated"]

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


class _RenderedDifferentlyError(DataError):
    """A message is rendered differently once others follow it."""


class _MergedTokensError(DataError):
    """A token spans the end of the prompt and the start of the answer."""


class Templated:
    """Messages to token ids, through a chat template."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        special: SpecialTokens,
        stop_token_ids: tuple[int, ...],
        template_options: Mapping[str, object],
    ) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._stops = stop_token_ids
        self._options = dict(template_options)
        self._shown = Shown(lambda transcript, asks: self._text(transcript, asks=asks))
        self._template = str(tokenizer.chat_template)  # some tokenizers have several, by name
        for name in template_options:
            if not re.search(rf"\b{re.escape(name)}\b", self._template):
                raise ValueError(
                    f"template_options has {name!r}, which the tokenizer's chat template never reads; "
                    f"mend the name, or leave it out"
                )

    def prompt(self, transcript: Transcript) -> tuple[int, ...]:
        """All messages, up to where the answer begins."""
        tokens = self._encode(self._text(transcript, asks=True), transcript)
        self._shown.check(transcript, _others(transcript), asks=True)
        return tokens

    def between(self, transcript: Transcript, observations: Sequence[Message], *, stopped: bool) -> tuple[int, ...]:
        """What the template writes after an answer to `transcript`, without the stop token if that was sampled."""
        blank = unused("answer", (*transcript.messages, *observations))
        border = unused("border", (*transcript.messages, *observations))
        answered = transcript.then({"role": "assistant", "content": blank})
        _, ending = self._around(blank, self._text(answered, asks=False), transcript)
        cut = [self._cut(message, border, transcript.where) for message in observations]
        observed, count = answered.then(*cut), len(answered.messages)
        head, rest = self._around(blank, self._text(observed, asks=True), transcript)
        self._check_start(head, transcript)
        self._shown.check(observed, range(count, len(observed.messages)), asks=True, first=count)
        if rest.count(border) != repr(cut).count(border):
            raise TextError(
                f"{transcript.where}: the observations spell special tokens "
                f"({', '.join(self._special.found_in(repr(observations)))}), and the chat template does not render "
                f"their text as it is, so they cannot be told from its own; remove them from what is said"
            )
        tokens = tuple(token for piece in rest.split(border) for token in self._encode(piece, transcript))
        wanted = self._ending(ending, transcript)
        if tokens[: len(wanted)] != wanted:
            raise DataError(
                f"{transcript.where}: the chat template ends an answer differently once observations follow "
                f"({ending!r:.60} alone, {rest!r:.60} before them); use one that only appends, or one turn"
            )
        return tokens[len(wanted) :] if stopped else tokens[len(wanted) - 1 :]

    def answered(self, transcript: Transcript, learnt: Sequence[int]) -> Answered:
        """All tokens, and where the answers `learnt` stand, each with the stop token that ends it."""
        if learnt and GENERATION_MARK.search(self._template):
            return self._checked(transcript, learnt, self._marked(transcript, learnt))
        return self.continued(transcript, learnt)

    def continued(self, transcript: Transcript, learnt: Sequence[int]) -> Answered:
        """As `answered`, and what comes before each answer is exactly what an engine would be asked."""
        return self._checked(transcript, learnt, self._compared(transcript, learnt))

    def _checked(self, transcript: Transcript, learnt: Sequence[int], answered: Answered) -> Answered:
        self._shown.check(transcript, sorted({*_others(transcript), *learnt}), asks=False)
        return answered

    # -- By the template's marks -----------------------------------------------------------------------------------

    def _marked(self, transcript: Transcript, learnt: Sequence[int]) -> Answered:
        rendered = self._apply(
            transcript, asks=False, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        tokens = tuple(rendered["input_ids"])
        marks = self._marks(tokens, rendered["assistant_masks"])
        if len(marks) != len(transcript.answers):
            raise DataError(
                f"{transcript.where}: the chat template's {{% generation %}} marks {len(marks)} answers, and the "
                f"conversation has {len(transcript.answers)}; the marks must enclose each assistant message by itself, "
                f"and no message may be empty"
            )
        # The stop token may stand right behind the mark.
        spans = [(start, self._end(tokens[: end + 1], start, transcript.where)) for start, end in marks]
        return tokens, [spans[transcript.answers.index(index)] for index in learnt]

    def _marks(self, tokens: tuple[int, ...], mask: Sequence[int]) -> list[Span]:
        """Runs of marked tokens; transformers ends one at its last character's first token, and there may be more."""
        spans: list[Span] = []
        for place, token in enumerate(tokens):
            goes_on = bool(spans) and spans[-1][1] == place
            if mask[place] and not goes_on:
                spans.append((place, place + 1))
            elif goes_on and (mask[place] or (token not in self._stops and self._is_cut(tokens[slice(*spans[-1])]))):
                spans[-1] = (spans[-1][0], place + 1)
        return spans

    def _is_cut(self, tokens: Sequence[int]) -> bool:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False).endswith("\ufffd")

    def _end(self, tokens: tuple[int, ...], start: int, where: str) -> int:
        """One after the stop token of the answer that begins at `start`: where sampling would have ended."""
        stops = [place for place in range(start, len(tokens)) if tokens[place] in self._stops]
        if not stops:
            raise DataError(self._endless(where, tokens[start:]))
        rest = [token for token in tokens[stops[0] : stops[-1]] if token not in self._stops]
        if rest and self._tokenizer.decode(rest, skip_special_tokens=False).strip():
            raise DataError(
                f"{where}: an answer has the stop token {tokens[stops[0]]} in its middle, where sampling would have "
                f"ended; remove it from the message, or from stop_token_ids"
            )
        return stops[0] + 1

    # -- By comparing renderings -----------------------------------------------------------------------------------

    def _compared(self, transcript: Transcript, learnt: Sequence[int]) -> Answered:
        whole = self._whole(transcript)
        try:
            return whole.tokens, [self._answer(transcript, index, whole=whole) for index in learnt]
        except _RenderedDifferentlyError as error:
            try:
                return self._turn_by_turn(transcript, learnt)
            except _MergedTokensError:
                raise
            except DataError:
                raise DataError(f"{error}; {self._advice(transcript, learnt)}") from error

    def _whole(self, transcript: Transcript) -> Encoded:
        return Encoded(self._tokenizer, self._special, self._text(transcript, asks=False), where=transcript.where)

    def _turn_by_turn(self, transcript: Transcript, learnt: Sequence[int]) -> Answered:
        """The conversation as it would have been sampled: prompt, answer, observations, answer, and so on."""
        tokens: tuple[int, ...] = ()
        spans: list[Span] = []
        previous = -1
        for index in transcript.answers:
            alone = transcript.upto(index + 1)
            answered = self._whole(alone)
            start, end = self._answer(alone, index, whole=answered)
            if previous < 0:
                tokens = answered.tokens[:start]
            else:
                observations = transcript.messages[previous + 1 : index]
                tokens += self.between(transcript.upto(previous), observations, stopped=True)
            if index in learnt:
                spans.append((len(tokens), len(tokens) + end - start))
            tokens += answered.tokens[start:end]
            previous = index
        return tokens, spans

    def _advice(self, transcript: Transcript, learnt: Sequence[int]) -> str:
        """What helps with this conversation, as tried out."""
        helps = []
        with contextlib.suppress(DataError):
            if [*learnt] != transcript.answers[-1:]:
                self._answer(transcript, transcript.answers[-1], whole=self._whole(transcript))
                helps.append("train_on='last_turn'")
        if "enable_thinking" in self._template and "enable_thinking" not in self._options:
            other = copy.copy(self)
            other._options = {**self._options, "enable_thinking": False}  # noqa: SLF001 - our own
            with contextlib.suppress(DataError):
                other._compared(transcript, learnt)  # noqa: SLF001
                helps.append("template_options={'enable_thinking': False} (data.chat_template_kwargs in a recipe)")
        return f"use {', or '.join([*helps, 'a template that only appends', 'one with {% generation %} marks'])}"

    def _answer(self, transcript: Transcript, index: int, *, whole: Encoded) -> Span:
        asked = self._text(transcript.upto(index), asks=True)
        before, tokens = whole.of(asked), whole.tokens
        if tokens[: len(before)] != before:
            raise self._no_prefix(transcript, index, merged=whole.text.startswith(asked))
        through = tokens
        if index + 1 < len(transcript.messages):
            through = whole.of(self._text(transcript.upto(index + 1), asks=False))
        end = self._end(through, len(before), transcript.where)
        if tokens[:end] != through[:end]:
            raise self._no_prefix(transcript, index + 1, merged=False)
        return len(before), end

    def _no_prefix(self, transcript: Transcript, index: int, *, merged: bool) -> DataError:
        if merged:
            return _MergedTokensError(
                f"{transcript.where}: the tokenizer merges the end of the prompt with the start of messages[{index}], "
                f"{transcript.messages[index].get('content')!r:.20}, so its tokens are not what is sampled after the "
                f"prompt; begin the answer without white space"
            )
        return _RenderedDifferentlyError(
            f"{transcript.where}: the chat template renders the prompt differently once an answer or a reply follows "
            f"it (messages[:{index}] is not how the rest begins), so the answer's tokens cannot be told from the "
            f"prompt's"
        )

    # -- Checks of what follows an answer --------------------------------------------------------------------------

    def _around(self, blank: str, text: str, transcript: Transcript) -> tuple[str, str]:
        head, found, rest = text.partition(blank)
        if not found or blank in rest:
            raise DataError(
                f"{transcript.where}: the chat template renders an answer {text.count(blank)} times once something "
                f"follows it, so what stands between two answers cannot be known; use a template that keeps earlier "
                f"turns, or one turn"
            )
        return head, rest

    def _check_start(self, head: str, transcript: Transcript) -> None:
        start = transcript.upto(min(transcript.answers, default=len(transcript.messages)))
        # Neither what asks for an answer nor what ends a conversation without one needs to stand there again.
        alone, asking = self._text(start, asks=False), self._text(start, asks=True)
        if not head.startswith(alone[: shared_length(alone, asking)]):
            raise DataError(
                f"{transcript.where}: the chat template moves or drops the start of the conversation once it goes on, "
                f"while sampled tokens stay where they are; use a template that only appends, or one turn"
            )

    def _ending(self, ending: str, transcript: Transcript) -> tuple[int, ...]:
        """The tokens that end an answer, up to and including the stop token."""
        tokens = self._encode(ending, transcript) if ending else ()
        stops = [index for index, token in enumerate(tokens) if token in self._stops]
        if not stops:
            raise DataError(self._endless(transcript.where, tokens))
        return tokens[: stops[0] + 1]

    def _endless(self, where: str, tokens: Sequence[int]) -> str:
        return (
            f"{where}: the rendered answer has no stop token (ids {self._stops}, its end is {list(tokens[-8:])}), so "
            f"the policy would never learn to stop; the chat template must end a turn with one, and inside its "
            f"{{% generation %}} block if it has that"
        )

    def _cut(self, said: Any, border: str, where: str) -> Any:
        """The same with a border in each special token that a text in it spells; the role is the template's."""
        if isinstance(said, str):
            return border.join(self._special.pieces(said, where=where))
        if isinstance(said, Mapping):
            return {key: value if key == "role" else self._cut(value, border, where) for key, value in said.items()}
        return [self._cut(each, border, where) for each in said] if isinstance(said, list | tuple) else said

    # -- The template and the tokenizer ----------------------------------------------------------------------------

    def _text(self, transcript: Transcript, *, asks: bool) -> str:
        return str(self._apply(transcript, asks=asks, tokenize=False))

    def _apply(self, transcript: Transcript, *, asks: bool, tokenize: bool, **options: object) -> Any:
        if transcript.tools:
            if not re.search(r"\btools\b", self._template):
                raise DataError(
                    f"{transcript.where}: there are tools, and the tokenizer's chat template never reads them; "
                    f"use a template that does, or describe the tools in a message"
                )
            options["tools"] = [dict(tool) for tool in transcript.tools]
        try:
            return self._tokenizer.apply_chat_template(
                list(transcript.messages), add_generation_prompt=asks, tokenize=tokenize, **self._options, **options
            )
        except Exception as error:  # a template raises what it likes, as for a role that it does not know
            if not transcript.messages:
                raise DataError(
                    f"{transcript.where}: the conversation begins with the assistant's message, and the chat template "
                    f"cannot say what stands before it; put a user's or a system message there, or leave it out"
                ) from error
            raise DataError(f"{transcript.where}: the chat template refuses the messages: {error}") from error

    def _encode(self, text: str, transcript: Transcript) -> tuple[int, ...]:
        # A template writes its own special tokens; adding them again would double the beginning-of-sequence token.
        return encode(self._tokenizer, text, where=transcript.where)


def _others(transcript: Transcript) -> list[int]:
    """All but the answers, of which a template may drop earlier ones."""
    return [index for index in range(len(transcript.messages)) if index not in transcript.answers]
