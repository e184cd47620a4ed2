"""Which token may not come next, so that an answer holds no bad word. Does not know models.

A word is banned as it reads at the start of a text and, with a space before it, inside one; only its last token is ever
excluded, where those before it are what the answer ends with.
Reference: vLLM's `SamplingParams.update_from_tokenizer` and its sampler (github.com/vllm-project/vllm).
"""

from collections.abc import Sequence
from typing import Any

from rl_generation.errors import PromptError
from rl_generation.requests import check_token_ids

__all__ = ["BadWords", "banned_next", "encode_bad_words"]

BadWords = tuple[tuple[int, ...], ...]


def encode_bad_words(words: Sequence[str], tokenizer: Any, *, vocab_size: int) -> BadWords:
    """Return the token sequences to ban for `words`.

    Raises:
        PromptError: A word has no tokens, or tokens that the model does not have.
    """
    sequences: list[tuple[int, ...]] = []
    for word in words:
        bare = _encode(word.lstrip(), tokenizer)
        if not bare:
            raise PromptError(f"bad_words holds {word!r}, which the tokenizer turns into no tokens at all")
        spaced = _encode(" " + word.lstrip(), tokenizer)
        sequences.append(bare)
        # Else the space is a token of its own, after which the bare word is banned already.
        if spaced and spaced[0] != bare[0] and len(spaced) == len(bare):
            sequences.append(spaced)
    for sequence in sequences:
        check_token_ids(sequence, vocab_size=vocab_size, name=f"the tokens of bad_words={tuple(words)!r}")
    return tuple(sequences)


def banned_next(sequences: BadWords, answer: Sequence[int]) -> list[int]:
    """Return the tokens that would complete one of `sequences` behind `answer`."""
    return [
        sequence[-1]
        for sequence in sequences
        if len(answer) >= len(sequence) - 1 and tuple(answer[len(answer) - len(sequence) + 1 :]) == sequence[:-1]
    ]


def _encode(text: str, tokenizer: Any) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))
