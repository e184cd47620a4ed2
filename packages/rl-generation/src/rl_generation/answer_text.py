"""The text of an answer behind its prompt, as a reader who has the prompt sees it appear.

What a token reads as depends on those before it: many tokenizers drop the space of the first token of a text, and a
prompt may end inside a character. An engine looks for stop strings behind the prompt, so their readers do so too.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["INCOMPLETE", "answer_text", "decode", "prompt_tail"]

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What a decoder writes for bytes that are no whole character, or not yet one."""

SHORTEST_TAIL = 8
LONGEST_CHARACTER = 4
"""Bytes, each of which may be a token; what ends with more that make up nothing is never completed."""


def answer_text(
    tokenizer: "PreTrainedTokenizerBase",
    tokens: Sequence[int],
    *,
    prompt: Sequence[int],
    skip_special_tokens: bool = True,
) -> str:
    """Return the text that `tokens` add to the text of `prompt`, a character that they complete included."""
    tail, whole = prompt_tail(tokenizer, prompt)
    before = decode(tokenizer, tail[:whole], skip_special_tokens=skip_special_tokens)
    text = decode(tokenizer, [*tail, *tokens], skip_special_tokens=skip_special_tokens)
    if text.startswith(before):
        return text[len(before) :]
    # The answer changed how the prompt reads: it is read by itself, as engines do.
    return decode(tokenizer, tokens, skip_special_tokens=skip_special_tokens)


def prompt_tail(tokenizer: "PreTrainedTokenizerBase", prompt: Sequence[int]) -> tuple[list[int], int]:
    """Return the last tokens of `prompt`, behind which an answer reads as it does behind all of them.

    Returns:
        The tokens, and how many of them are whole characters: those after are of one that the answer may complete.
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


def decode(tokenizer: "PreTrainedTokenizerBase", tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    """Return the text of tokens as it is, without the cleaning of spaces that some tokenizers are set to do."""
    return str(
        tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    )
