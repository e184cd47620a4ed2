"""Adapters put into a model, by peft, and given their first values. Before sharding, on the meta device or off it.

The model keeps its class and its names, but for X.base_layer where X had an adapter put around it. A pattern of the
configuration that fits nothing, or something that cannot be adapted, is an error: an adapter that is silently not there
is found out after the run. First values are drawn whole from a seed and a name, and each rank keeps its part.
"""

import hashlib
import math
from collections.abc import Iterable
from fnmatch import fnmatchcase

import torch
from torch import nn

from rl_backends.config import LoraConfig
from rl_backends.errors import ModelError
from rl_backends.loading.weights import write_whole
from rl_backends.lora.layers import (
    A_TAIL,
    ADAPTER,
    B_TAIL,
    EMBEDDING_A_TAIL,
    EMBEDDING_B_TAIL,
    EXPERTS_A_TAIL,
    EXPERTS_B_TAIL,
    adapt_experts,
    adapted_layers,
)
from rl_parallel_plans import named_shards, to_local_if_dtensor
from rl_parallel_plans.sharding.fsdp import FP32_PARAMETERS, kept_in_fp32
from rl_parallel_plans.structure import collapsed, text_layers, tied_names


def add_lora(model: nn.Module, config: LoraConfig, *, seed: int = 0, layers_only: bool = False) -> nn.Module:
    """Freeze `model` and put adapters into it; before it is sharded. The model is changed in place and returned.

    Args:
        model: with weights, or on the meta device: then call `initialise_adapters` when its parameters have memory.
        config: where adapters go, their size, and the dtype that the frozen weights get.
        seed: of `initialise_adapters`.
        layers_only: refuse adapters on the embeddings, the head and experts, which a backend has no place for.

    Raises:
        ModelError: peft is not installed, the model has adapters already, or `config` names what cannot be adapted.
            Nothing was changed.
    """
    require_peft()
    if getattr(model, "peft_config", None):
        raise ModelError(f"{type(model).__name__} has adapters already; give the model without them")
    targets = _find_targets(model, config.target_modules, layers_only=layers_only)
    ends = _find_ends(model)
    if config.use_dora and (outside := [name for name in targets if name in ends]):
        raise ModelError(
            f"target_modules names {outside[0]}, and use_dora=True is for linear layers of the decoder: leave it "
            f"out, or set use_dora=False"
        )
    experts = _find_experts(model, config.target_parameters)
    if experts and layers_only:
        raise ModelError(
            f"target_parameters={config.target_parameters!r}: adapters on experts are the DTensor backend's "
            f"(policy.dtensor_cfg); leave target_parameters out"
        )
    whole = _find_trained_whole(model, config.modules_to_save, targets=[*targets, *experts])
    import peft

    asked = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
        target_modules=list(targets),
        bias="none",
    )
    if targets:
        peft.inject_adapter_in_model(asked, model, adapter_name=ADAPTER, low_cpu_mem_usage=True)
        found = [layer.name for layer in adapted_layers(model)]
        assert found == list(targets), f"peft adapted {sorted(set(found) ^ set(targets))} otherwise than asked to"
    else:  # of which peft would make an error; experts have adapters of their own
        model.requires_grad_(requires_grad=False)
        setattr(model, "peft_config", {ADAPTER: asked})  # noqa: B010 - of no type that torch tells
    for path, weights in experts.items():
        adapt_experts(model.get_submodule(path), weights, rank=config.rank, scaling=config.scaling)
    for module in whole.values():
        module.requires_grad_(requires_grad=True)
    # Frozen weights in their dtype, all else in float32; a parameter stays the same object, so that ties hold.
    fp32 = kept_in_fp32(model, config.torch_base_dtype, FP32_PARAMETERS)
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            keeps = parameter.requires_grad or name in fp32
            parameter.data = parameter.data.to(torch.float32 if keeps else config.torch_base_dtype)
    if all(parameter.is_meta for parameter in model.parameters()):
        return model
    for layer in (each for each in adapted_layers(model) if each.kind != "experts"):
        for adapter in ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector"):
            getattr(layer.module, adapter).to_empty(device=layer.base.device)
    initialise_adapters(model, seed=seed)
    return model


