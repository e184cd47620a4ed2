"""What a model offers to the engine, and how it generates: by continuous batching where that is right, or `generate`.

That it is right is shown before anything is generated. Two prompts of different length are run and continued, over the
slot cache and without one, and the logits must agree; every layer must also attend through transformers' attention
interface, once a forward, and store into the cache.
"""

import inspect
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, final

import torch

from rl_generation.embedded.continuous_batching import ContinuousBatching
from rl_generation.embedded.rows import Runner
from rl_generation.embedded.slot_model import SlotModel, cache_argument
from rl_generation.embedded.whole_batches import PROMPT_LENGTHS, WholeBatches, plain_logits, what_differs
from rl_generation.errors import ModelError
from rl_generation.rollout import LogpOf

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ContinuousBatchingChoice", "Support", "inspect_model", "make_runner"]

ContinuousBatchingChoice = Literal["auto", "required", "off"]
"""`"auto"` warns where a model cannot have it, `"required"` refuses such a model, `"off"` does without."""

FORWARD_NEEDS = ("input_ids", "position_ids", "use_cache")
CPU_CACHE_BYTES = 4 << 30
DEVICE_CACHE_FRACTION = 0.5
RECURRENT = {"conv", "linear_attention", "mamba", "recurrent"}
# What models raise of a cache, mask or argument that is not what they were written for.
RAISED = (
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    RuntimeError,
    TypeError,
    ValueError,
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """What one model offers to the engine."""

    vocab_size: int
    """Ids that can be both read and drawn: embeddings may be padded, heads may leave special tokens out."""

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
    head_of: Any = model.get_output_embeddings
    weights = [getattr(part, "weight", None) for part in (model.get_input_embeddings(), head_of())]
    parameters = inspect.signature(model.forward).parameters
    text = config.get_text_config(decoder=True)
    max_positions = getattr(text, "max_position_embeddings", None)
    logits_to_keep = "logits_to_keep" in parameters
    return Support(
        vocab_size=min(len(weight) for weight in weights if weight is not None),
        num_layers=getattr(text, "num_hidden_layers", 0),
        max_positions=max_positions,
        logits_to_keep=logits_to_keep,
        missing=tuple(needed for needed in (*FORWARD_NEEDS, cache_argument(model)) if needed not in parameters),
        attention=str(getattr(text, "_attn_implementation", None)),
        quirks=tuple(_quirks(model, max_positions=max_positions, logits_to_keep=logits_to_keep)),
    )


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


# ---- how it generates


def make_runner(
    model: "PreTrainedModel",
    *,
    support: Support,
    choice: ContinuousBatchingChoice,
    record_decoding: bool,
    pad_token_id: int,
    max_batch_size: int,
    max_cache_tokens: int | None,
    logp_of: LogpOf,
) -> Runner:
    """Return what generates with `model`, which counts its weights as version 0; warn where it is not continuous.

    Raises:
        ModelError: Continuous batching is required and not possible.
    """
    slots = SlotModel(
        model, pad_token_id=pad_token_id, logits_to_keep=support.logits_to_keep, record_decoding=record_decoding
    )
    reason = _why_not(slots, support, choice)
    if reason is None:
        return ContinuousBatching(
            slots,
            max_batch_size=max_batch_size,
            max_cache_tokens=max_cache_tokens or _default_cache_bytes(model.device) // slots.cache.token_bytes,
            vocab_size=support.vocab_size,
            logp_of=logp_of,
        )
    if choice == "required":
        raise ModelError(f"continuous_batching='required', but {reason}: pass 'auto' to take model.generate instead")
    if choice == "auto":
        warnings.warn(
            f"{reason}: the engine takes model.generate instead of continuous batching, which is slower; pass "
            f"continuous_batching='off' to agree",
            stacklevel=3,
        )
    return WholeBatches(
        model,
        reason=reason,
        pad_token_id=pad_token_id,
        max_batch_size=max_batch_size,
        vocab_size=support.vocab_size,
        logp_of=logp_of,
    )


def _why_not(slots: SlotModel, support: Support, choice: ContinuousBatchingChoice) -> str | None:
    """Return why the model is not decoded over its slot cache, or None where it is. Leaves the cache empty."""
    model, name = slots.model, type(slots.model).__name__
    layer_types = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    if choice == "off":
        return "continuous_batching='off'"
    if support.missing:
        return f"{name}'s forward has no {', '.join(support.missing)}"
    if getattr(model, "_is_stateful", False) or not RECURRENT.isdisjoint(layer_types):
        return f"{name} keeps recurrent states, which have no place in a key/value cache"
    if not getattr(model, "_supports_attention_backend", False):
        return f"{name} does not attend through transformers' attention interface"
    try:
        return _compare(slots, num_layers=support.num_layers, vocab_size=support.vocab_size)
    except RAISED as error:
        return f"{name} does not run over a slot cache: {type(error).__name__}: {error}"
    finally:
        slots.cache.clear()


def _compare(model: SlotModel, *, num_layers: int, vocab_size: int) -> str | None:
    device = model.model.device
    sequences = [
        tuple((7 * i + 3 * row + 1) % vocab_size for i in range(n + 1)) for row, n in enumerate(PROMPT_LENGTHS)
    ]
    model.cache.resize(slots=len(sequences), columns=max(PROMPT_LENGTHS) + 1)
    rows = torch.arange(len(sequences), device=device)
    prefilled = model.prefill([sequence[:-1] for sequence in sequences], slots=rows, sources=rows)
    attended = [model.cache.step.calls if model.cache.step else 0]
    decoded = model.decode(
        torch.tensor([sequence[-1] for sequence in sequences], device=device),
        torch.tensor(PROMPT_LENGTHS, device=device),
        columns=max(PROMPT_LENGTHS) + 1,
    )
    attended.append(model.cache.step.calls if model.cache.step else 0)
    if attended != [num_layers] * 2 or model.cache.layer_indices != set(range(num_layers)):
        return (
            f"of its {num_layers} layers, {min(attended)} attend through the attention interface and "
            f"{len(model.cache.layer_indices)} keep keys and values"
        )
    plain = torch.stack([plain_logits(model.model, sequence, count=2) for sequence in sequences])
    difference = what_differs(torch.stack([prefilled, decoded], 1), plain)
    if difference is not None:
        return f"its logits over a slot cache differ from a plain forward's by {difference:.1e}"
    return None


def _default_cache_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return CPU_CACHE_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    return int(free * DEVICE_CACHE_FRACTION)
