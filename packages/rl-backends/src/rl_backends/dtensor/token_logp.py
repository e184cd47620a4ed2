"""The forward pass that a backend runs: tokens in, log-probabilities of the trainable ones out, no logits.

Axes: B rows, T tokens, H hidden.
"""

from types import MethodType
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from rl_backends.loading import ModelError
from rl_parallel_plans import linear_logp

__all__ = ["METHOD", "add_token_logp"]

METHOD = "token_logp"
"""The method's name on the model. FSDP2 must know it, to gather parameters around it as it does around `forward`."""

UNSUPPORTED_SCALES = ("logit_scale", "logits_scaling")
"""Configuration fields that scale logits after the head; `linear_logp` would not see them."""


def add_token_logp(model: nn.Module) -> None:
    """Give `model` the method `token_logp(tokens, trainable, temperature)`.

    Raises:
        ModelError: the model has no language-model head, or scales its logits after it in a way that is not offered.
    """
    config = getattr(model, "config", None)
    if not hasattr(model, "base_model") or getattr(model, "get_output_embeddings", lambda: None)() is None:
        raise ModelError(f"{type(model).__qualname__} has no base_model with a language-model head; give a causal LM")
    for name in UNSUPPORTED_SCALES:
        if getattr(config, name, 1.0) not in (1.0, None):
            raise ModelError(
                f"{type(model).__qualname__} multiplies its logits by {name}={getattr(config, name)}, which this "
                f"backend does not offer yet; use an architecture without it"
            )
    setattr(model, METHOD, MethodType(_token_logp, model))


def _token_logp(
    model: Any, tokens: Int[Tensor, "B T"], trainable: Bool[Tensor, "B T"], *, temperature: float
) -> Float[Tensor, "B T"]:
    """`out[b, t]` = log p(tokens[b, t] | tokens[b, :t]) where trainable, else 0.

    Rows are right-padded, so the causal mask alone keeps padding out of every real token's sight.
    """
    hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    rows, columns = trainable.nonzero(as_tuple=True)
    logp = linear_logp(
        hidden[rows, columns - 1],
        model.get_output_embeddings(),
        tokens[rows, columns],
        temperature=temperature,
        softcap=getattr(model.config, "final_logit_softcapping", None),
    )
    return torch.zeros(tokens.shape, device=tokens.device).index_put((rows, columns), logp)
