"""A backend in words: its mesh, its plan, what it holds in which dtype, its adapters, its optimizer."""

import re
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from rl_backends.dtensor.mesh import sizes_of
from rl_backends.dtensor.sharded_model import ShardedModel
from rl_backends.lora import adapter_size
from rl_backends.optimizers import Optimizers

__all__ = ["describe", "ignored_settings"]


def describe(sharded: ShardedModel, *, optimizers: Optimizers | None) -> str:
    """Several lines; dtypes are those of the parameters and of the optimizer's state as they are now."""
    config, model = sharded.config, sharded.model
    axes = " x ".join(f"{size} {axis}" for axis, size in sizes_of(sharded.mesh).items())
    wrapped = "under FSDP2" if sharded.under_fsdp else "without FSDP, which has nothing to shard here"
    parameters = [each for each in model.parameters() if each.is_floating_point()]
    lines = [
        f"DTensor backend on {config.device}: {axes} ranks, {wrapped}, computing in {config.precision}, "
        + _dtypes("trained weights", [each for each in parameters if each.requires_grad])
        + _dtypes(", frozen weights", [each for each in parameters if not each.requires_grad])
        + ("" if optimizers is None else _dtypes(", optimizer state", _state(optimizers))),
        *sharded.kernels.lines,
        sharded.plan.explain(),
    ]
    if config.device == "cpu" and (num_gpus := torch.cuda.device_count()):
        lines.append(f"this machine has {num_gpus} GPUs, which device='cpu' leaves idle: set device='cuda' to use them")
    lines += [f"ignored: {each}" for each in ignored_settings(model, router_aux_loss_coef=config.router_aux_loss_coef)]
    if getattr(model, "peft_config", None) is not None:
        lines.append(adapter_size(model).explain())
    if optimizers is not None:
        lines.append(optimizers.explain())
    return "\n".join(lines)


def ignored_settings(model: nn.Module, *, router_aux_loss_coef: float) -> list[str]:
    """What the model's own configuration asks for in training, and this backend does not do."""
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = []
    for name, value in sorted(vars(text).items()):
        if re.search(r"dropout|pdrop", name) and isinstance(value, float) and value > 0:
            found.append(
                f"{name}={value:g} of the model: it runs without dropout, so that its log-probabilities repeat"
            )
    coefficient = getattr(text, "router_aux_loss_coef", None)
    if getattr(text, "output_router_logits", False) and coefficient and router_aux_loss_coef == 0:
        found.append(
            f"router_aux_loss_coef={coefficient:g} of the model: set router_aux_loss_coef of this backend, whose loss "
            f"does not depend on how a batch is cut"
        )
    return found


def _dtypes(what: str, tensors: list[Tensor]) -> str:
    """Such as "trained weights in float32"; with shares, where there are several dtypes; "" without tensors."""
    elements: Counter[str] = Counter()
    for tensor in tensors:
        elements[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
    total = sum(elements.values())
    shares = [f"{dtype} ({count / total:.1%})" for dtype, count in elements.most_common()]
    return f"{what} in {' and '.join(elements if len(elements) == 1 else shares)}" if total else ""


def _state(optimizers: Optimizers) -> list[Tensor]:
    """Moments: state of more than one element, which the number of steps is not."""
    values = [value for each in optimizers.each for state in each.state.values() for value in state.values()]
    return [value for value in values if isinstance(value, Tensor) and value.numel() > 1 and value.is_floating_point()]
