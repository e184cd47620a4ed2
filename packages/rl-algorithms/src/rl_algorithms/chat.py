"""Between text and token ids: prompts in, answers out, through a tokenizer of Hugging Face's shape.

Imports no tokenizer library: `Tokenizer` says what is used of one. Sampled tokens are trained on as they are; nothing
here ever re-tokenises them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from rl_algorithms.contracts import Message
from rl_algorithms.data import DataError, Row

__all__ = ["Chat", "Demonstration", "Prompt", "PromptFormat", "Tokenizer"]

PromptFormat: TypeAlias = Literal["chat", "plain"]


@runtime_checkable
class Tokenizer(Protocol):
    """What is used of a `transformers` tokenizer."""

    chat_template: str | None
    eos_token_id: int | None

    def __len__(self) -> int:
        """How many tokens it knows."""

    def __call__(self, text: str, *, add_special_tokens: bool) -> Mapping[str, list[int]]:
        """Token ids of `text`, as `["input_ids"]`."""

    def apply_chat_template(
        self, conversation: Sequence[Message], *, add_generation_prompt: bool, tokenize: Literal[False]
    ) -> str:
        """The conversation as the text that the model was trained on."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A row made ready for an engine."""

    tokens: tuple[int, ...]
    """Token ids, up to where the answer begins."""

    row: Row
    """Where it comes from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A row with its answer, made ready for SFT."""

    tokens: tuple[int, ...]
    """Prompt and answer, the stop token included."""

    prompt_length: int
    """How many of `tokens` are the prompt."""

    row: Row
    """Where it comes from."""


class Chat:
    """Turns rows into token ids and token ids into answers, in one prompt format.

    Args:
        tokenizer: of the policy's vocabulary.
        prompt_format: `"chat"` renders messages with the tokenizer's chat template; `"plain"` concatenates their text.
        stop_token_ids: the tokens that end an answer; the first is what a demonstration in plain format ends with.

    Raises:
        ValueError: `"chat"` without a chat template, or no stop token.
    """

    def __init__(self, tokenizer: Tokenizer, *, prompt_format: PromptFormat, stop_token_ids: Sequence[int]) -> None:
        if prompt_format == "chat" and not tokenizer.chat_template:
            raise ValueError(
                "prompt_format='chat' needs a tokenizer with a chat template, and this one has none; "
                "set it to 'plain' (text as it is, no roles), or give the tokenizer a template"
            )
        if not stop_token_ids:
            raise ValueError("answers need a stop token, and the tokenizer has no end-of-sequence token; set eos_token")
        self._tokenizer = tokenizer
        self._format = prompt_format
        self.stop_token_ids = tuple(stop_token_ids)

    def prompt(self, row: Row) -> Prompt:
        """The row's messages as token ids, ready for the answer to be sampled.

        Raises:
            DataError: the tokenizer has no token for a part of it.
        """
        return Prompt(tokens=self._encode(self._render(row), row, begins=True), row=row)

    def demonstration(self, row: Row) -> Demonstration:
        """The row's messages and its answer, ended by a stop token.

        Raises:
            DataError: the row has no answer; or the template renders a conversation with the answer as something else
                than the prompt followed by the answer and a stop token, so that the answer's tokens are not known.
        """
        if row.answer is None:
            raise DataError(
                f"{row.where}: field 'answer' is missing, and SFT needs it as the demonstration; "
                f"add it to every row, or switch SFT off"
            )
        prompt = self.prompt(row).tokens
        tokens = self._with_answer(row, row.answer)
        if tokens[: len(prompt)] != prompt:
            raise DataError(
                f"{row.where}: the chat template renders the prompt differently once an answer follows it, so the "
                f"answer's tokens cannot be told from the prompt's; use a prefix-preserving template"
            )
        stops = [index for index in range(len(prompt), len(tokens)) if tokens[index] in self.stop_token_ids]
        if not stops:
            raise DataError(
                f"{row.where}: the rendered answer has no stop token (ids {self.stop_token_ids}), so the policy would "
                f"never learn to stop; the chat template must end a turn with the end-of-sequence token"
            )
        return Demonstration(tokens=tokens[: stops[-1] + 1], prompt_length=len(prompt), row=row)

    def text(self, tokens: Sequence[int]) -> str:
        """An answer as text, without the stop token that ends it.

        Other special tokens stay visible, and ids beyond the tokenizer's, which a padded embedding may give: leaving
        them out would make an answer that is wrong look right.
        """
        answer = tokens[:-1] if tokens[-1] in self.stop_token_ids else tokens
        if max(answer, default=0) < len(self._tokenizer):
            return self._tokenizer.decode(answer, skip_special_tokens=False)
        return "".join(
            self._tokenizer.decode([token], skip_special_tokens=False) if token < len(self._tokenizer) else f"<{token}>"
            for token in answer
        )

    def _with_answer(self, row: Row, answer: str) -> tuple[int, ...]:
        if self._format == "plain":
            return (*self.prompt(row).tokens, *self._encode(answer, row), self.stop_token_ids[0])
        return self._encode(self._render(row, answer=answer), row)

    def _render(self, row: Row, *, answer: str | None = None) -> str:
        if self._format == "plain":
            return "".join(message["content"] for message in row.messages)
        ended: tuple[Message, ...] = () if answer is None else ({"role": "assistant", "content": answer},)
        try:
            return self._tokenizer.apply_chat_template(
                [*row.messages, *ended], add_generation_prompt=answer is None, tokenize=False
            )
        except Exception as error:  # a template raises what it likes, as for a role that it does not know
            raise DataError(f"{row.where}: the chat template refuses the messages: {error}") from error

    def _encode(self, text: str, row: Row, *, begins: bool = False) -> tuple[int, ...]:
        # A template writes its own special tokens; adding them again would double the beginning-of-sequence token.
        special = begins and self._format == "plain"
        try:
            tokens = self._tokenizer(text, add_special_tokens=special)["input_ids"]
        except Exception as error:  # tokenizers raise a bare Exception for a character that they do not know
            raise DataError(f"{row.where}: the tokenizer cannot encode {text!r}: {error}") from error
        if not tokens:
            raise DataError(f"{row.where}: {text!r} has no tokens")
        return tuple(tokens)
