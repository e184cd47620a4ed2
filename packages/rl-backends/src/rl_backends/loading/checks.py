"""What is refused before a run because it would fail after it, or silently. Reads no weights."""

import tempfile
from typing import Any

from rl_backends.errors import ModelError

__all__ = ["check_generation_config", "check_vocabulary"]


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