@torch.no_grad()
def initialise_adapters(model: nn.Module, *, seed: int) -> None:
    """Give adapters their first values, in place, as peft has them; the model computes what it did before.

    B is zero, A uniform within 1 / sqrt(in), and the magnitudes of DoRA are the lengths of the rows of W. Of an
    embedding A is zero and B normal.

    The values depend on `seed` and on the layer's name alone: not on the mesh, the order, the device or torch's own
    random state, which is left alone. Moves nothing between ranks.

    Raises:
        ModelError: the model has no adapters.
    """
    for layer in adapted_layers(model):
        if layer.magnitude is not None:  # this rank has the same rows of both
            rows = to_local_if_dtensor(layer.base.detach()).float()
            to_local_if_dtensor(layer.magnitude).copy_(torch.linalg.vector_norm(rows, dim=1))
    for shard in named_shards(model):
        if shard.name.endswith((A_TAIL, B_TAIL, EMBEDDING_A_TAIL, EMBEDDING_B_TAIL, EXPERTS_A_TAIL, EXPERTS_B_TAIL)):
            write_whole(first_value(shard.name, shard.shape, seed=seed), [shard])


def first_value(name: str, shape: tuple[int, ...], *, seed: int) -> torch.Tensor:
    """The first value of the A or the B of this name, unsharded: see `initialise_adapters`."""
    if name.endswith((B_TAIL, EMBEDDING_A_TAIL, EXPERTS_B_TAIL)):
        return torch.zeros(shape)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
    if name.endswith(EMBEDDING_B_TAIL):
        return torch.empty(shape).normal_(generator=generator)
    bound = 1 / math.sqrt(shape[-1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def require_peft() -> None:
    """Raise ModelError with the line that installs peft, where it is not."""
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise ModelError(
            f"LoRA needs peft, which cannot be imported ({error}): pip install 'rl-backends[lora]'"
        ) from error


# ---- Which modules: names in, modules out, or a refusal.


def _find_targets(
    model: nn.Module, target_modules: str | tuple[str, ...], *, layers_only: bool = False
) -> dict[str, nn.Module]:
    """The layers that `LoraConfig.target_modules` means, by name, in the model's order."""
    linears = _adaptable_linears(model)
    if target_modules == "all-linear":
        return dict(linears)
    ends = {} if layers_only else _find_ends(model)
    adaptable: dict[str, nn.Module] = {**linears, **ends}
    wanted: set[str] = set()
    for pattern in target_modules:
        matches = _ending_in(dict(model.named_modules()), pattern)
        if not matches:
            raise ModelError(
                f"target_modules: {pattern!r} is the end of no module's name in {type(model).__name__}; its linear "
                f"layers end in {_ends(linears)}"
            )
        if loose := [name for name in matches if name not in adaptable]:
            raise ModelError(
                f"target_modules: {pattern!r} also fits {loose[0]}, which cannot be adapted: "
                f"{_why_not(model, loose[0], layers_only=layers_only)}; name linear layers of the decoder alone, which "
                f"end in {_ends(linears)}"
            )
        wanted |= set(matches)
    return {name: module for name, module in model.named_modules() if name in wanted}


def _find_experts(model: nn.Module, target_parameters: tuple[str, ...]) -> dict[str, list[str]]:
    """The weights that `LoraConfig.target_parameters` means: modules of stacked experts, and names of their weights."""
    stack = text_layers(model)
    named = dict(model.named_parameters())
    adaptable = [
        name
        for name, parameter in named.items()
        if stack is not None
        and name.startswith(f"{stack[0]}.")
        and "experts" in name.split(".")
        and parameter.ndim == 3
        and parameter.is_floating_point()
    ]
    found: dict[str, list[str]] = {}
    wanted: set[str] = set()
    for pattern in target_parameters:
        matches = _ending_in(named, pattern)
        if loose := next((name for name in matches if name not in adaptable), None):
            raise ModelError(
                f"target_parameters: {pattern!r} also fits {loose}, {list(named[loose].shape)}, which is no stacked "
                f"weight of experts [experts, out, in]; those end in {_ends(adaptable)}, and target_modules names "
                f"linear layers"
            )
        if not matches:
            stacked = f"its stacked experts end in {_ends(adaptable)}" if adaptable else "it has no stacked experts"
            raise ModelError(
                f"target_parameters: {pattern!r} is the end of no parameter's name in {type(model).__name__}; {stacked}"
            )
        wanted |= set(matches)
    for name in adaptable:
        if name in wanted:
            path, _, own = name.rpartition(".")
            found.setdefault(path, []).append(own)
    return found


def _find_ends(model: nn.Module) -> dict[str, nn.Module]:
    """The embeddings of tokens and the language-model head, by name, where they can have an adapter: untied."""
    tied = {name for names in tied_names(model) for name in names}
    found = [getattr(model, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")]
    return {
        name: module
        for name, module in model.named_modules()
        if any(module is each for each in found)
        and isinstance(module, nn.Embedding | nn.Linear)
        and module.weight.is_floating_point()
        and f"{name}.weight" not in tied
    }


def _find_trained_whole(
    model: nn.Module, modules_to_save: tuple[str, ...], *, targets: Iterable[str]
) -> dict[str, nn.Module]:
    """The modules that `LoraConfig.modules_to_save` means, by name."""
    found: dict[str, nn.Module] = {}
    tied = {name for names in tied_names(model) for name in names}
    for pattern in modules_to_save:
        modules = _ending_in(dict(model.named_modules()), pattern)
        matches = [name for name in modules if _parameters(model, name)]
        if not matches:
            raise ModelError(
                f"modules_to_save: {pattern!r} is the end of no name of a module with parameters in "
                f"{type(model).__name__}, whose modules are {[name for name, _ in model.named_children()]}"
            )
        for name in matches:
            if adapted := [target for target in targets if target == name or target.startswith(f"{name}.")]:
                raise ModelError(f"modules_to_save: {name} is to be trained whole, and {adapted[0]} to have an adapter")
            if ends := [end for end in _parameters(model, name) if end in tied]:
                raise ModelError(
                    f"modules_to_save: {ends[0]} is tied to another parameter, which would be trained with it and is "
                    f"not in the saved adapter; leave {pattern!r} out"
                )
            found[name] = model.get_submodule(name)
    return found


def _adaptable_linears(model: nn.Module) -> dict[str, nn.Linear]:
    stack = text_layers(model)
    if stack is None:
        raise ModelError(f"{type(model).__name__} has no stack of decoder layers to put adapters into")
    found = {}
    for name, module in model.named_modules():
        if name.startswith(f"{stack[0]}.") and isinstance(module, nn.Linear) and not _in_mixture(model, name):
            if not module.weight.is_floating_point():
                raise ModelError(
                    f"{name}.weight is {module.weight.dtype}: the model is quantized, and merged weights would be "
                    f"another model's; load it dequantized"
                )
            found[name] = module
    if not found:
        raise ModelError(f"{type(model).__name__} has no nn.Linear in {stack[0]} to put adapters into")
    return found


def _in_mixture(model: nn.Module, name: str) -> bool:
    """Whether it is an expert, or a router or gate beside experts."""
    parent = model.get_submodule(name.rpartition(".")[0])
    return "experts" in name.split(".") or "experts" in dict(parent.named_children())


def _why_not(model: nn.Module, name: str, *, layers_only: bool) -> str:
    module = model.get_submodule(name)
    if name and _in_mixture(model, name):
        return (
            "what routes to experts stays frozen, and experts get adapters by target_parameters, where they are "
            "stacked in one tensor, such as experts.gate_up_proj"
        )
    tied = next((names for names in tied_names(model) if f"{name}.weight" in names), None)
    if tied is not None:
        return f"{' and '.join(tied)} are one weight, and an adapter of one of them would make two of it"
    if layers_only and name in _find_ends(model):
        return "adapters on the embeddings and the head are the DTensor backend's (policy.dtensor_cfg)"
    if not isinstance(module, nn.Linear):
        return f"it is a {type(module).__name__}"
    return "it is neither in the decoder layers nor the head of a language model; modules_to_save trains it whole"


def _ending_in(names: Iterable[str], pattern: str) -> list[str]:
    wanted = pattern.split(".")
    ends = {name: name.split(".")[-len(wanted) :] for name in names if name}
    return [name for name, end in ends.items() if len(end) == len(wanted) and all(map(fnmatchcase, end, wanted))]


def _parameters(model: nn.Module, name: str) -> list[str]:
    module = model.get_submodule(name)
    return [f"{name}.{own}" for own, _ in module.named_parameters(remove_duplicate=False)]


def _ends(linears: Iterable[str]) -> list[str]:
    """The last two tokens of each kind of linear layer, once."""
    return list(dict.fromkeys(".".join(collapsed(name).split(".")[-2:]) for name in linears))
