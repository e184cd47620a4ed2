"""Adapters as they lie in a model: their names, tensors and scaling, what they cost, and the model without them.

peft puts X.base_layer, X.lora_A.default and X.lora_B.default in the place of a linear layer X, and the parameters
X.lora_embedding_A.default and X.lora_embedding_B.default beside X.base_layer in that of an embedding. Stacked experts
are not wrapped: their module gets the parameters W_lora_A and W_lora_B beside W, so that both lie where the experts
lie, whatever shares them out. Only this file knows it; it needs no peft, which a model with adapters brings along.
"""

import functools
import re
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rl_backends.config import LoraConfig
from rl_backends.errors import ModelError
from rl_parallel_plans.checkpoints import WRAPPERS, reshard

ADAPTER = "default"
"""peft's name of the one adapter of a layer."""

A_TAIL, B_TAIL = f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight"
EMBEDDING_A_TAIL, EMBEDDING_B_TAIL = f".lora_embedding_A.{ADAPTER}", f".lora_embedding_B.{ADAPTER}"
MAGNITUDE_TAIL = f".lora_magnitude_vector.{ADAPTER}.weight"
EXPERTS_A_TAIL, EXPERTS_B_TAIL = "_lora_A", "_lora_B"
TAILS = (A_TAIL, B_TAIL, EMBEDDING_A_TAIL, EMBEDDING_B_TAIL, MAGNITUDE_TAIL, EXPERTS_A_TAIL, EXPERTS_B_TAIL)
"""How the names of all parameters of adapters end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedLayer:
    """A linear layer, an embedding or a stacked weight of experts with an adapter."""

    name: str
    """Of the layer in the model without adapters; of experts, of the weight."""
    module: Any
    """peft's layer around it; of experts, the module that has the weight."""
    base: Tensor
    """W [out, in], frozen; of an embedding [words, hidden]; of experts [experts, out, in], or transposed."""
    lora_a: Tensor
    """[rank, in]; of an embedding [rank, words]; of experts [experts, rank, in]."""
    lora_b: Tensor
    """[out, rank]; of an embedding [hidden, rank]; of experts [experts, out, rank]."""
    kind: Literal["linear", "embedding", "experts"]
    """An embedding's rows are looked up: B A is added to W transposed."""
    transposed: bool
    """Whether experts have W as [experts, in, out] (GPT-OSS)."""
    scaling: float
    magnitude: Tensor | None
    """Of DoRA: the length that each row of the merged weight has, [out]; None of LoRA."""

    @property
    def weight(self) -> str:
        """The name of W in the model without adapters."""
        return self.name if self.kind == "experts" else f"{self.name}.weight"


