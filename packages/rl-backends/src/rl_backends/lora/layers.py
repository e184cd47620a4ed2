"""Adapters as they lie in a model: their names, tensors and scaling, what they cost, and the model without them.

peft puts X.base_layer, X.lora_A.default and X.lora_B.default in the place of a linear layer X, and the parameters
X.lora_embedding_A.default and X.lora_embedding_B.default beside X.base_layer in that of an embedding. Only this file
knows it; it needs no peft, which a model with adapters brings along.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rl_backends.errors import ModelError
from rl_backends.lora.config import LoraConfig
from rl_parallel_plans.checkpoints import WRAPPERS, reshard

__all__ = [
    "ADAPTER",
    "AdaptedLayer",
    "AdapterSize",
    "adapted_head",
    "adapted_layers",
    "adapter_size",
    "adapter_tensors",
    "adapters_disabled",
    "base_name",
    "is_base",
    "named_places",
    "peft_name",
    "trained_whole",
    "unwrapped",
]

ADAPTER = "default"
"""peft's name of the one adapter of a layer."""

A_TAIL, B_TAIL = f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight"
EMBEDDING_A_TAIL, EMBEDDING_B_TAIL = f".lora_embedding_A.{ADAPTER}", f".lora_embedding_B.{ADAPTER}"
MAGNITUDE_TAIL = f".lora_magnitude_vector.{ADAPTER}.weight"
TAILS = (A_TAIL, B_TAIL, EMBEDDING_A_TAIL, EMBEDDING_B_TAIL, MAGNITUDE_TAIL)
"""How the names of all parameters of adapters end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedLayer:
    """A linear layer or an embedding with an adapter."""

    name: str
    """Of the layer in the model without adapters."""
    module: Any
    """peft's layer around it."""
    base: Tensor
    """W [out, in], frozen; of an embedding [words, hidden]."""
    lora_a: Tensor
    """[rank, in]; of an embedding [rank, words]."""
    lora_b: Tensor
    """[out, rank]; of an embedding [hidden, rank]."""
    is_embedding: bool
    """Whether its rows are looked up; B A is then added to W transposed."""
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
            lora_a=module.lora_embedding_A[ADAPTER] if _is_embedding(module) else module.lora_A[ADAPTER].weight,
            lora_b=module.lora_embedding_B[ADAPTER] if _is_embedding(module) else module.lora_B[ADAPTER].weight,
            is_embedding=_is_embedding(module),
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
        name = name.replace(f".lora_embedding_{matrix[-1]}.{ADAPTER}", f".lora_embedding_{matrix[-1]}")
    name = name.replace(MAGNITUDE_TAIL, ".lora_magnitude_vector")
    return f"base_model.model.{name}"


def _of_adapter(name: str) -> bool:
    return name.endswith(TAILS)


def _lora_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules():
        if _has_adapter(module):
            yield path, module


def _has_adapter(module: nn.Module) -> bool:
    return {"base_layer", "lora_A", "lora_B"} <= dict(module.named_children()).keys()


def _is_embedding(module: Any) -> bool:
    return ADAPTER in module.lora_embedding_A


# ---- The head, whose weight is read without calling it.


def adapted_head(lm_head: Any, hidden: Tensor) -> tuple[nn.Module, Tensor]:
    """A head without adapter, and hidden states for it, that make the logits that `lm_head` makes of `hidden`.

        W h + s B A h = [W, B] [h; s A h]

    so the update is never added to W, where a half precision would round it away. Differentiable into A, B and h. To be
    called in the model's forward, where FSDP has gathered the three; a head without adapter is returned as it is.

    Args:
        lm_head: a linear layer, or peft's layer around one; W [V, H], B [V, rank], A [rank, H].
        hidden: [n, H].
    """
    if not _has_adapter(lm_head):
        return lm_head, hidden
    base: Any = lm_head.base_layer
    if lm_head.disable_adapters:
        return base, hidden
    lora_a, lora_b = lm_head.lora_A[ADAPTER].weight, lm_head.lora_B[ADAPTER].weight
    low_rank = nn.functional.linear(hidden, lora_a) * lm_head.scaling[ADAPTER]
    head: Any = nn.Module()
    head.weight, head.bias = torch.cat([base.weight, lora_b], dim=1), base.bias
    return head, torch.cat([hidden, low_rank], dim=1)


# ---- What adapters cost, counted on a model on the meta device as well as on a sharded one.


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSize:
    """Numbers of the whole model, before it is shared out over ranks."""

    layers: int
    """Layers with an adapter."""
    trainable: int
    """Parameters that train: adapters, and modules trained whole."""
    total: int
    """All parameters."""
    trainable_bytes: int
    """Of the parameters that train."""
    frozen_bytes: int
    """Of the others, in the dtype that they are stored in."""
    merged_bytes: int
    """What `MergedWeights` has of its own: the weights that have an adapter."""

    @property
    def training_bytes(self) -> int:
        """Of gradients and AdamW's two moments: three times `trainable_bytes`."""
        return 3 * self.trainable_bytes

    def explain(self) -> str:
        """The numbers in one line."""
        return (
            f"LoRA on {self.layers} linear layers: {self.trainable:,} of {self.total:,} parameters train "
            f"({self.trainable / self.total:.2%}), {self.trainable_bytes / 2**20:.1f} MiB and "
            f"{self.training_bytes / 2**20:.1f} MiB of gradients and AdamW state; frozen weights "
            f"{self.frozen_bytes / 2**20:.1f} MiB; merged for a refit {self.merged_bytes / 2**20:.1f} MiB more"
        )


def adapter_size(model: nn.Module) -> AdapterSize:
    """Count the parameters of a model with adapters; tied ones once.

    Raises:
        ModelError: it has none.
    """
    layers = adapted_layers(model)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    return AdapterSize(
        layers=len(layers),
        trainable=sum(parameter.numel() for parameter in trainable),
        total=sum(parameter.numel() for parameter in (*trainable, *frozen)),
        trainable_bytes=sum(parameter.numel() * parameter.element_size() for parameter in trainable),
        frozen_bytes=sum(parameter.numel() * parameter.element_size() for parameter in frozen),
        merged_bytes=sum(layer.base.numel() * layer.base.element_size() for layer in layers),
    )


# ---- The policy with its adapters off.


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """Inside, forwards compute W x alone; after it, also after an error, what was before. May be nested.

    No parameter is touched, nor whether it trains, so that it holds under FSDP2 and tensor parallelism. Both the
    forward and, where there is one, its backward belong inside: recomputed activations would have adapters otherwise.

    Raises:
        ModelError: the model has no adapters, or trains other parameters too, whose first values are gone.
    """
    layers = adapted_layers(model)
    if whole := trained_whole(model):
        raise ModelError(
            f"{next(iter(whole))} is trained whole (modules_to_save), so that the policy without adapters is no longer "
            f"the model that training began with; freeze a copy as the reference instead"
        )
    # `enable_adapters` would also change which parameters train, which FSDP must not meet between two backwards.
    before = [(layer.module, layer.module.disable_adapters) for layer in layers]
    try:
        for module, _ in before:
            module._disable_adapters = True  # noqa: SLF001
        yield
    finally:
        for module, disabled in before:
            module._disable_adapters = disabled  # noqa: SLF001


def is_base(adapters: LoraConfig | None, *, steps_before: int) -> bool:
    """Whether the reference of a stage is the policy with its adapters disabled, which takes no memory.

    It is where nothing was trained before: `steps_before` is the run's optimizer steps before the stage.
    """
    return adapters is not None and not adapters.modules_to_save and steps_before == 0
