"""Models without their weights (parameters on the meta device), and their first weights.

A Hugging Face model computes some buffers (rotary frequencies) when it is made, and no file holds them. `make_skeleton`
therefore makes it on the CPU, without allocating memory for its parameters. `materialize` allocates that memory once
the model is sharded, and `initial_value` draws a parameter as a new model would have it.
"""

import copy
import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rl_backends.errors import ModelError
from rl_parallel_plans.structure import retie, tied_names


class _EmptyOnMeta(TorchFunctionMode):
    """Memory without numbers is not taken: what a parameter is made of, and what a computed buffer is not."""

    def __torch_function__(
        self, function: Callable[..., Any], _types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.empty and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return function(*args, **kwargs)


def make_skeleton(make: Callable[[], nn.Module]) -> nn.Module:
    """What `make` makes, in eval mode, its ties made, its parameters on the meta device and its buffers real.

    Consumes no random numbers.
    """
    with torch.random.fork_rng(devices=[]), _EmptyOnMeta():
        model = make()
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in moved:
                on_meta = torch.empty_like(parameter, device="meta")
                moved[id(parameter)] = nn.Parameter(on_meta, requires_grad=parameter.requires_grad)
            module.register_parameter(name, moved[id(parameter)])
    tie: Callable[[], None] | None = getattr(model, "tie_weights", None)
    if tie is not None:  # code that comes with a model need not have it
        tie()
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta and name in module._non_persistent_buffers_set:  # noqa: SLF001 - no public one
                raise ModelError(
                    f"{type(model).__name__}: no file holds the buffer {path}.{name}, and it is not computed when the "
                    f"model is made; load it whole with load_causal_lm"
                )
    return model.eval()


def without_weights(model: nn.Module) -> nn.Module:
    """A copy of `model` with its parameters on the meta device, ties and buffers kept; no weight is copied."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, memo)


def twin_of(model: nn.Module) -> nn.Module:
    """The skeleton of a model that may be sharded, wrapped and adapted: its names, shapes and rules before all that."""
    from torch.distributed.fsdp import FSDPModule  # of which FSDP makes a subclass of the model's class

    classes = [cls for cls in type(model).__mro__ if issubclass(cls, nn.Module) and not issubclass(cls, FSDPModule)]
    cls: Any = classes[0]
    if not hasattr(cls, "_from_config"):
        raise ModelError(f"{cls.__name__} is no model of transformers, whose configuration says how to make another")
    return make_skeleton(lambda: cls._from_config(in_dtype(model.config, torch.float32), dtype=torch.float32))


def in_dtype(config: Any, dtype: torch.dtype) -> Any:
    """A copy of a configuration whose models, and those inside them, are of this dtype."""
    config = copy.deepcopy(config)
    for each in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if each is not None:
            each.dtype = dtype
    return config


# ---- Memory.


@torch.no_grad()
def materialize(model: nn.Module, device: torch.device | str) -> nn.Module:
    """Give every meta parameter of a (sharded) model uninitialised memory on `device`; return the model.

    Buffers that are real move there with their numbers. Ties stay ties. Parameters that FSDP offloads lie in host
    memory. Optimizers and references to parameters are to be made afterwards: the parameters may be other objects.
    """
    from torch.distributed.fsdp import FSDPModule

    ties = tied_names(model)
    offloaded: set[int] = set()  # ids of the parameters that FSDP keeps in host memory
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()  # noqa: SLF001 - no public one says which parameters are offloaded
            for group in state._fsdp_param_groups:  # noqa: SLF001
                offloaded |= {id(each.sharded_param) for each in group.fsdp_params if each.offload_to_cpu}

    def moved(tensor: Tensor) -> Tensor:
        target = "cpu" if id(tensor) in offloaded else device
        return torch.empty_like(tensor, device=target) if tensor.is_meta else tensor.to(target)

    model._apply(moved)  # type: ignore[no-untyped-call]  # noqa: SLF001 - what `to` and `to_empty` are made of; FSDP overrides it
    retie(model, ties)
    return model


# ---- Random weights, the same unsharded weights on every mesh.


@torch.no_grad()
def initial_value(skeleton: nn.Module, name: str, *, seed: int) -> Tensor:
    """The whole tensor `name` in float32 on the CPU, as a new model has it; a buffer as the model was made with it.

    skeleton: the unsharded model on the meta device; it is left as it was.
    """
    path, _, leaf = name.rpartition(".")
    owner = skeleton.get_submodule(path)
    meta = owner._parameters.get(leaf)  # noqa: SLF001 - its place, whatever the class does to attributes
    if meta is None:
        return _require_numbers(owner.get_buffer(leaf), name)
    value = torch.full(meta.shape, torch.nan)
    owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)  # noqa: SLF001
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)  # torch's would reseed GPUs too
            _apply_rules(skeleton, path)
    finally:
        owner._parameters[leaf] = meta  # noqa: SLF001
    return _require_numbers(value, name)


def _apply_rules(skeleton: nn.Module, path: str) -> None:
    """What torch, then transformers does to a new module, and then to those that it is part of.

    Everything but one parameter lies on the meta device, where the same rules do nothing.
    """
    reset: Any = getattr(skeleton.get_submodule(path), "reset_parameters", None)
    if reset is not None:
        reset()
    chain = [path]
    while chain[-1]:
        chain.append(chain[-1].rpartition(".")[0])
    modules = [skeleton.get_submodule(each) for each in chain]
    for at, module in enumerate(modules):
        # In a model that is made of models, each has the rules for its own part.
        ruler: Any = next((each for each in modules[at:] if hasattr(each, "_init_weights")), skeleton)
        ruler._init_weights(module)  # noqa: SLF001 - the method that transformers asks every model to have


def _require_numbers(value: Tensor, name: str) -> Tensor:
    if value.is_meta or (value.is_floating_point() and bool(value.isnan().any())):
        raise ModelError(f"{name} has no rule by which a new model gets it; start from pretrained weights")
    return value
