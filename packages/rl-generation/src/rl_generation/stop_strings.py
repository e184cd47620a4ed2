"""Finds the first stop string in text that grows token by token. Does not know models or sampling.

The text of an answer is what a reader who has the prompt would see appear: tokens are decoded behind the end of the
prompt, special ones are skipped, and bytes that do not make up a character yet are held back. A stop token that ends
the answer is not part of its text.
Reference: how vLLM detokenizes and looks for stop strings (github.com/vllm-project/vllm, v1/engine/detokenizer.py).
"""

from collections.abc import Sequence
from typing import Any, final

__all__ = ["StopStrings", "TextStream"]

# What a decoder writes for bytes that are no whole character.
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


@final
class TextStream:
    """Decodes one answer as it grows; `tokenizer` is a transformers tokenizer."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        # Decoded together with the next token, since what a token reads as depends on those before it.
        self._tokens = list(prompt)
        self._known = self._decode()
        self._num_known = len(self._tokens)
        while self._known.endswith(INCOMPLETE) and self._num_known:
            self._num_known -= 1
            self._known = self._decode(self._num_known)

    def push(self, token: int) -> str:
        """Take the next token; return the text that it completes, which may be empty."""
        if token in self._special:  # kept, every one would be decoded again with each token that follows
            return ""
        self._tokens.append(token)
        text = self._decode()
        if len(text) <= len(self._known) or text.endswith(INCOMPLETE):
            return ""
        if not text.startswith(self._known):
            # The token changed how those before it read: start afresh from it, as vLLM does.
            self._tokens, self._known, self._num_known = [token], "", 0
            text = self._decode()
        fresh = text[len(self._known) :]
        self._tokens = self._tokens[self._num_known :]
        self._known, self._num_known = self._decode(), len(self._tokens)
        return fresh

    def _decode(self, count: int | None = None) -> str:
        text: str = self._tokenizer.decode(
            self._tokens[:count], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


@final
class StopStrings:
    """Looks for `stop` in the text of one answer."""

    def __init__(self, stop: Sequence[str], tokenizer: Any, prompt: Sequence[int]) -> None:
        self._stop = tuple(stop)
        self._stream = TextStream(tokenizer, prompt)
        self._reach = max(map(len, stop)) - 1
        self._tail = ""

    def push(self, token: int) -> str | None:
        """Take the next token; return the stop string that it completed, the earliest one in the text, or None."""
        fresh = self._stream.push(token)
        if not fresh:
            return None
        text = self._tail + fresh
        self._tail = text[-self._reach :] if self._reach else ""
        ends = {stop: text.find(stop) + len(stop) for stop in self._stop if stop in text}
        return min(ends, key=ends.__getitem__, default=None)
