"""The text of a response behind its prompt: whole, as it grows token by token, and searched for stop strings.

What a token reads as depends on those before it: many tokenizers drop the space of the first token of a text, and a
prompt may end inside a character. In the scheme of Llama 2, Mistral and Gemma it also depends on those behind it: a run
of byte tokens that is not valid UTF-8 as a whole decodes to one replacement character a byte, the valid ones included.
So text is certain once its last character is complete, and, where it ends with byte tokens, once another token follows.
Reference for the window that is decoded: `text-generation-inference` and vLLM (v1/engine/detokenizer.py).
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    Tokenizer = PreTrainedTokenizerBase
else:
    Tokenizer = Any  # transformers is imported by whoever has one

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What a decoder writes for bytes that are no whole character, or not yet one."""

SHORTEST_TAIL = 8
LONGEST_CHARACTER = 4
"""Bytes, each of which may be a token; what ends with more that make up nothing is never completed."""

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
"""How vocabularies with byte fallback name their 256 byte tokens."""


def decode(tokenizer: Tokenizer, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    """Return the text of tokens as it is, without the cleaning of spaces that some tokenizers are set to do."""
    return str(
        tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    )


def answer_text(
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    *,
    prompt: Sequence[int],
    skip_special_tokens: bool = True,
) -> str:
    """Return the text that `tokens` add to the text of `prompt`, a character that they complete included.

    No tokens add nothing, nor do special ones that are skipped, also behind a prompt that ends inside a character.
    """
    if not tokens or (skip_special_tokens and frozenset(tokenizer.all_special_ids).issuperset(tokens)):
        return ""
    tail, whole = _prompt_tail(tokenizer, prompt)
    before = decode(tokenizer, tail[:whole], skip_special_tokens=skip_special_tokens)
    text = decode(tokenizer, [*tail, *tokens], skip_special_tokens=skip_special_tokens)
    if text.startswith(before):
        return text[len(before) :]
    # The response changed how the prompt reads: it is read by itself, as engines do.
    return decode(tokenizer, tokens, skip_special_tokens=skip_special_tokens)


class Detokenizer:
    """Decodes one response as it grows: the pieces of `push`, and `pending` at the end, joined, are `answer_text`.

    Only the last tokens are decoded each time, beginning where the piece before the last was given out.

    Args:
        tokenizer: of the model.
        prompt: that the response follows.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        self._context, whole = _prompt_tail(tokenizer, prompt)
        """Tokens behind which the next ones are read."""
        self._before = decode(tokenizer, self._context[:whole])
        """Their text, without a character that the prompt only begins."""
        self._tokens: list[int] = []
        """Those of the response of which nothing was given out yet, special ones left out, as in the text."""
        self._text: str | None = ""
        """What these add to the text; None where it has not been decoded."""

    @property
    def pending(self) -> str:
        """What the tokens that are not certain yet add to the text, as long as no other token follows."""
        if self._text is None:
            whole = decode(self._tokenizer, [*self._context, *self._tokens])
            if whole.startswith(self._before):
                self._text = whole[len(self._before) :]
            else:  # they change how what came before reads: they are read by themselves, as engines do
                self._text = decode(self._tokenizer, self._tokens)
        return self._text

    def push(self, token: int) -> str:
        """Take the next token; return the text that is certain now and was not before."""
        if token in self._special:
            return ""
        self._tokens.append(token)
        self._text = None
        name = self._tokenizer.convert_ids_to_tokens(token)
        if isinstance(name, str) and BYTE_TOKEN.fullmatch(name):
            return ""
        fresh = self.pending
        if not fresh or fresh.endswith(INCOMPLETE):
            return ""
        self._context, self._tokens, self._text = self._tokens, [], ""
        self._before = decode(self._tokenizer, self._context)
        return fresh


class StopStrings:
    """Finds the first of `stop` in the text of one response, after the token with which the text holds it.

    Replacement characters at the end of the text are not searched: the next token may make a character of them. Nor is
    what the same token wrote before them, as in vLLM.
    """

    def __init__(self, stop: Sequence[str], tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._stop = tuple(stop)
        self._text = Detokenizer(tokenizer, prompt)
        self._reach = max(map(len, stop)) - 1
        self._tail = ""

    def push(self, token: int) -> str | None:
        """Take the next token; return the stop string that it completed, the earliest one in the text, or None."""
        certain = self._tail + self._text.push(token)
        pending = self._text.pending
        text = certain if pending.endswith(INCOMPLETE) else certain + pending
        self._tail = certain[-self._reach :] if self._reach else ""
        ends = {stop: text.find(stop) + len(stop) for stop in self._stop if stop in text}
        return min(ends, key=ends.__getitem__, default=None)


def _prompt_tail(tokenizer: Tokenizer, prompt: Sequence[int]) -> tuple[list[int], int]:
    """Return the last tokens of `prompt`, behind which a response reads as it does behind all of them.

    Returns:
        The tokens, and how many of them are whole characters: those after are of one that the response may complete.
    """
    size = SHORTEST_TAIL
    while size < len(prompt):
        tail = list(prompt[-size:])
        text = decode(tokenizer, tail)
        if text.strip() and INCOMPLETE not in text:
            return tail, len(tail)
        size *= 2
    tail = list(prompt)
    ends = range(len(tail), max(-1, len(tail) - LONGEST_CHARACTER), -1)
    whole = (end for end in ends if not decode(tokenizer, tail[:end]).endswith(INCOMPLETE))
    return tail, next(whole, len(tail))
