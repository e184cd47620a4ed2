"""An optimizer over this rank's pieces, with the state of a step that is not the first.

Optimizers of elements do to a DTensor what they do to its local tensor; over plain tensors they are soon done. Knows
nothing of bytes.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rl_parallel_plans.dtensor import to_local_if_dtensor

OptimizerName = Literal["adamw", "adamw_fused", "sgd", "none"]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

MAKERS: dict[OptimizerName, MakeOptimizer] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "adamw_fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, foreach=True),
}


class LocalOptimizer:
    """Steps the local tensors of parameters that may have become others since its state was made."""

    def __init__(self, make: MakeOptimizer, parameters: Sequence[nn.Parameter]) -> None:
        self._make = make
        pieces = _pieces(parameters)
        for piece in pieces:
            piece.grad = torch.empty_like(piece)
        optimizer = make(pieces)
        optimizer.step()
        self._states: list[dict[str, Any]] = [optimizer.state[piece] for piece in pieces]

    def state(self) -> list[Tensor]:
        """Every tensor of the state."""
        return [value for state in self._states for value in state.values() if isinstance(value, Tensor)]

    def step(self, parameters: Sequence[nn.Parameter]) -> None:
        """One step of `parameters`, the same as before in the same order, with the gradients that they have."""
        pieces = _pieces(parameters)
        optimizer = self._make(pieces)
        for piece, state, parameter in zip(pieces, self._states, parameters, strict=True):
            optimizer.state[piece] = state
            piece.grad = None if parameter.grad is None else to_local_if_dtensor(parameter.grad)
        optimizer.step()


@torch.no_grad()
def _pieces(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(to_local_if_dtensor(parameter).detach()) for parameter in parameters]
