"""The state of optimizers as tensors and JSON, by the names of their parameters, and back.

Moments are sharded as their parameter is, so that any mesh can read them. Optimizers whose state is a tensor subclass
(torchao's of 8 and 4 bits) quantize blocks of each rank's flattened shard, and a block on another mesh would have other
elements: each rank's inner tensors are saved as they are, and only the same mesh can read them. In the saved
descriptions such an optimizer is `bound_to_mesh`.

torch's own `get_optimizer_state_dict` takes a step to create the state of an optimizer that has none; here nothing
steps when it is saved.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rl_backends.checkpoints.shards import ModelShard, TensorShard, dtype_name, this_rank, whole_tensor
from rl_backends.errors import CheckpointError

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """What one of torch's optimizers steps on this rank: a parameter, or a part or a copy of one."""

    tensor: Tensor
    optimizer: Optimizer
    group: dict[str, Any]
    parts: Mapping[str, Callable[[Tensor], TensorShard]] = field(default_factory=dict)
    """Of each tensor of the model that it holds: which part of it a tensor is that is shaped like `tensor`."""

    def state(self) -> dict[str, Any]:
        """The optimizer's state of it; empty before the first step."""
        state: dict[str, Any] = self.optimizer.state.get(self.tensor, {})
        return state

    def put_state(self, state: dict[str, Any]) -> None:
        """Give the optimizer what `state` gave, or, where that is empty, let it begin."""
        self.optimizer.state.pop(self.tensor, None)
        if state:
            self.optimizer.state[self.tensor] = state


def stepped_by(optimizer: Optimizer, held: Mapping[str, ModelShard]) -> list[Stepped]:
    """All parameters of an optimizer, in the order of its groups."""
    names = {id(each.shard.tensor): name for name, each in held.items()}
    found: list[Stepped] = []
    for group in optimizer.param_groups:
        if strange := [tuple(p.shape) for p in group["params"] if id(p) not in names]:
            raise CheckpointError(
                f"{_kind(optimizer)} holds {len(strange)} parameters that are not the model's (the first has the shape "
                f"{list(strange[0])}): make the optimizer after the model is sharded, from model.parameters()"
            )
        for parameter in group["params"]:
            name = names[id(parameter)]
            found.append(Stepped(tensor=parameter, optimizer=optimizer, group=group, parts={name: held[name].of}))
    return found


# ---- Saving.


def optimizer_shards(optimizers: CheckpointedOptimizers, held: Mapping[str, ModelShard]) -> list[TensorShard]:
    """This rank's part of every tensor of the optimizers' state."""
    shards: list[TensorShard] = []
    for optimizer in optimizers.each:
        stepped = stepped_by(optimizer, held)
        shards += _bound_shards(stepped) if is_bound_to_mesh(optimizer) else state_shards(stepped)
    return shards


def state_shards(stepped: Iterable[Stepped]) -> list[TensorShard]:
    """This rank's part of every tensor of the state."""
    shards: list[TensorShard] = []
    for each in stepped:
        for key, value in each.state().items():
            for name, part in each.parts.items() if isinstance(value, Tensor) else ():
                if (value.ndim and value.shape != each.tensor.shape) or is_traceable_wrapper_subclass(_local(value)):
                    raise CheckpointError(
                        f"the optimizer's {key} of {name} has the shape {list(value.shape)}, and its parameter "
                        f"{list(part(each.tensor).shape)}: only state that is cut as its parameter is can be read on "
                        f"another mesh; save with optimizers=None"
                    )
                saved_as = _name(name, key)
                shards.append(replace(part(value), saved_as=saved_as) if value.ndim else whole_tensor(value, saved_as))
    return shards


def describe_optimizers(optimizers: CheckpointedOptimizers, held: Mapping[str, ModelShard]) -> list[dict[str, Any]]:
    """Everything about the optimizers that is not a tensor, as JSON."""
    described = []
    for optimizer in optimizers.each:
        bound = is_bound_to_mesh(optimizer)
        stepped = stepped_by(optimizer, held)
        groups = []
        for group in optimizer.param_groups:
            options = {key: value for key, value in group.items() if key not in NOT_RESTORED}
            for key, value in options.items():
                if isinstance(value, Tensor) and value.ndim == 0:
                    options[key] = value.item()
                elif not all(
                    isinstance(each, JSON_VALUE) for each in (value if isinstance(value, tuple | list) else [value])
                ):
                    raise CheckpointError(
                        f"{_kind(optimizer)}: its hyperparameter {key} is a {type(value).__name__}, which JSON cannot "
                        f"hold: save with optimizers=None, or keep it in the optimizer's attributes"
                    )
            names = [name for each in stepped if each.group is group for name in each.parts]
            groups.append({"names": names, "options": options})
        state = describe_state(stepped)
        described.append({"kind": _kind(optimizer), "bound_to_mesh": bound, "groups": groups, "state": state})
    return described


def describe_state(stepped: Iterable[Stepped]) -> dict[str, dict[str, Any]]:
    """Name -> key -> what the optimizer keeps of a tensor of the model, where it keeps anything."""

    def describe(name: str, key: str, value: Any) -> dict[str, Any]:
        if isinstance(value, Tensor):
            return {"dtype": dtype_name(value.dtype), "sharded": value.ndim > 0}
        if isinstance(value, JSON_VALUE):
            return {"value": value}
        raise CheckpointError(f"the optimizer's {key} of {name} is a {type(value).__name__}, neither tensor nor number")

    return {
        name: {key: describe(name, key, value) for key, value in state.items()}
        for each in stepped
        if (state := each.state())
        for name in each.parts
    }