def adapted_layers(model: nn.Module) -> list[AdaptedLayer]:
    """Every adapted layer in the model's order; sharded parameters as they are sharded, not as a forward left them.

    Raises:
        ModelError: there is none.
    """
    reshard(model)
    layers: list[AdaptedLayer] = []
    for path, module in model.named_modules():
        if _has_adapter(module):
            peft_layer: Any = module
            embedding = ADAPTER in peft_layer.lora_embedding_A
            layers.append(
                AdaptedLayer(
                    name=unwrapped(path),
                    module=peft_layer,
                    base=peft_layer.base_layer.weight,
                    lora_a=peft_layer.lora_embedding_A[ADAPTER] if embedding else peft_layer.lora_A[ADAPTER].weight,
                    lora_b=peft_layer.lora_embedding_B[ADAPTER] if embedding else peft_layer.lora_B[ADAPTER].weight,
                    kind="embedding" if embedding else "linear",
                    transposed=False,
                    scaling=float(peft_layer.scaling[ADAPTER]),
                    magnitude=peft_layer.lora_magnitude_vector[ADAPTER].weight
                    if peft_layer.use_dora[ADAPTER]
                    else None,
                )
            )
        layers += [
            AdaptedLayer(
                name=unwrapped(f"{path}.{weight}"),
                module=module,
                base=module.get_parameter(weight),
                lora_a=module.get_parameter(f"{weight}{EXPERTS_A_TAIL}"),
                lora_b=module.get_parameter(f"{weight}{EXPERTS_B_TAIL}"),
                kind="experts",
                transposed=_is_transposed(module),
                scaling=module.__dict__["lora_scaling"],
                magnitude=None,
            )
            for weight in _adapted_weights(module)
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

    What a refit of adapters alone sends: `rl_refit.StateDictSource(adapter_tensors(model))`.

    Raises:
        ModelError: the model has no adapters.
    """
    adapted_layers(model)
    in_file = peft_names(model)
    named = ((unwrapped(name), parameter) for name, parameter in model.named_parameters())
    return {in_file(name): parameter for name, parameter in named if _of_adapter(name) or parameter.requires_grad}


def unwrapped(name: str) -> str:
    """The name without what wrappers of torch put in."""
    return ".".join(token for token in name.split(".") if token not in WRAPPERS)


def base_name(name: str) -> str:
    """The name in the model without adapters: X.weight for X.base_layer.weight."""
    return ".".join(part for part in name.split(".") if part != "base_layer")


def peft_names(model: nn.Module) -> Callable[[str], str]:
    """What gives the name in peft's files of a parameter with this name in the model."""
    of_experts: dict[str, str] = {}
    for path, module in model.named_modules():
        weights = _adapted_weights(module)
        for number, weight in enumerate(weights):  # peft wraps the module once for each, the last one outermost
            nested = ".base_layer" * (len(weights) - 1 - number)
            for tail in (EXPERTS_A_TAIL, EXPERTS_B_TAIL):
                of_experts[unwrapped(f"{path}.{weight}{tail}")] = f"{unwrapped(path)}{nested}.{tail[1:]}.weight"

    def in_file(name: str) -> str:
        name = of_experts.get(name, name).replace(MAGNITUDE_TAIL, ".lora_magnitude_vector")
        return "base_model.model." + re.sub(rf"(\.lora_(embedding_)?[AB])\.{ADAPTER}", r"\1", name)

    return in_file


def to_peft(name: str, tensor: Tensor) -> Tensor:
    """An unsharded tensor of the model as peft's files have it.

    Of experts: A as [experts * rank, in] and B as [out, rank * experts].
    """
    if name.endswith(EXPERTS_A_TAIL):
        return tensor.flatten(0, 1)
    return tensor.permute(1, 2, 0).flatten(1) if name.endswith(EXPERTS_B_TAIL) else tensor


def _of_adapter(name: str) -> bool:
    return name.endswith(TAILS)


def _has_adapter(module: nn.Module) -> bool:
    return {"base_layer", "lora_A", "lora_B"} <= dict(module.named_children()).keys()


# ---- Experts, whose stacked weights the module's own code reads.


def adapt_experts(module: Any, weights: list[str], *, rank: int, scaling: float) -> None:
    """Give a module of stacked experts an adapter for each of its `weights`; the module computes with W + scaling B A.

    A and B have no values yet. They are parameters of the module itself, [experts, ...] as its weights are, so FSDP
    shards them along.
    """
    for weight in weights:
        base = module.get_parameter(weight)
        num_experts, rows, columns = base.shape
        num_out, num_in = (columns, rows) if _is_transposed(module) else (rows, columns)
        for tail, shape in ((EXPERTS_A_TAIL, (rank, num_in)), (EXPERTS_B_TAIL, (num_out, rank))):
            empty = torch.empty(num_experts, *shape, dtype=torch.float32, device=base.device)
            module.register_parameter(f"{weight}{tail}", nn.Parameter(empty))
    module.lora_weights, module.lora_scaling, module._disable_adapters = weights, scaling, False  # noqa: SLF001
    module.forward = types.MethodType(_forward_of_experts(type(module).forward), module)


@functools.cache
def _forward_of_experts(forward: Callable[..., Any]) -> Callable[..., Any]:
    def adapted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._disable_adapters:
            return forward(self, *args, **kwargs)
        # An entry of the instance's __dict__ hides the parameter of the same name; so does one of tensor or expert
        # parallelism, which is then the local part, and comes back afterwards.
        hidden = {name: self.__dict__[name] for name in self.lora_weights if name in self.__dict__}
        merged = {}
        for name in self.lora_weights:
            base, lora_a, lora_b = (getattr(self, f"{name}{tail}") for tail in ("", EXPERTS_A_TAIL, EXPERTS_B_TAIL))
            pair = (lora_a.mT, lora_b.mT) if _is_transposed(self) else (lora_b, lora_a)
            merged[name] = torch.baddbmm(base, *(each.to(base.dtype) for each in pair), alpha=self.lora_scaling)
        self.__dict__.update(merged)
        try:
            return forward(self, *args, **kwargs)
        finally:
            for name in merged:
                del self.__dict__[name]
            self.__dict__.update(hidden)

    return adapted


def _adapted_weights(module: nn.Module) -> list[str]:
    """Of a module of stacked experts, in its own order; none of any other."""
    weights: list[str] = module.__dict__.get("lora_weights", [])
    return weights


def _is_transposed(module: nn.Module) -> bool:
    return bool(getattr(module, "is_transposed", False))  # where peft looks too


# ---- The head, whose weight is read without calling it.


def adapted_head(lm_head: Any, hidden: Tensor) -> tuple[nn.Module, Tensor]:
    """A head without adapter, and hidden states for it, that make the logits that `lm_head` makes of `hidden`.

        W h + s B A h = [W, B] [h; s A h]

    so the update is never added to W, where a half precision would round it away. Differentiable into A, B and h. To be
    called in the model's forward, where FSDP has gathered the three; a head without adapter is returned as it is.
    W [V, H], B [V, rank], A [rank, H], hidden [n, H].
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
    """Layers with an adapter; a stacked weight of experts is one."""
    trainable: int
    """Parameters that train: adapters, and modules trained whole."""
    total: int
    trainable_bytes: int
    """Of the parameters that train."""
    frozen_bytes: int
    """Of the others, in the dtype that they are stored in."""
    merged_bytes: int
    """What `MergedWeights` has of its own: the weights that have an adapter."""

    def explain(self) -> str:
        """The numbers in one line."""
        return (
            f"LoRA on {self.layers} layers: {self.trainable:,} of {self.total:,} parameters train "
            f"({self.trainable / self.total:.2%}), {self.trainable_bytes / 2**20:.1f} MiB and "
            f"{3 * self.trainable_bytes / 2**20:.1f} MiB of gradients and AdamW state; frozen weights "
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
    before = [(layer.module, layer.module._disable_adapters) for layer in layers]  # noqa: SLF001
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
