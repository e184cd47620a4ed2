"""A row of tokens as people can read it: the text of each one, beside what the engine and the trainer made of it.

It does not know tokenizers, only their `decode`, and does not know how the pieces are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rl_observe.log_files import SampleTokens

__all__ = ["text_pieces", "token_sample"]

Decode = Callable[[list[int]], str]
# Tokens before the one that is looked at, since some write a space only after another; more change nothing.
_CONTEXT = 6
_HALF_A_LETTER = "�"


def token_sample(
    tokens: Sequence[int],
    *,
    logp: Sequence[float],
    response: Sequence[bool],
    turns: Sequence[int],
    decode: Decode,
    trained: Sequence[bool] | None = None,
) -> SampleTokens:
    """Keep one row of rollouts token by token, without its padding.

    Args:
        tokens: prompt, answers and observations in their order.
        logp: the engine's log-probability of each, looked at where `response` is true.
        response: whether the policy chose the token.
        turns: which answer it belongs to, from 0; -1 outside of answers.
        decode: from tokens to text, special ones included, as `tokenizer.decode`.
        trained: whether the loss looks at it; `response` where not given.

    Raises:
        ValueError: the lists are of different lengths.
    """
    trained = response if trained is None else trained
    lists = {"tokens": tokens, "logp": logp, "response": response, "turns": turns, "trained": trained}
    sizes = {name: len(values) for name, values in lists.items()}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        raise ValueError(f"a sample has one entry a token in every list; {listed}")
    return SampleTokens(
        pieces=text_pieces(tokens, decode),
        logp=[round(float(value), 5) if chosen else None for value, chosen in zip(logp, response, strict=True)],
        trained=[bool(value) for value in trained],
        turns=[int(value) for value in turns],
    )


def text_pieces(tokens: Sequence[int], decode: Decode) -> list[str]:
    """The text that each token adds to those before it.

    A letter of several tokens is the last one's, and the others have "". Each is decoded with the few before it: one
    call a token over six of them, whatever the length of the row.
    """
    pieces: list[str] = []
    start, done = 0, 0
    for end in range(1, len(tokens) + 1):
        before = decode(list(tokens[start:done]))
        after = decode(list(tokens[start:end]))
        is_torn = after.endswith(_HALF_A_LETTER) and end - done < _CONTEXT and end < len(tokens)
        if is_torn or not after.startswith(before):
            pieces.append("" if is_torn else decode(list(tokens[done:end])))
        else:
            pieces.append(after[len(before) :])
        if not is_torn:
            done, start = end, max(start, end - _CONTEXT)
    return pieces
