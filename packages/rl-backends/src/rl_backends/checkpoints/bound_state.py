"""Optimizer state that only the mesh which wrote it can read: tensor subclasses, as torchao's of 8 and 4 bits are.

They are quantized in blocks of each rank's flattened shard, so a block on another mesh would have other numbers. Each
rank's inner tensors are saved as they are. Knows torch's protocol of such subclasses and not torchao.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rl_backends.checkpoints.pieces import Piece, this_rank, whole_piece

__all__ = ["bound_pieces", "holds_subclasses", "start_state"]


def holds_subclasses(optimizer: Optimizer) -> bool:
    """Whether any of its state on this rank is a tensor subclass other than a DTensor of plain ones."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return any(isinstance(value, Tensor) and is_traceable_wrapper_subclass(_local(value)) for value in values)


def bound_pieces(state: Mapping[str, Mapping[str, Any]]) -> dict[str, Piece]:
    """Every inner tensor on this rank, under the rank's own name."""
    return {
        f"optimizer/{name}/{key}/rank-{this_rank()}/{inner}": whole_piece(tensor)
        for name, values in state.items()
        for key, value in values.items()
        if isinstance(value, Tensor)
        for inner, tensor in _inner(value).items()
    }


def start_state(optimizer: Optimizer) -> None:
    """Make the optimizer create its state, if it has none, by a step with zero gradients and learning rate."""
    if optimizer.state:
        return
    with _nothing_to_learn(optimizer):
        optimizer.step()


@contextmanager
def _nothing_to_learn(optimizer: Optimizer) -> Iterator[None]:
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    gradients = [p.grad for p in parameters]
    rates = [group["lr"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def _inner(value: Tensor) -> dict[str, Tensor]:
    local: Any = _local(value)
    if not is_traceable_wrapper_subclass(local):
        return {"local": local}
    names, _ = local.__tensor_flatten__()
    return {name: getattr(local, name) for name in names}


@torch.no_grad()
def _local(value: Tensor) -> Tensor:
    local: Tensor = value.to_local() if hasattr(value, "to_local") else value
    return local
