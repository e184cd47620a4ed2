"""What is used of a tokenizer of Hugging Face's shape."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from rl_algorithms.contracts import Message
from rl_algorithms.data import DataError

__all__ = ["TextError", "Tokenizer", "encode"]


class TextError(DataError):
    """A text without token ids. It says nothing of the template: other texts in its place would have some."""


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
        self, conversation: Sequence[Message], *, add_generation_prompt: bool, tokenize: bool, **options: Any
    ) -> Any:
        """The conversation as the text that the model was trained on.

        Options are given only where there is something to say: `tools` where there are tools, the template's own where
        `Chat` was given some. With `tokenize=True, return_dict=True, return_assistant_tokens_mask=True`, which only a
        template with `{% generation %}` sees, token ids and mask as `["input_ids"]` and `["assistant_masks"]`.
        """

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of token ids."""


def encode(tokenizer: Tokenizer, text: str, *, where: str, special: bool = False) -> tuple[int, ...]:
    """Token ids of `text`; with `special` the tokenizer adds what begins a sequence.

    Raises:
        TextError: the tokenizer has no token for a part of it, or for nothing at all.
    """
    try:
        tokens = tokenizer(text, add_special_tokens=special)["input_ids"]
    except Exception as error:  # tokenizers raise a bare Exception for a character that they do not know
        raise TextError(f"{where}: the tokenizer cannot encode {text!r:.200}: {error}") from error
    if not tokens:
        raise TextError(f"{where}: {text!r} has no tokens")
    return tuple(tokens)
