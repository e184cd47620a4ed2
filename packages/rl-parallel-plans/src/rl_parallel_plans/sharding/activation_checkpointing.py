"""Recompute a layer's activations in backward instead of keeping them: less memory for more work (arXiv:1604.06174).

Works on the layers of every stack, whatever they are made of, in training and in eval mode, before FSDP or after it.
Names do not change: there is no wrapper around a layer, only its `forward` is replaced. A copy of the model checkpoints
as well.

What is kept of one layer, B·S tokens, from its input `hidden`:

    full         `hidden` alone; backward runs the whole layer forward again.
    selective    `hidden`, and what matrix products, fused attention and collectives returned; backward repeats norms,
                 activations, rotary embeddings and other cheap elementwise work, and communicates nothing again.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, update_wrapper
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _CachedTorchDispatchMode,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.structure import stacked_layers

ActivationCheckpointing = Literal["full", "selective"]
SAVED = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::_grouped_mm",
        "aten::_scaled_mm",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "flex_attention",
        "flash_attn::_flash_attn_forward",
        "flash_attn::_flash_attn_varlen_forward",
        "torch_attn::_varlen_attn",
        "_c10d_functional::all_reduce",
        "_c10d_functional::all_gather_into_tensor",
        "_c10d_functional::reduce_scatter_tensor",
        "_c10d_functional::all_to_all_single",
    }
)
"""Operators whose results "selective" keeps. Not batched products: eager attention makes [heads, S, S] of them."""
CACHES = ("cache", "past_key_values", "past_key_value", "layer_past", "cache_params")
"""Arguments of a layer that hold what earlier tokens left, and that a second forward would write to once more."""
MARK = "_rl_activation_checkpointing"
# What selective checkpointing keeps goes through the caller's hooks on saved tensors (`save_on_cpu`), as everything
# else that backward needs does. Since torch 2.15, which asks for a choice; older releases keep it past the hooks.
HOOKS: dict[str, Any] = (
    {"respect_saved_tensors_hooks": True}
    if "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters
    else {}
)


def apply_activation_checkpointing(model: nn.Module, mode: ActivationCheckpointing) -> nn.Module:
    """Make every layer of every stack of `model` recompute its activations in backward; return the model.

    mode: "full" keeps a layer's input only; "selective" also what is expensive to compute again.

    Where a gradient is recorded, an empty key/value cache is not passed on to the layers: a recomputation would fill it
    twice. Raises PlanError for another mode, for a model without layers, where it was applied before or the model's own
    is on; and in forward, for a cache that holds tokens.
    """
    if mode not in ("full", "selective"):
        raise PlanError(f'activation checkpointing is {mode!r}: it is "full" or "selective"')
    layers = stacked_layers(model)
    if not layers:
        raise PlanError(f"{type(model).__name__} holds no nn.ModuleList of layers to recompute one by one")
    if any(MARK in layer.__dict__ for layer in layers.values()):
        raise PlanError(f"{type(model).__name__} checkpoints its activations already: apply it once")
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise PlanError(
            f"{type(model).__name__} checkpoints its activations itself, and each layer would be recomputed twice: "
            "disable that, or leave activation checkpointing to the model"
        )
    for layer in layers.values():
        _recompute(layer, mode)
    return model


@contextmanager
def without_recomputation(layer: nn.Module) -> Iterator[None]:
    """`layer` has its own forward inside of this, and may be given another, which is then recomputed as the old was."""
    mode = layer.__dict__.pop(MARK, None)
    if mode is None:
        yield
        return
    forward = layer.__dict__.pop("forward").args[0]
    if getattr(forward, "__func__", None) is not type(layer).forward:  # it was the instance's own
        layer.forward = forward
    yield
    _recompute(layer, mode)


def _recompute(layer: nn.Module, mode: ActivationCheckpointing) -> None:
    forward = layer.forward
    options = {"context_fn": _selective_contexts, **HOOKS} if mode == "selective" else {}
    # Layers that only read what others have put into a cache say so, and are given it.
    caches = () if getattr(layer, "_can_checkpoint_with_cache", False) else CACHES
    layer.forward = update_wrapper(partial(_checkpointed, forward, options, caches), forward)
    layer.__dict__[MARK] = mode


def _checkpointed(
    forward: Callable[..., Any],
    options: Mapping[str, Any],
    caches: tuple[str, ...],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    for name in caches:
        if (cache := kwargs.get(name)) is None:
            continue
        if _holds_tokens(cache):
            raise PlanError(
                f"{name} holds tokens while a gradient is recorded, and recomputing a layer would add its own twice: "
                "pass the whole sequence without a cache, or run under torch.no_grad()"
            )
        kwargs[name] = None
    return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)


def _holds_tokens(cache: object) -> bool:
    if isinstance(cache, tuple | list):
        return any(part is not None for part in cache)
    for question in ("get_seq_length", "has_previous_state"):
        answer = getattr(cache, question, None)
        try:
            if answer() if callable(answer) else answer:
                return True
        except ValueError:  # how a cache of Hugging Face says that none of its layers is of this kind
            continue
    return False


class _Reusing(_CachedTorchDispatchMode):
    """Hands out what was kept, and computes again what the model has written to since (`out.add_(bias)`)."""

    def __torch_dispatch__(  # noqa: PLR0917 - as torch calls it
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if "has been mutated" not in str(error):
                raise
            return func(*args, **(kwargs or {}))


def _selective_contexts() -> Any:
    keeping, reusing = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
    reusing.__class__ = _Reusing
    return keeping, reusing


def _policy(_context: object, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    name = operator.name().partition(".")[0]
    return CheckpointPolicy.MUST_SAVE if name in SAVED else CheckpointPolicy.PREFER_RECOMPUTE
