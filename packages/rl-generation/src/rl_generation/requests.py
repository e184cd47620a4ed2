"""What a call asks for, checked before anything runs. Does not know models: their limits come as numbers."""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

from rl_generation.errors import PromptError
from rl_generation.sampling import Sampling

__all__ = ["Limits", "Prompt", "Request", "check_token_ids", "make_requests"]

Prompt = tuple[int, ...]
"""Token ids."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an engine can be asked for."""

    vocab_size: int
    """Every token id is below."""

    max_length: int | None
    """Tokens of a prompt and its answer together; None where the engine knows no limit."""

    max_length_name: str = "max_position_embeddings"
    """Where that limit comes from, for messages."""

    tokenizer: Any = None
    """The tokenizer behind stop strings and bad words; None where the engine was made without one."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt and how to answer it; `sampling.n` answers are wanted."""

    prompt: Prompt
    sampling: Sampling
    prompt_index: int = 0
    """Place of the prompt in the call."""


def make_requests(
    prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling], limits: Limits
) -> list[Request]:
    """Pair each prompt with its Sampling, or raise naming the first bad one and its values.

    One Sampling for all prompts is spread over them (`Sampling.spread`), so that equal prompts get different answers;
    a sequence of them is taken as it is, and each request then depends on its own prompt and Sampling alone.

    Raises:
        PromptError: A prompt is empty, too long, or outside the vocabulary; its stop tokens are outside; it needs a
            tokenizer that is missing; or there are not as many Samplings as prompts.
    """
    samplings: list[Any] = sampling.spread(len(prompts)) if isinstance(sampling, Sampling) else list(sampling)
    if not all(isinstance(each, Sampling) for each in samplings):
        raise PromptError(f"sampling must be a Sampling, or a sequence with one for each prompt; got {sampling!r:.100}")
    if len(samplings) != len(prompts):
        raise PromptError(
            f"a sequence of Sampling holds one for each prompt; got {len(samplings)} for {len(prompts)} prompts"
        )
    return [
        _check(Request(prompt=_tokens(index, prompt), sampling=how, prompt_index=index), limits)
        for index, (prompt, how) in enumerate(zip(prompts, samplings, strict=True))
    ]


def check_token_ids(token_ids: Iterable[int], *, vocab_size: int, name: str) -> None:
    """Raise PromptError where one of `token_ids` is no row of the embedding; `name` says whose they are."""
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise PromptError(f"{name} must hold ids in [0, {vocab_size}), the model's vocabulary; got {token}")


def _tokens(index: int, prompt: Any) -> Prompt:
    if isinstance(prompt, str):
        raise PromptError(
            f"prompt {index} is text, {prompt!r:.60}, and engines take token ids: encode_text(tokenizer, text) or "
            f"encode_chat(tokenizer, messages) makes them"
        )
    if isinstance(prompt, int):
        raise PromptError(
            f"prompt {index} is the number {prompt}; prompts are a list of lists of token ids: [[5, 6, 7]]"
        )
    try:
        return tuple(map(operator.index, prompt))
    except TypeError as error:
        raise PromptError(f"prompt {index} must be a sequence of integer token ids; {error}") from None


def _check(request: Request, limits: Limits) -> Request:
    prompt, sampling, index = request.prompt, request.sampling, request.prompt_index
    if not prompt:
        raise PromptError(f"prompt {index} is empty: a model continues at least one token, such as the bos token")
    if min(prompt) < 0 or max(prompt) >= limits.vocab_size:
        position, token = next((p, t) for p, t in enumerate(prompt) if not 0 <= t < limits.vocab_size)
        raise PromptError(
            f"prompt {index} has token id {token} at position {position}; "
            f"the model's vocabulary is [0, {limits.vocab_size}): is this the model's own tokenizer?"
        )
    if limits.max_length is not None and len(prompt) + sampling.max_new_tokens > limits.max_length:
        room = limits.max_length - len(prompt)
        remedy = f"or lower max_new_tokens to {room} or less" if room > 0 else "which leaves no room for an answer"
        raise PromptError(
            f"prompt {index} has {len(prompt)} tokens, and with max_new_tokens={sampling.max_new_tokens} passes the "
            f"model's {limits.max_length_name}={limits.max_length}: shorten the prompt, {remedy}"
        )
    check_token_ids(sampling.stop_token_ids, vocab_size=limits.vocab_size, name="stop_token_ids")
    for name in ("stop", "bad_words"):
        if getattr(sampling, name) and limits.tokenizer is None:
            raise PromptError(
                f"prompt {index} asks for {name}={getattr(sampling, name)!r}, which are text, and the engine has no "
                f"tokenizer: make it with tokenizer=…, or use stop_token_ids"
            )
    return request
