"""Shows, before anything is generated, that a model computes with a cache what it computes without one.

Two prompts of different length are run and continued, both ways, and the logits must agree. Over the slot cache, every
layer must also attend through `embedded.attention`, once a forward, and store into the cache.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from rl_generation.embedded.bare_generate import bare_generate
from rl_generation.embedded.slot_model import SlotModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["generate_cache_is_right", "why_not_continuous"]

PROMPT_LENGTHS = (5, 2)
# Of the largest logit; rounding in each dtype is ten times less, another mask or scale is far more.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
LOW_PRECISION_TOLERANCE = 0.1
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


def why_not_continuous(model: SlotModel, *, num_layers: int, vocab_size: int) -> str | None:
    """Return why `model` cannot be decoded over its slot cache, or None where it can. Leaves the cache empty."""
    name = type(model.model).__name__
    layer_types = getattr(model.model.config.get_text_config(decoder=True), "layer_types", None) or ()
    if getattr(model.model, "_is_stateful", False) or not RECURRENT.isdisjoint(layer_types):
        return f"{name} keeps recurrent states, which have no place in a key/value cache"
    if not getattr(model.model, "_supports_attention_backend", False):
        return f"{name} does not attend through transformers' attention interface"
    try:
        return _compare(model, num_layers=num_layers, vocab_size=vocab_size)
    except RAISED as error:
        return f"{name} does not run over a slot cache: {type(error).__name__}: {error}"
    finally:
        model.cache.clear()


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
    plain = torch.stack([_plain(model.model, sequence, count=2) for sequence in sequences])
    difference = _difference(torch.stack([prefilled, decoded], 1), plain)
    if difference is not None:
        return f"its logits over a slot cache differ from a plain forward's by {difference:.1e}"
    return None


def generate_cache_is_right(model: "PreTrainedModel", *, pad_token_id: int, vocab_size: int) -> bool:
    """Whether `model.generate` with its own cache sees the logits of a plain forward.

    transformers 4.57 gets the first tokens wrong behind a prompt shorter than the window of a convolution.
    """
    for length in (*PROMPT_LENGTHS, 1):
        prompt = torch.arange(1, length + 1, device=model.device)[None] % vocab_size
        generated = bare_generate(
            model,
            prompt,
            max_new_tokens=3,
            pad_token_id=pad_token_id,
            use_cache=True,
            output_logits=True,
            return_dict_in_generate=True,
        )
        plain = _plain(model, generated.sequences[0, :-1].tolist(), count=3)
        if _difference(torch.cat(generated.logits), plain) is not None:
            return False
    return True


def _difference(logits: Float[Tensor, "*shape V"], plain: Float[Tensor, "*shape V"]) -> float | None:
    """Return the largest difference where it is more than rounding."""
    # Weights that are still to come may be anything.
    if not plain.isfinite().all():
        return None
    largest = float((logits.float() - plain.float()).abs().max())
    allowed = TOLERANCE.get(plain.dtype, LOW_PRECISION_TOLERANCE) * max(1.0, float(plain.abs().max()))
    return None if largest <= allowed else largest


@torch.no_grad()
def _plain(model: "PreTrainedModel", sequence: Sequence[int], *, count: int) -> Float[Tensor, "count V"]:
    """Return the last logits of one forward without a cache."""
    logits: Tensor = model(input_ids=torch.tensor([sequence], device=model.device), use_cache=False).logits[0, -count:]
    return logits
