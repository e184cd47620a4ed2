"""Choose how a model generates: by continuous batching where that is shown to be right, otherwise by `generate`.

It is shown before anything is generated. Two prompts of different length are run and continued, over the slot cache and
without one, and the logits must agree; every layer must also attend through transformers' attention interface, once a
forward, and store into the cache.
"""

import warnings
from typing import TYPE_CHECKING, Literal

import torch

from rl_generation.embedded.continuous_batching import ContinuousBatching
from rl_generation.embedded.inspection import Support
from rl_generation.embedded.slot_model import SlotModel
from rl_generation.embedded.whole_batches import PROMPT_LENGTHS, WholeBatches, plain_logits, what_differs
from rl_generation.errors import ModelError
from rl_generation.rollout import LogpOf

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ContinuousBatchingChoice", "Runner", "make_runner"]

ContinuousBatchingChoice = Literal["auto", "required", "off"]
"""`"auto"` warns where a model cannot have it, `"required"` refuses such a model, `"off"` does without."""

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


Runner = ContinuousBatching | WholeBatches
"""A way to generate, for one thread at a time."""


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
    attended = [model.last_step.calls if model.last_step else 0]
    decoded = model.decode(
        torch.tensor([sequence[-1] for sequence in sequences], device=device),
        torch.tensor(PROMPT_LENGTHS, device=device),
        columns=max(PROMPT_LENGTHS) + 1,
    )
    attended.append(model.last_step.calls if model.last_step else 0)
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
