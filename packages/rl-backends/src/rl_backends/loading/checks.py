"""What a model and its tokenizer say before a run: the tokens that end a response, and what would fail later."""

import tempfile
from collections.abc import Sequence
from typing import Any

from rl_backends.errors import ModelError

__all__ = ["check_generation_config", "check_vocabulary", "pad_token_id", "stop_token_ids"]


def check_generation_config(model: Any) -> None:
    """Refuse a generation configuration that transformers would refuse to save, before a run and not after it.

    Raises:
        ModelError: it contradicts itself.
    """
    config = getattr(model, "generation_config", None)
    if config is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            config.save_pretrained(folder)
        except ValueError as error:
            raise ModelError(
                f"the model's generation_config.json contradicts itself, so it could not be saved again: {error}"
            ) from error


def check_vocabulary(*, model_vocab_size: int, tokenizer_size: int, allow_padded: bool = False) -> None:
    """Refuse a model whose vocabulary is not the tokenizer's.

    Raises:
        ModelError: the sizes differ; a larger model is accepted with `allow_padded`, a smaller one never.
    """
    if model_vocab_size == tokenizer_size or (allow_padded and model_vocab_size > tokenizer_size):
        return
    if model_vocab_size < tokenizer_size:
        raise ModelError(
            f"the tokenizer has {tokenizer_size} tokens and the model only {model_vocab_size} embeddings, so they do "
            f"not belong together; use the model's own tokenizer, or resize the model's embeddings"
        )
    raise ModelError(
        f"the model has {model_vocab_size} embeddings and the tokenizer only {tokenizer_size} tokens; if the "
        f"{model_vocab_size - tokenizer_size} rows beyond are padding, as in Qwen models, accept "
        f"them by allow_padded=True (policy.padded_vocabulary=true in a recipe), or use the model's own tokenizer"
    )


def stop_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end a response: the tokenizer's end of sequence, then those of the model's generation config."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    several = configured if isinstance(configured, list) else [configured]
    return tuple(dict.fromkeys(token for token in (tokenizer.eos_token_id, *several) if token is not None))


def pad_token_id(tokenizer: Any, stop: Sequence[int]) -> int:
    """The tokenizer's padding token; without one, the first stop token, since padding is never attended to."""
    return int(stop[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id)
