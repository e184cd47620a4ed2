"""Adapters as they lie in a model: their names, tensors and scaling, whatever wraps or shards them.

peft puts X.base_layer, X.lora_A.default and X.lora_B.default in the place of a linear layer X. Here alone is that
known. Moves no number, and needs no peft: a model with adapters brings it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from rl_backends.errors import ModelError
from rl_parallel_plans.checkpoints import WRAPPERS, reshard

__all__ = [
    "ADAPTER",
    "AdaptedLayer",
    "adapted_layers",
    "adapter_tensors",
    "base_name",
    "named_places",
    "peft_name",
    "trained_whole",
    "unwrapped",
]

ADAPTER = "default"
"""peft's name of the one adapter of a layer."""

A_TAIL, B_TAIL = f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight"
MAGNITUDE_TAIL = f".lora_magnitude_vector.{ADAPTER}.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedLayer:
    """A linear layer with an adapter."""

    name: str
    """Of the linear layer in the model without adapters."""
    module: Any
    """peft's layer around it."""
    base: Tensor
    """W [out, in], frozen."""
    lora_a: Tensor
    """[rank, in]."""
    lora_b: Tensor
    """[out, rank]."""
    scaling: float
    """What B A is multiplied by."""
    magnitude: Tensor | None
    """Of DoRA: the length that each row of the merged weight has, [out]; None of LoRA."""


def adapted_layers(model: nn.Module) -> list[AdaptedLayer]:
    """Every adapted layer in the model's order; sharded parameters as they are sharded, not as a forward left them.

    Raises:
        ModelError: there is none.
    """
    reshard(model)
    layers = [
        AdaptedLayer(
            name=unwrapped(path),
            module=module,
            base=module.base_layer.weight,
            lora_a=module.lora_A[ADAPTER].weight,
            lora_b=module.lora_B[ADAPTER].weight,
            scaling=float(module.scaling[ADAPTER]),
            magnitude=module.lora_magnitude_vector[ADAPTER].weight if module.use_dora[ADAPTER] else None,
        )
        for path, module in _lora_modules(model)
    ]
    if not layers:
        raise ModelError(f"{type(model).__name__} has no adapters; call add_lora(model, config) before it is sharded")
    return layers


def trained_whole(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that train and are no adapter's, by name."""
    reshard(model)
    named = ((unwrapped(name), parameter) for name, parameter in model.named_parameters())
    return {name: parameter for name, parameter in named if parameter.requires_grad and not _of_adapter(name)}


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Adapters, and what is trained whole, under the names of peft's files; as the model holds them, sharded or not.

    Raises:
        ModelError: the model has no adapters.
    """
    adapted_layers(model)
    named = ((unwrapped(name), parameter) for name, parameter in model.named_parameters())
    return {peft_name(name): parameter for name, parameter in named if _of_adapter(name) or parameter.requires_grad}


def named_places(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Where parameters, then buffers, are registered, by name in the model without adapters; both ends of ties.

    As (name, module, attribute): what is found there may be another object after sharding or offloading.
    """
    for registered in ("_parameters", "_buffers"):
        for path, module in model.named_modules(remove_duplicate=False):
            for own, tensor in getattr(module, registered).items():
                name = f"{unwrapped(path)}.{own}" if path else own
                if tensor is not None and not _of_adapter(name):
                    yield base_name(name), module, own


def unwrapped(name: str) -> str:
    """The name without what wrappers of torch put in."""
    return ".".join(token for token in name.split(".") if token not in WRAPPERS)


def base_name(name: str) -> str:
    """The name in the model without adapters: X.weight for X.base_layer.weight."""
    return ".".join(part for part in name.split(".") if part != "base_layer")


def peft_name(name: str) -> str:
    """The name in peft's files of a parameter with this name in the model."""
    for matrix in ("lora_A", "lora_B"):
        name = name.replace(f".{matrix}.{ADAPTER}.weight", f".{matrix}.weight")
    name = name.replace(MAGNITUDE_TAIL, ".lora_magnitude_vector")
    return f"base_model.model.{name}"


def _of_adapter(name: str) -> bool:
    return name.endswith((A_TAIL, B_TAIL, MAGNITUDE_TAIL))


def _lora_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules():
        if {"base_layer", "lora_A", "lora_B"} <= dict(module.named_children()).keys():
            yield path, module
