"""What the engine needs to know of a model, checked before anything runs. Does not know weights or sampling."""

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from rl_generation.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Support", "cache_argument", "inspect_model"]

FORWARD_NEEDS = ("input_ids", "position_ids", "use_cache")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """What one model offers to the engine."""

    vocab_size: int
    """Rows of the input embedding, or of the head where it has fewer: every token id is below."""

    num_layers: int
    """Layers, as the config counts them."""

    max_positions: int | None
    """`max_position_embeddings`; None where the config states none."""

    logits_to_keep: bool
    """Whether forward can compute the logits of chosen positions alone."""

    missing: tuple[str, ...]
    """Arguments of continuous batching that forward does not name."""

    attention: str
    """The attention implementation that the config names, such as `sdpa`."""

    quirks: tuple[str, ...]
    """What is special about this model here, a sentence each."""


def inspect_model(model: "PreTrainedModel") -> Support:
    """Return what `model` offers, or raise ModelError where it is no causal language model of transformers."""
    name = type(model).__name__
    config = getattr(model, "config", None)
    if config is None or getattr(config, "is_encoder_decoder", False) or not hasattr(model, "generate"):
        raise ModelError(
            f"{name} cannot be served: the engine needs a decoder-only causal language model of transformers, with its "
            f"head, and {'this one has an encoder' if config and hasattr(model, 'generate') else 'this is none'}. "
            f"Pass the bare model, without a wrapper"
        )
    parameters = inspect.signature(model.forward).parameters
    text = config.get_text_config(decoder=True)
    max_positions = getattr(text, "max_position_embeddings", None)
    logits_to_keep = "logits_to_keep" in parameters
    return Support(
        vocab_size=_vocab_size(model),
        num_layers=getattr(text, "num_hidden_layers", 0),
        max_positions=max_positions,
        logits_to_keep=logits_to_keep,
        missing=tuple(needed for needed in (*FORWARD_NEEDS, cache_argument(model)) if needed not in parameters),
        attention=str(getattr(text, "_attn_implementation", None)),
        quirks=tuple(_quirks(model, max_positions=max_positions, logits_to_keep=logits_to_keep)),
    )


def cache_argument(model: "PreTrainedModel") -> str:
    """Return what forward calls its key/value cache: `cache` since transformers 5.24, and `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _vocab_size(model: "PreTrainedModel") -> int:
    """Count the ids that can be both read and drawn: embeddings may be padded, heads may leave special tokens out."""
    head_of: Any = model.get_output_embeddings
    weights = [getattr(part, "weight", None) for part in (model.get_input_embeddings(), head_of())]
    return min(len(weight) for weight in weights if weight is not None)


def _quirks(model: "PreTrainedModel", *, max_positions: int | None, logits_to_keep: bool) -> list[str]:
    quirks = ["the model's generation_config is not read: Sampling alone decides"]
    if model.dtype.itemsize < 4:
        quirks.append(f"weights are {model.dtype}: logp carries its rounding, which a float32 forward does not share")
    config = model.config.get_text_config(decoder=True)
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()) or getattr(config, "sliding_window", None):
        quirks.append("sliding windows are masked: their layers keep all keys and values, as the others do")
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
