"""Make a Hugging Face model read packs of rows, or refuse it by name. Knows configs and names, no numbers, no mesh."""

from typing import Any

from torch import nn

from rl_backends.errors import ModelError
from rl_backends.packing.attention import packed_attention
from rl_backends.packing.limits import attention_modules, findings

__all__ = ["PACKED_ATTENTION", "enable_packing"]

PACKED_ATTENTION = "rl_backends_packed"
"""Name of the attention in transformers' AttentionInterface."""


def enable_packing(model: nn.Module) -> None:
    """Let every attention of `model` run on packed rows alone, from now on.

    The base model is then called with tokens `[1, sum of lengths]`, `position_ids` that begin at 0 in every row, and
    `cu_seq_lens_q=`, `cu_seq_lens_k=`, `max_length_q=`, `max_length_k=`; a call without them is refused, never answered
    by attention over all rows. Weights, names and state are untouched: only `attn_implementation` is another.

    Works on the meta device, before or after a model is sharded.

    Raises:
        ModelError: tokens of the model mix in a way that packing would let leak; every reason is listed.
    """
    found = list(dict.fromkeys(findings(model)))
    if found:
        listed = "\n".join(f"  {number}. {finding}" for number, finding in enumerate(found, 1))
        raise ModelError(
            f"{type(model).__qualname__} cannot be packed: set sequence_packing to false, or change what stands in the "
            f"way, {len(found)} reason(s):\n{listed}"
        )
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    for config in _configs(model):
        config._attn_implementation = PACKED_ATTENTION  # noqa: SLF001 - what set_attn_implementation sets, and no more
    for path, module in attention_modules(model):
        chosen = module.config._attn_implementation  # type: ignore[union-attr]  # noqa: SLF001 - as above
        assert chosen == PACKED_ATTENTION, f"{path} still runs {chosen}"


def _configs(model: nn.Module) -> list[Any]:
    """Each config that a module of the model holds, once."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    return [config for config in configs.values() if hasattr(config, "_attn_implementation")]
