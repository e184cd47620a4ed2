"""`model.generate` without anything that its own config asks for, such as a repetition penalty, and without drawing."""

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["bare_generate"]


def bare_generate(
    model: "PreTrainedModel",
    prompts: Int[Tensor, "N S"],
    *,
    max_new_tokens: int,
    pad_token_id: int,
    use_cache: bool,
    **others: Any,
) -> Any:
    """Take the likeliest tokens behind prompts of one length; `others` go to `generate`."""
    import transformers

    make_config: Any = transformers.GenerationConfig
    bare = make_config(max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=pad_token_id, use_cache=use_cache)
    # What a config leaves open, generate takes from the model's own.
    before = model.generation_config
    try:
        model.generation_config = bare
        generate: Any = model.generate
        return generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=bare, **others)
    finally:
        model.generation_config = before
