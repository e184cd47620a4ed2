"""The state of optimizers as pieces and JSON, by the identity of their parameters, and back.

Moments are cut as their parameter is, and so can be read on any mesh. Optimizers whose state is a tensor subclass, as
that of 8 bits is, go by `bound_state` and come back on the mesh that wrote them alone. Where torch is asked for the
state of an optimizer that has taken no step, it takes one; here nothing is asked.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rl_backends.checkpoints.bound_state import bound_pieces, start_state
from rl_backends.checkpoints.hyperparameters import (
    LEARNING_RATES,
    NOT_RESTORED,
    check_hyperparameters,
    options_by_name,
)
from rl_backends.checkpoints.pieces import Held, Piece, dtype_name, whole_piece
from rl_backends.errors import CheckpointError

__all__ = [
    "CheckpointedOptimizers",
    "State",
    "check_optimizers",
    "describe_optimizers",
    "new_state",
    "optimizer_pieces",
    "put_state",
]

State = dict[Tensor, dict[str, Any]]
PLAIN = bool | int | float | str | None


@runtime_checkable
class CheckpointedOptimizers(Protocol):
    """What a checkpoint asks of the optimizers of a model."""

    @property
    def each(self) -> tuple[Optimizer, ...]:
        """Optimizers of torch; a parameter is in one of them at most."""

    def schedule_state(self) -> dict[str, Any]:
        """Where the schedule stands, as JSON."""

    def load_schedule_state(self, state: dict[str, Any]) -> None:
        """Go on from what `schedule_state` gave."""


def optimizer_pieces(
    optimizers: CheckpointedOptimizers, held: Mapping[str, Held], *, bound: Sequence[bool]
) -> dict[str, Piece]:
    """What this rank holds of every tensor of the optimizers' state.

    bound: of each optimizer, whether its state is a tensor subclass on any rank.

    Raises:
        CheckpointError: state that is neither a number nor cut as its parameter is.
    """
    pieces: dict[str, Piece] = {}
    for optimizer, is_bound in zip(optimizers.each, bound, strict=True):
        state = named_state(optimizer, held)
        if is_bound:
            pieces |= bound_pieces(state)
            continue
        for name, values in state.items():
            tensors = {key: value for key, value in values.items() if isinstance(value, Tensor)}
            pieces |= {f"optimizer/{name}/{key}": _piece(held[name], key, value) for key, value in tensors.items()}
    return pieces


def describe_optimizers(
    optimizers: CheckpointedOptimizers, held: Mapping[str, Held], *, bound: Sequence[bool]
) -> list[dict[str, Any]]:
    """Everything about the optimizers that is no tensor, as JSON.

    Raises:
        CheckpointError: a hyperparameter that JSON cannot hold, or a parameter that is not the model's.
    """
    return [
        {
            "kind": _kind(optimizer),
            "bound_to_mesh": is_bound,
            "groups": _groups(optimizer, held),
            "state": {
                name: {key: _describe(name, key, value) for key, value in values.items()}
                for name, values in named_state(optimizer, held).items()
            },
        }
        for optimizer, is_bound in zip(optimizers.each, bound, strict=True)
    ]


def check_optimizers(
    optimizers: CheckpointedOptimizers, held: Mapping[str, Held], saved: Sequence[Mapping[str, Any]], *, same_mesh: bool
) -> None:
    """The optimizers of the checkpoint are these.

    Raises:
        CheckpointError: they are others, or theirs is a state that this mesh cannot take.
    """
    here = [{"kind": _kind(optimizer), "groups": _groups(optimizer, held)} for optimizer in optimizers.each]
    check_hyperparameters(here, saved, same_mesh=same_mesh)


def new_state(
    optimizers: CheckpointedOptimizers, held: Mapping[str, Held], saved: Sequence[Mapping[str, Any]]
) -> tuple[list[State], dict[str, Piece]]:
    """State to be filled from the checkpoint, one for each optimizer, and its pieces; the optimizers are untouched.

    State that is bound to the mesh has no other maker than its optimizer, which makes it and lets it go again.
    """
    states: list[State] = []
    pieces: dict[str, Piece] = {}
    for optimizer, each in zip(optimizers.each, saved, strict=True):
        if each["bound_to_mesh"]:
            fresh_start = not optimizer.state
            start_state(optimizer)
            names = each["state"].keys()
            kept = {name: values for name, values in named_state(optimizer, held).items() if name in names}
            if fresh_start:
                optimizer.state.clear()
            pieces |= bound_pieces(kept)
            states.append({_parameter(held, name): values for name, values in kept.items()})
            continue
        state: State = {}
        on_device = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        for name, values in each["state"].items():
            parameter = _parameter(held, name)
            group = on_device[id(parameter)]
            fresh = {key: _fresh(spec, parameter, group) for key, spec in values.items()}
            tensors = {key: value for key, value in fresh.items() if isinstance(value, Tensor)}
            pieces |= {f"optimizer/{name}/{key}": _piece(held[name], key, value) for key, value in tensors.items()}
            state[parameter] = fresh
        states.append(state)
    return states, pieces


def put_state(
    optimizers: CheckpointedOptimizers,
    held: Mapping[str, Held],
    saved: Sequence[Mapping[str, Any]],
    *,
    states: Sequence[State],
) -> None:
    """Give the optimizers the state that was read, and the learning rate of the checkpoint."""
    for optimizer, state, each in zip(optimizers.each, states, saved, strict=True):
        optimizer.state.clear()
        optimizer.state.update(state)
        old = options_by_name(each["groups"])
        for group, here in zip(optimizer.param_groups, _groups(optimizer, held), strict=True):
            options = old[here["names"][0]] if here["names"] else {}
            for key in LEARNING_RATES & options.keys():
                if isinstance(group[key], Tensor):
                    group[key].fill_(options[key])
                else:
                    group[key] = options[key]


def named_state(optimizer: Optimizer, held: Mapping[str, Held]) -> dict[str, dict[str, Any]]:
    """The state of each parameter that has any, by the parameter's name, in the order of the groups."""
    names = {id(each.shard.tensor): name for name, each in held.items()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {names[id(p)]: optimizer.state[p] for p in parameters if optimizer.state.get(p)}


def _groups(optimizer: Optimizer, held: Mapping[str, Held]) -> list[dict[str, Any]]:
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
    if isinstance(value, PLAIN) or (isinstance(value, tuple | list) and all(isinstance(x, PLAIN) for x in value)):
        return value
    raise CheckpointError(
        f"{_kind(optimizer)}: its hyperparameter {key} is a {type(value).__name__}, which JSON cannot hold: save with "
        f"optimizers=None, or keep it in the optimizer's attributes"
    )


def _describe(name: str, key: str, value: Any) -> dict[str, Any]:
    if isinstance(value, Tensor):
        return {"dtype": dtype_name(value.dtype), "sharded": value.ndim > 0}
    if isinstance(value, PLAIN):
        return {"value": value}
    raise CheckpointError(f"the optimizer's {key} of {name} is a {type(value).__name__}, neither tensor nor number")


def _fresh(spec: Mapping[str, Any], parameter: nn.Parameter, group: Mapping[str, Any]) -> Any:
    if "value" in spec:
        return spec["value"]
    dtype = getattr(torch, spec["dtype"])
    if spec["sharded"]:
        return torch.zeros_like(parameter.detach(), dtype=dtype)
    on_device = group.get("fused") or group.get("capturable")  # where torch's optimizers keep their count of steps
    return torch.zeros((), dtype=dtype, device=parameter.device if on_device else "cpu")


def _piece(held: Held, key: str, value: Tensor) -> Piece:
    if value.shape == held.shard.tensor.shape and value.ndim > 0:
        return held.piece(value)
    if value.ndim == 0:
        return whole_piece(value)
    raise CheckpointError(
        f"the optimizer's {key} of {held.shard.name} has the shape {list(value.shape)}, and its parameter "
        f"{list(held.shard.shape)}: only state that is cut as its parameter is can be read on another mesh; save with "
        f"optimizers=None"
    )


def _parameter(held: Mapping[str, Held], name: str) -> nn.Parameter:
    parameter = held[name].shard.tensor
    assert isinstance(parameter, nn.Parameter)
    return parameter


def _kind(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
