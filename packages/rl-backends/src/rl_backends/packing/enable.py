"""Make a Hugging Face model read packs of rows, or refuse it by name; or padded rows by another kernel than its own."""

import functools
from typing import Any

from torch import nn

from rl_backends.errors import ModelError
from rl_backends.packing.attention import AttentionKernel, packed_attention, padded_attention
from rl_backends.packing.limits import attention_modules, findings, padded_findings

__all__ = ["enable_packing", "enable_padded_kernel"]


def enable_packing(model: nn.Module, *, kernel: AttentionKernel = "sdpa") -> None:
    """Let every attention of `model` run on packed rows alone, from now on, by `kernel`.

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
    _use(model, f"rl_backends_packed_{kernel}", functools.partial(packed_attention, kernel=kernel))


def enable_padded_kernel(model: nn.Module, *, kernel: AttentionKernel) -> None:
    """Let every attention of `model` run on right-padded rows by `kernel`, "sdpa" or "flex", instead of its own.

    Raises:
        ModelError: an attention of the model does something that these kernels are not told of.
    """
    if found := list(dict.fromkeys(padded_findings(model))):
        raise ModelError(
            f"{type(model).__qualname__} cannot run with kernels.attention={kernel!r} (choose 'auto', the model's own "
            f"attention): {'; '.join(found)}"
        )
    _use(model, f"rl_backends_padded_{kernel}", functools.partial(padded_attention, kernel=kernel))


def _use(model: nn.Module, name: str, attention: Any) -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(name, attention)
    for config in _configs(model):
        config._attn_implementation = name  # noqa: SLF001 - what set_attn_implementation sets, and no more
    for path, module in attention_modules(model):
        chosen = module.config._attn_implementation  # type: ignore[union-attr]  # noqa: SLF001 - as above
        assert chosen == name, f"{path} still runs {chosen}"


def _configs(model: nn.Module) -> list[Any]:
    """Each config that a module of the model holds, once."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    return [config for config in configs.values() if hasattr(config, "_attn_implementation")]