def is_bound_to_mesh(optimizer: Optimizer) -> bool:
    """Whether its state is quantized in blocks of each rank's shards; the same on every rank, also before a step."""
    return type(optimizer).__module__.startswith("torchao.")


def _kind(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _name(name: str, key: str) -> str:
    return f"optimizer/{name}/{key}"


# ---- Loading.


def check_hyperparameters(
    source: object, here: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]], *, same_mesh: bool
) -> None:
    """Compare the `kind` and `groups` of optimizers with those of a checkpoint; a group has `names` and `options`.

    Parameters may be grouped differently, as groups depend on the mesh, but must have the same options.
    """
    advice = "start training with the optimizer of the checkpoint, or load the weights alone by optimizer=False"
    kinds = [each["kind"] for each in here], [each["kind"] for each in saved]
    if kinds[0] != kinds[1]:
        raise CheckpointError(
            f"{source}: the checkpoint has state of {kinds[1]}, and this run optimizes by {kinds[0]}: {advice}"
        )
    for ours, theirs in zip(here, saved, strict=True):
        if theirs["bound_to_mesh"] and not same_mesh:
            raise CheckpointError(
                f"{source}: the state of {theirs['kind']} is quantized in blocks of each rank's shards and cannot be "
                f"cut for another mesh: resume on the mesh that wrote it, or load the weights alone by optimizer=False"
            )
        if difference := _difference(ours["groups"], theirs["groups"]):
            raise CheckpointError(
                f"{source}: the hyperparameters of {theirs['kind']} cannot be restored: {difference}: {advice}"
            )


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


@dataclass(frozen=True, slots=True, kw_only=True)
class NewState:
    """State that is to be filled from a checkpoint, and none of it the optimizer's yet."""

    stepped: Stepped
    values: dict[str, Any]
    """What `put_state` takes."""
    scalars: list[TensorShard]
    """Where scalars go, of each tensor of the model that `stepped` holds; of the first one they are in `values`."""
    shards: list[TensorShard]
    """Where everything else goes."""


def new_state(each: Stepped, saved: Mapping[str, Mapping[str, Any]]) -> NewState:
    """saved: name -> key -> what a checkpoint has of the state, as `describe_state` gives it."""
    specs = {name: saved.get(name, {}) for name in each.parts}
    first = next(iter(specs.values()))
    if any(spec.keys() != first.keys() for spec in specs.values()):
        raise CheckpointError(
            f"the checkpoint has other state of each of {', '.join(specs)}, which are one parameter of Megatron: load "
            f"the weights alone by optimizer=False"
        )
    values: dict[str, Any] = {}
    scalars: list[TensorShard] = []
    shards: list[TensorShard] = []
    # Where torch's optimizers keep their step count.
    device = each.tensor.device if each.group.get("fused") or each.group.get("capturable") else "cpu"
    for key, spec in first.items():
        if "value" in spec:
            values[key] = spec["value"]
            continue
        dtype = getattr(torch, spec["dtype"])
        if spec["sharded"]:
            values[key] = value = torch.zeros_like(each.tensor.detach(), dtype=dtype)
            shards += [replace(part(value), saved_as=_name(name, key)) for name, part in each.parts.items()]
        else:
            counts = {name: torch.zeros((), dtype=dtype, device=device) for name in specs}
            scalars += [whole_tensor(count, _name(name, key)) for name, count in counts.items()]
            values[key] = next(iter(counts.values()))
    return NewState(stepped=each, values=values, scalars=scalars, shards=shards)


def new_states(
    optimizers: CheckpointedOptimizers, held: Mapping[str, ModelShard], saved: Sequence[Mapping[str, Any]]
) -> list[NewState]:
    """Of all parameters of the optimizers, which are untouched.

    State that is bound to the mesh can only be created by its optimizer, which then forgets it again.
    """
    states: list[NewState] = []
    for optimizer, described in zip(optimizers.each, saved, strict=True):
        stepped = stepped_by(optimizer, held)
        if not described["bound_to_mesh"]:
            states += [new_state(each, described["state"]) for each in stepped]
            continue
        with _with_state(optimizer):
            for each in stepped:
                known = described["state"].keys() >= each.parts.keys()
                values, shards = (each.state(), _bound_shards([each])) if known else ({}, [])
                states.append(NewState(stepped=each, values=values, scalars=[], shards=shards))
    return states


def put_states(states: Iterable[NewState], saved: Sequence[Mapping[str, Any]]) -> None:
    """Give the optimizers the state that was read, and the learning rates of the checkpoint."""
    saved_options = {name: options for each in saved for name, options in _options_by_name(each["groups"]).items()}
    for state in states:
        state.stepped.put_state(state.values)
        group, options = state.stepped.group, saved_options[next(iter(state.stepped.parts))]
        for key in LEARNING_RATES & options.keys():
            if isinstance(group[key], Tensor):
                group[key].fill_(options[key])
            else:
                group[key] = options[key]


def _options_by_name(groups: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: group["options"] for group in groups for name in group["names"]}


# ---- State that is bound to the mesh: tensor subclasses.


def _bound_shards(stepped: Iterable[Stepped]) -> list[TensorShard]:
    """Every inner tensor on this rank, under a name that has the rank."""
    shards: list[TensorShard] = []
    for each in stepped:
        (name,) = each.parts
        for key, value in each.state().items():
            if isinstance(value, Tensor):
                local: Any = _local(value)
                tensors = {"local": local}
                if is_traceable_wrapper_subclass(local):
                    tensors = {inner: getattr(local, inner) for inner in local.__tensor_flatten__()[0]}
                own = f"{_name(name, key)}/rank-{this_rank()}"
                shards += [whole_tensor(tensor, f"{own}/{inner}") for inner, tensor in tensors.items()]
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
