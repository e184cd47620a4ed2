"""The state of optimizers as tensors and JSON, by the names of their parameters, and back.

Moments are sharded as their parameter is, so that any mesh can read them. Optimizers whose state is a tensor subclass
(torchao's of 8 and 4 bits) quantize blocks of each rank's flattened shard, and a block on another mesh would have other
elements: each rank's inner tensors are saved as they are, and only the same mesh can read them. In the saved
descriptions such an optimizer is `bound_to_mesh`.

torch's own `get_optimizer_state_dict` takes a step to create the state of an optimizer that has none; here nothing
steps when it is saved.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rl_backends.checkpoints.shards import ModelShard, TensorShard, dtype_name, this_rank, whole_tensor
from rl_backends.errors import CheckpointError

State = dict[Tensor, dict[str, Any]]
JSON_VALUE = bool | int | float | str | None

NOT_RESTORED = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})
"""Options of a parameter group that say how a step is computed, which depends on the machine."""
LEARNING_RATES = frozenset({"lr", "initial_lr"})
"""Options that the schedule sets; the checkpoint's hold until the next step."""


@runtime_checkable
class CheckpointedOptimizers(Protocol):
    """What a checkpoint needs of the optimizers of a model."""

    @property
    def each(self) -> tuple[Optimizer, ...]:
        """Optimizers of torch; a parameter is in at most one of them."""

    def schedule_state(self) -> dict[str, Any]:
        """Where the schedule stands, as JSON."""

    def load_schedule_state(self, state: dict[str, Any]) -> None:
        """Continue from what `schedule_state` returned."""


# ---- Saving.


def optimizer_shards(
    optimizers: CheckpointedOptimizers, held: Mapping[str, ModelShard], *, bound: Sequence[bool]
) -> dict[str, TensorShard]:
    """This rank's part of every tensor of the optimizers' state.

    bound: of each optimizer, whether its state is a tensor subclass on any rank.
    """
    shards: dict[str, TensorShard] = {}
    for optimizer, is_bound in zip(optimizers.each, bound, strict=True):
        state = _named_state(optimizer, held)
        shards |= _bound_shards(state) if is_bound else _state_shards(state, held)
    return shards


def describe_optimizers(
    optimizers: CheckpointedOptimizers, held: Mapping[str, ModelShard], *, bound: Sequence[bool]
) -> list[dict[str, Any]]:
    """Everything about the optimizers that is not a tensor, as JSON."""

    def describe(name: str, key: str, value: Any) -> dict[str, Any]:
        if isinstance(value, Tensor):
            return {"dtype": dtype_name(value.dtype), "sharded": value.ndim > 0}
        if isinstance(value, JSON_VALUE):
            return {"value": value}
        raise CheckpointError(f"the optimizer's {key} of {name} is a {type(value).__name__}, neither tensor nor number")

    return [
        {
            "kind": _kind(optimizer),
            "bound_to_mesh": is_bound,
            "groups": _groups(optimizer, held),
            "state": {
                name: {key: describe(name, key, value) for key, value in values.items()}
                for name, values in _named_state(optimizer, held).items()
            },
        }
        for optimizer, is_bound in zip(optimizers.each, bound, strict=True)
    ]


