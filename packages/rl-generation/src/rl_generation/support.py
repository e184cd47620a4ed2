"""What the engine needs of a model, checked before anything runs. Does not know weights or sampling."""

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from rl_generation.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Support", "inspect_model"]

RECURRENT_LAYER_TYPES = {"conv", "linear_attention"}
FORWARD_NEEDS = ("input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """What one model offers to the engine."""

    vocab_size: int
    """Rows of the input embedding: every token id is below."""

    max_positions: int | None
    """`max_position_embeddings`; None where the config states none."""

    logits_to_keep: bool
    """Whether forward can compute the last position's logits alone."""

    cache_layers: tuple[str, ...]
    """The distinct cache layer classes, sorted."""

    attention: str
    """The attention implementation that the config names, such as `sdpa`."""

    quirks: tuple[str, ...]
    """What is special about this model here, a sentence each."""


def inspect_model(model: "PreTrainedModel", *, drop_finished: bool) -> Support:
    """Return what `model` offers, or raise ModelError naming what it lacks and what to do."""
    from transformers import DynamicCache

    name = type(model).__name__
    parameters = inspect.signature(model.forward).parameters
    missing = [needed for needed in FORWARD_NEEDS if needed not in parameters]
    if missing or getattr(model.config, "is_encoder_decoder", False):
        raise ModelError(
            f"{name} cannot be served: the engine needs a decoder-only causal language model whose forward names "
            f"{', '.join(FORWARD_NEEDS)}; missing: {', '.join(missing) or 'none, but it has an encoder'}. "
            f"Pass the bare model, without a wrapper"
        )
    config = model.config.get_text_config(decoder=True)
    layers = DynamicCache(config=model.config).layers
    cache_layers = _cache_layers(model, {type(layer) for layer in layers}, drop_finished=drop_finished)
    max_positions = getattr(config, "max_position_embeddings", None)
    logits_to_keep = "logits_to_keep" in parameters
    return Support(
        vocab_size=len(model.get_input_embeddings().get_parameter("weight")),
        max_positions=max_positions,
        logits_to_keep=logits_to_keep,
        cache_layers=cache_layers,
        attention=str(getattr(config, "_attn_implementation", None)),
        quirks=tuple(_quirks(model, cache_layers, max_positions=max_positions, logits_to_keep=logits_to_keep)),
    )


def _cache_layers(model: "PreTrainedModel", kinds: set[type], *, drop_finished: bool) -> tuple[str, ...]:
    """Name the cache's layer classes; refuse a cache that lacks the model's state, or whose rows cannot be selected."""
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    name = type(model).__name__
    # Subclasses do not count: hybrid layers inherit a batch_select_indices that selects their keys and values but
    # leaves their recurrent states as they were.
    special = sorted(kind.__name__ for kind in kinds - {DynamicLayer, DynamicSlidingWindowLayer})
    layer_types = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    recurrent = getattr(model, "_is_stateful", False) or not RECURRENT_LAYER_TYPES.isdisjoint(layer_types)
    if recurrent and not special:
        raise ModelError(
            f"{name} keeps recurrent states, which the DynamicCache of this transformers release has no layers for: "
            f"use a release whose DynamicCache serves it (5.x has most), with drop_finished=False"
        )
    if special and drop_finished:
        raise ModelError(
            f"{name} has cache layers of class {', '.join(special)}, from which finished rows cannot be dropped "
            f"safely: pass drop_finished=False to prefill every row and to compute finished rows to the end"
        )
    # A cache without layers yet makes each of them a DynamicLayer.
    return tuple(sorted(kind.__name__ for kind in kinds or {DynamicLayer}))


def _quirks(
    model: "PreTrainedModel", cache_layers: tuple[str, ...], *, max_positions: int | None, logits_to_keep: bool
) -> list[str]:
    quirks = ["the model's generation_config is not read: Sampling alone decides"]
    if model.dtype.itemsize < 4:
        quirks.append(f"weights are {model.dtype}: logp carries its rounding, which a float32 forward does not share")
    if "DynamicSlidingWindowLayer" in cache_layers:
        quirks.append("sliding-window layers keep only their window: older keys and values are gone from the cache")
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope.get("rope_type") in {"dynamic", "longrope"}:
        quirks.append(
            f"{rope['rope_type']} frequencies change once the longest row of a batch passes the original length: from "
            f"there an answer depends on its batch, and its logp on keys rotated before; see verify_logp"
        )
    if max_positions is None:
        quirks.append("the config has no max_position_embeddings: the length of an answer is not checked")
    if not logits_to_keep:
        quirks.append("forward has no logits_to_keep: prefill holds the logits of every prompt token")
    if model.device.type == "mps":
        quirks.append("mps has no float64: tokens rarer than 6e-8 are drawn with a rounded probability")
    return quirks
