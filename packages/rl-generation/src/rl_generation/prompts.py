"""Checks and lays out prompts. Does not know models: their limits come as numbers."""

import operator
from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from rl_generation.errors import PromptError

__all__ = ["Prompt", "check_prompts", "check_token_ids", "left_pad"]

Prompt = tuple[int, ...]
"""Token ids."""


def check_prompts(
    prompts: Sequence[Sequence[int]], *, vocab_size: int, max_new_tokens: int, max_positions: int | None
) -> list[Prompt]:
    """Return `prompts` as tuples of plain integers, or raise PromptError naming the first bad one and its values."""
    checked = [_check_prompt(index, prompt, vocab_size) for index, prompt in enumerate(prompts)]
    if max_positions is not None:
        for index, prompt in enumerate(checked):
            if len(prompt) + max_new_tokens > max_positions:
                raise PromptError(
                    f"prompt {index} has {len(prompt)} tokens, and with max_new_tokens={max_new_tokens} passes the "
                    f"model's max_position_embeddings={max_positions}: shorten the prompt, or lower max_new_tokens to "
                    f"{max_positions - len(prompt)} or less"
                )
    return checked


def check_token_ids(token_ids: Iterable[int], *, vocab_size: int, name: str) -> None:
    """Raise PromptError where one of `token_ids` is no row of the embedding; `name` says whose they are."""
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise PromptError(f"{name} must hold ids in [0, {vocab_size}), the model's vocabulary; got {token}")


def left_pad(
    prompts: Sequence[Prompt], *, pad_token_id: int, device: torch.device
) -> tuple[Int[Tensor, "N L"], Int[Tensor, "N L"]]:
    """Return token ids and attention mask, padded on the left: the last column holds each prompt's last token."""
    width = max(map(len, prompts))
    tokens = [[pad_token_id] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(tokens, device=device), torch.tensor(mask, device=device)


def _check_prompt(index: int, prompt: Sequence[int], vocab_size: int) -> Prompt:
    try:
        tokens = tuple(map(operator.index, prompt))
    except TypeError as error:
        raise PromptError(f"prompt {index} must be a sequence of integer token ids; {error}") from None
    if not tokens:
        raise PromptError(f"prompt {index} is empty: a model continues at least one token, such as the bos token")
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        position, token = next((p, t) for p, t in enumerate(tokens) if not 0 <= t < vocab_size)
        raise PromptError(
            f"prompt {index} has token id {token} at position {position}; "
            f"the model's vocabulary is [0, {vocab_size}): is this the model's own tokenizer?"
        )
    return tokens
