"""Sampled responses that a run keeps for its report: as text, and token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NotRequired, TypedDict


class ScoredResponse(TypedDict):
    """A response and its reward. Every `Sample` is one."""

    prompt: str  # in a `Sample`, it pairs the response from before training with the one from after
    response: str  # the text that the policy generated
    reward: float | None  # 1 or more counts as right; None if the response was not scored


class SampleTokens(TypedDict):
    """A conversation token by token; every list has one entry per token."""

    pieces: list[str]  # the text of each token; joined, the whole text. "" if a later token completes the character
    logp: list[float | None]  # the engine's log-probability of each token that it sampled; None for all other tokens
    trained: list[bool]  # True if the loss includes the token; False for prompts, observations and masked tokens
    turns: list[int]  # the response of the conversation that the token belongs to, from 0; -1 outside of responses


class Sample(ScoredResponse):
    """One response to a held-out prompt."""

    when: Literal["before", "after"]  # before or after the training of `stage`
    stage: str  # the training stage between before and after
    expected: str | None  # the gold answer, if there is one
    truncated: bool  # True if the response ended at the token limit rather than with a stop token
    tokens: NotRequired[SampleTokens]  # the whole conversation (see `token_sample`); kept for a few samples only


# Some tokenizers write a space only after another token, so each token is decoded with up to this many before it.
_CONTEXT = 6
_REPLACEMENT_CHARACTER = "�"


def token_sample(
    tokens: Sequence[int],
    *,
    logp: Sequence[float],
    response: Sequence[bool],
    turns: Sequence[int],
    decode: Callable[[list[int]], str],
    trained: Sequence[bool] | None = None,
) -> SampleTokens:
    """Describe one conversation token by token. All sequences have the length of `tokens`, without padding.

    Args:
        tokens: prompt, responses and observations in their order.
        logp: the engine's log-probability of each token, used where `response` is true.
        response: True for the tokens that the policy sampled.
        turns: the response that each token belongs to, from 0; -1 outside of responses.
        decode: token ids to text, special tokens included, such as `tokenizer.decode`.
        trained: True for the tokens that the loss includes; `response` if not given.

    Raises:
        ValueError: the sequences have different lengths.
    """
    trained = response if trained is None else trained
    lists = {"tokens": tokens, "logp": logp, "response": response, "turns": turns, "trained": trained}
    sizes = {name: len(values) for name, values in lists.items()}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        raise ValueError(f"all sequences of a sample need one entry per token; {listed}")
    return SampleTokens(
        pieces=text_pieces(tokens, decode),
        logp=[round(float(value), 5) if chosen else None for value, chosen in zip(logp, response, strict=True)],
        trained=[bool(value) for value in trained],
        turns=[int(value) for value in turns],
    )


def text_pieces(tokens: Sequence[int], decode: Callable[[list[int]], str]) -> list[str]:
    """Return the text that each token adds to the tokens before it.

    A character of several tokens belongs to its last token, and the others get "". Makes two calls of `decode` per
    token, over at most seven tokens each, however long the conversation is.
    """
    pieces: list[str] = []
    start, done = 0, 0
    for end in range(1, len(tokens) + 1):
        before = decode(list(tokens[start:done]))
        after = decode(list(tokens[start:end]))
        is_torn = after.endswith(_REPLACEMENT_CHARACTER) and end - done < _CONTEXT and end < len(tokens)
        if is_torn or not after.startswith(before):
            pieces.append("" if is_torn else decode(list(tokens[done:end])))
        else:
            pieces.append(after[len(before) :])
        if not is_torn:
            done, start = end, max(start, end - _CONTEXT)
    return pieces