def holds_subclasses(optimizer: Optimizer) -> bool:
    """Whether any of its state on this rank is a tensor subclass other than a DTensor of plain tensors."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return any(isinstance(value, Tensor) and is_traceable_wrapper_subclass(_local(value)) for value in values)


# ---- Loading.


def check_optimizers(
    optimizers: CheckpointedOptimizers,
    held: Mapping[str, ModelShard],
    saved: Sequence[Mapping[str, Any]],
    *,
    same_mesh: bool,
) -> None:
    """Check that the optimizers of the checkpoint are these."""
    here = [{"kind": _kind(optimizer), "groups": _groups(optimizer, held)} for optimizer in optimizers.each]
    check_hyperparameters(here, saved, same_mesh=same_mesh)


def check_hyperparameters(
    here: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]], *, same_mesh: bool
) -> None:
    """Compare the `kind` and `groups` of optimizers with those of a checkpoint; a group has `names` and `options`.

    Parameters may be grouped differently, as groups depend on the mesh, but must have the same options.
    """
    advice = "start training with the optimizer of the checkpoint, or load the weights alone by optimizer=False"
    kinds = [each["kind"] for each in here], [each["kind"] for each in saved]
    if kinds[0] != kinds[1]:
        raise CheckpointError(f"the checkpoint has state of {kinds[1]}, and this run optimizes by {kinds[0]}: {advice}")
    for ours, theirs in zip(here, saved, strict=True):
        if theirs["bound_to_mesh"] and not same_mesh:
            raise CheckpointError(
                f"the state of {theirs['kind']} is quantized in blocks of each rank's shards and cannot be cut for "
                f"another mesh: resume on the mesh that wrote it, or load the weights alone by optimizer=False"
            )
        if difference := _difference(ours["groups"], theirs["groups"]):
            raise CheckpointError(f"the hyperparameters of {theirs['kind']} cannot be restored: {difference}: {advice}")


def _difference(here: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> str | None:
    """The first difference of parameter groups, or None."""
    ours, theirs = _options_by_name(here), _options_by_name(saved)
    if only := ours.keys() ^ theirs.keys():
        return f"{len(only)} parameters are optimized in one of the two runs only ({min(only)} is one)"
    for group in here:
        options = group["options"]
        first, *others = [theirs[name] for name in group["names"]] or [options]
        if different := sorted(first.keys() ^ options.keys()):
            return f"only one of the two runs has {', '.join(different)}"
        for name in group["names"]:
            for key in sorted(options.keys() - LEARNING_RATES):
                value = list(options[key]) if isinstance(options[key], tuple) else options[key]
                if value != theirs[name][key]:
                    return f"{key} of {name} is {theirs[name][key]} in the checkpoint and {value} here"
        if any(first[key] != other[key] for other in others for key in LEARNING_RATES & first.keys()):
            return f"what is one group here, that of {group['names'][0]}, had not one learning rate for all there"
    return None


def new_state(
    optimizers: CheckpointedOptimizers, held: Mapping[str, ModelShard], saved: Sequence[Mapping[str, Any]]
) -> tuple[list[State], dict[str, TensorShard]]:
    """State to be filled from the checkpoint, one for each optimizer, and its shards; the optimizers are untouched.

    State that is bound to the mesh can only be created by its optimizer, which then forgets it again.
    """
    states: list[State] = []
    shards: dict[str, TensorShard] = {}
    for optimizer, each in zip(optimizers.each, saved, strict=True):
        if each["bound_to_mesh"]:
            with _with_state(optimizer):
                state = {n: values for n, values in _named_state(optimizer, held).items() if n in each["state"]}
            shards |= _bound_shards(state)
        else:
            group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
            state = {}
            for name, values in each["state"].items():
                parameter = held[name].shard.tensor
                group = group_of[id(parameter)]
                state[name] = {key: _empty(spec, parameter, group) for key, spec in values.items()}
            shards |= _state_shards(state, held)
        states.append({held[name].shard.tensor: values for name, values in state.items()})
    return states, shards


def put_state(
    optimizers: CheckpointedOptimizers,
    held: Mapping[str, ModelShard],
    saved: Sequence[Mapping[str, Any]],
    *,
    states: Sequence[State],
) -> None:
    """Give the optimizers the state that was read, and the learning rate of the checkpoint."""
    for optimizer, state, each in zip(optimizers.each, states, saved, strict=True):
        optimizer.state.clear()
        optimizer.state.update(state)
        saved_options = _options_by_name(each["groups"])
        for group, here in zip(optimizer.param_groups, _groups(optimizer, held), strict=True):
            options = saved_options[here["names"][0]] if here["names"] else {}
            for key in LEARNING_RATES & options.keys():
                if isinstance(group[key], Tensor):
                    group[key].fill_(options[key])
                else:
                    group[key] = options[key]


def _empty(spec: Mapping[str, Any], parameter: Tensor, group: Mapping[str, Any]) -> Any:
    if "value" in spec:
        return spec["value"]
    dtype = getattr(torch, spec["dtype"])
    if spec["sharded"]:
        return torch.zeros_like(parameter.detach(), dtype=dtype)
    on_device = group.get("fused") or group.get("capturable")  # where torch's optimizers keep their step count
    return torch.zeros((), dtype=dtype, device=parameter.device if on_device else "cpu")


# ---- State and groups by the names of parameters.


def _named_state(optimizer: Optimizer, held: Mapping[str, ModelShard]) -> dict[str, dict[str, Any]]:
    """The state of each parameter that has any, by the parameter's name, in the order of the groups."""
    names = {id(each.shard.tensor): name for name, each in held.items()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {names[id(p)]: optimizer.state[p] for p in parameters if optimizer.state.get(p)}


def _state_shards(state: Mapping[str, Mapping[str, Any]], held: Mapping[str, ModelShard]) -> dict[str, TensorShard]:
    shards: dict[str, TensorShard] = {}
    for name, values in state.items():
        for key, value in values.items():
            if not isinstance(value, Tensor):
                continue
            shard = held[name].shard
            if value.ndim == 0:
                shards[f"optimizer/{name}/{key}"] = whole_tensor(value)
            elif value.shape == shard.tensor.shape:
                shards[f"optimizer/{name}/{key}"] = held[name].of(value)
            else:
                raise CheckpointError(
                    f"the optimizer's {key} of {name} has the shape {list(value.shape)}, and its parameter "
                    f"{list(shard.shape)}: only state that is cut as its parameter is can be read on another mesh; "
                    f"save with optimizers=None"
                )
    return shards


def _groups(optimizer: Optimizer, held: Mapping[str, ModelShard]) -> list[dict[str, Any]]:
    names = {id(each.shard.tensor): name for name, each in held.items()}
    groups = []
    for group in optimizer.param_groups:
        if strange := [tuple(p.shape) for p in group["params"] if id(p) not in names]:
            raise CheckpointError(
                f"{_kind(optimizer)} holds {len(strange)} parameters that are not the model's (the first has the shape "
                f"{list(strange[0])}): make the optimizer after the model is sharded, from model.parameters()"
            )
        options = {key: _option(optimizer, key, group[key]) for key in group if key not in NOT_RESTORED}
        groups.append({"names": [names[id(p)] for p in group["params"]], "options": options})
    return groups


def _option(optimizer: Optimizer, key: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.ndim == 0:
        return value.item()
    if all(isinstance(each, JSON_VALUE) for each in (value if isinstance(value, tuple | list) else [value])):
        return value
    raise CheckpointError(
        f"{_kind(optimizer)}: its hyperparameter {key} is a {type(value).__name__}, which JSON cannot hold: save with "
        f"optimizers=None, or keep it in the optimizer's attributes"
    )


def _options_by_name(groups: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: group["options"] for group in groups for name in group["names"]}


def _kind(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


# ---- State that is bound to the mesh: tensor subclasses.


def _bound_shards(state: Mapping[str, Mapping[str, Any]]) -> dict[str, TensorShard]:
    """Every inner tensor on this rank, under a name that has the rank."""
    shards: dict[str, TensorShard] = {}
    for name, values in state.items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                local: Any = _local(value)
                tensors = {"local": local}
                if is_traceable_wrapper_subclass(local):
                    tensors = {inner: getattr(local, inner) for inner in local.__tensor_flatten__()[0]}
                for inner, tensor in tensors.items():
                    shards[f"optimizer/{name}/{key}/rank-{this_rank()}/{inner}"] = whole_tensor(tensor)
    return shards


@contextmanager
def _with_state(optimizer: Optimizer) -> Iterator[None]:
    """Let an optimizer without state create it, by a step with zero gradients and learning rate, and forget it again.

    The tensors are the caller's then, and the optimizer is as it was.
    """
    if optimizer.state:
        yield
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    gradients = [p.grad for p in parameters]
    rates = [group["lr"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        yield
    finally:
        optimizer.state.clear()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


@torch.no_grad()
def _local(value: Tensor) -> Tensor:
    local: Tensor = value.to_local() if hasattr(value, "to_local") else value
    return local
