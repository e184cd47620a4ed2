"""What a model offers to the embedded engine, and whether continuous batching is right for it.

That it is right is shown before anything is generated. Two prompts of different length are run and continued, over the
slot cache and without one, and the logits must agree; every layer must also attend through transformers' attention
interface, once a forward, and store into the cache.
"""

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch

from rl_generation.embedded.slot_model import SlotModel, cache_argument
from rl_generation.embedded.whole_batches import PROMPT_LENGTHS, plain_logits, what_differs
from rl_generation.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Support", "inspect_model", "why_not_continuous"]

FORWARD_NEEDS = ("input_ids", "position_ids", "use_cache")
RECURRENT = {"conv", "linear_attention", "mamba", "recurrent"}
# What models raise of a cache, mask or argument that is not what they were written for.
RAISED = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """What one model offers to the engine."""

    vocab_size: int
    """Ids that can be both read and drawn: embeddings may be padded, heads may leave special tokens out."""

    max_positions: int | None
    """`max_position_embeddings`; None where the config states none."""

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
    head_of: Any = model.get_output_embeddings
    weights = [getattr(part, "weight", None) for part in (model.get_input_embeddings(), head_of())]
    text = config.get_text_config(decoder=True)
    max_positions = getattr(text, "max_position_embeddings", None)
    quirks = ["the model's generation_config is not read: Sampling alone decides"]
    if model.dtype.itemsize < 4:
        quirks.append(f"weights are {model.dtype}: logp carries its rounding, which a float32 forward does not share")
    if "sliding_attention" in (getattr(text, "layer_types", None) or ()) or getattr(text, "sliding_window", None):
        quirks.append("sliding windows are masked: their layers keep all keys and values, as the others do")
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    if rope.get("rope_type") in {"dynamic", "longrope"}:
        quirks.append(
            f"{rope['rope_type']} frequencies change once the longest row of a batch passes the original length: from "
            f"there an answer depends on its batch, and its logp on keys rotated before; see verify_logp"
        )
    if max_positions is None:
        quirks.append("the config has no max_position_embeddings: the length of an answer is not checked")
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        quirks.append("forward has no logits_to_keep: prefill holds the logits of every prompt token")
    if model.device.type == "mps":
        quirks.append("mps has no float64: tokens rarer than 6e-8 are drawn with a rounded probability")
    vocab_size = min(len(weight) for weight in weights if weight is not None)
    return Support(vocab_size=vocab_size, max_positions=max_positions, quirks=tuple(quirks))


def why_not_continuous(slots: SlotModel, *, vocab_size: int) -> str | None:
    """Return why the model is not decoded over its slot cache, or None where it is. Leaves the cache empty."""
    model, cache, name = slots.model, slots.cache, type(slots.model).__name__
    text, parameters = model.config.get_text_config(decoder=True), inspect.signature(model.forward).parameters
    layer_types, num_layers = getattr(text, "layer_types", None) or (), getattr(text, "num_hidden_layers", 0)
    if missing := [needed for needed in (*FORWARD_NEEDS, cache_argument(model)) if needed not in parameters]:
        return f"{name}'s forward has no {', '.join(missing)}"
    if getattr(model, "_is_stateful", False) or not RECURRENT.isdisjoint(layer_types):
        return f"{name} keeps recurrent states, which have no place in a key/value cache"
    if not getattr(model, "_supports_attention_backend", False):
        return f"{name} does not attend through transformers' attention interface"
    sequences = [
        tuple((7 * i + 3 * row + 1) % vocab_size for i in range(n + 1)) for row, n in enumerate(PROMPT_LENGTHS)
    ]
    last = torch.tensor([sequence[-1] for sequence in sequences], device=model.device)
    lengths, rows = torch.tensor(PROMPT_LENGTHS, device=model.device), torch.arange(len(sequences), device=model.device)
    columns, attended = max(PROMPT_LENGTHS) + 1, []
    try:
        cache.resize(slots=len(sequences), columns=columns)
        prefilled = slots.prefill([sequence[:-1] for sequence in sequences], slots=rows, sources=rows)
        attended.append(cache.step.calls if cache.step else 0)
        decoded = slots.decode(last, lengths, columns=columns)
        attended.append(cache.step.calls if cache.step else 0)
        if attended != [num_layers] * 2 or cache.layer_indices != set(range(num_layers)):
            return (
                f"of its {num_layers} layers, {min(attended)} attend through the attention interface and "
                f"{len(cache.layer_indices)} keep keys and values"
            )
        plain = torch.stack([plain_logits(model, sequence, count=2) for sequence in sequences])
    except RAISED as error:
        return f"{name} does not run over a slot cache: {type(error).__name__}: {error}"
    finally:
        cache.clear()
    difference = what_differs(torch.stack([prefilled, decoded], 1), plain)
    return (
        None
        if difference is None
        else f"its logits over a slot cache differ from a plain forward's by {difference:.1e}"
    )
