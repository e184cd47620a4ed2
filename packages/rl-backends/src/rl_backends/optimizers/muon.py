"""Muon for matrices that may lie in pieces on several ranks, with the numbers of one process.

The update of a matrix is its momentum made orthogonal, which takes the whole matrix. Each is gathered in turn, made
orthogonal on every rank that holds a piece of it, and cut again: one gather of the momentum a matrix and a step, and
never more than one whole matrix at a time. Of a stack of matrices, one for each expert, a rank gathers only its own.

    m <- m + (1 - momentum)(g - m),   u = g + momentum (m - g) with Nesterov, else m
    W <- (1 - lr decay) W - lr f(A, B) NewtonSchulz(u)

torch.optim.Muon does the same to plain matrices; its arithmetic on DTensors is not followed here. arXiv:2502.16982.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from rl_parallel_plans import to_local_if_dtensor

__all__ = ["Muon", "orthogonalized"]

# Keller Jordan's: steep at 0, so that five steps suffice; they leave singular values between about 0.7 and 1.2.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
EPS = 1e-7


class Muon(torch.optim.Optimizer):
    """`torch.optim.Muon` for plain parameters and DTensors, of two dims [A, B] or three [experts, A, B].

    row_dims: by id, the fused weights whose rows A are registered as two dims [A / tp, tp], and the first of the two.

    State: `momentum_buffer`, sharded as the parameter is.
    """

    def __init__(
        self,
        groups: Iterable[Mapping[str, Any]],
        *,
        lr: float,
        momentum: float,
        nesterov: bool,
        adjust_lr_fn: Literal["original", "match_rms_adamw"],
        dtype: torch.dtype,
        row_dims: Mapping[int, int] | None = None,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": 0.0, "momentum": momentum, "nesterov": nesterov}
        super().__init__([dict(group) for group in groups], defaults)
        self._adjust_lr_fn = adjust_lr_fn
        self._dtype = dtype
        self._row_dims = dict(row_dims or {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient; a collective where parameters are sharded."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> None:
        gradient = _placed_as(parameter, parameter.grad)
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        mean = state["momentum_buffer"]
        to_local_if_dtensor(mean).lerp_(to_local_if_dtensor(gradient), 1 - group["momentum"])
        direction = gradient.lerp(mean, group["momentum"]) if group["nesterov"] else mean
        row_dim = self._row_dims.get(id(parameter))
        update = to_local_if_dtensor(_orthogonalized_whole(direction, dtype=self._dtype, row_dim=row_dim))
        weight = to_local_if_dtensor(parameter)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        rows, columns = parameter.shape[-2:]
        if row_dim is not None:
            rows, columns = parameter.flatten(row_dim, row_dim + 1).shape[-2:]
        weight.add_(update.to(weight.device), alpha=-group["lr"] * self._adjusted(rows, columns))

    def _adjusted(self, rows: int, columns: int) -> float:
        if self._adjust_lr_fn == "original":
            return math.sqrt(max(1, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))


def orthogonalized(matrix: Tensor, *, dtype: torch.dtype) -> Tensor:
    """About U V^T where a matrix [A, B], or each of [experts, A, B], is U S V^T: five Newton-Schulz steps in `dtype`.

    https://kellerjordan.github.io/posts/muon/
    """
    a, b, c = COEFFICIENTS
    tall = matrix.size(-2) > matrix.size(-1)
    # The kernel for one matrix rounds otherwise than the one for many; torch.optim.Muon has the former.
    addmm = torch.addmm if matrix.ndim == 2 else torch.baddbmm
    each = (matrix.mT if tall else matrix).to(dtype)
    each = each / torch.linalg.vector_norm(each, dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(STEPS):
        gram = each @ each.mT
        each = addmm(each, addmm(gram, gram, gram, beta=b, alpha=c), each, beta=a)
    return each.mT if tall else each


def _orthogonalized_whole(direction: Tensor, *, dtype: torch.dtype, row_dim: int | None = None) -> Tensor:
    """`orthogonalized` of the whole tensor, cut as `direction` is. In which order its rows stand makes no difference."""
    if not isinstance(direction, DTensor):
        return orthogonalized(direction, dtype=dtype)
    # Offloaded shards lie in host memory, where the mesh of a GPU cannot gather them.
    on_mesh: DTensor = direction.to(device=direction.device_mesh.device_type)  # type: ignore[assignment]
    dims = 2 if row_dim is None else 3
    uncut = [Replicate() if _cuts_matrices(each, direction.ndim, dims) else each for each in direction.placements]
    whole = on_mesh.redistribute(placements=uncut)
    matrices = whole.to_local()
    if row_dim is not None:
        matrices = matrices.flatten(row_dim, row_dim + 1)
    update = DTensor.from_local(
        orthogonalized(matrices, dtype=dtype).view(whole.to_local().shape),
        whole.device_mesh,
        whole.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    return update.redistribute(placements=direction.placements)


def _cuts_matrices(placement: object, ndim: int, dims: int) -> bool:
    """Whether it shards one of the last `dims` dims, which are those of a matrix."""
    if isinstance(placement, Replicate):
        return False
    dim = getattr(placement, "dim", None)  # a _StridedShard is no Shard, and has one too
    assert dim is not None, f"a gradient with the placement {placement} was not summed"
    return int(dim) % ndim >= ndim - dims


def _placed_as(parameter: Tensor, gradient: Tensor | None) -> Tensor:
    assert gradient is not None, "asked for parameters with a gradient only"
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
        return gradient.redistribute(placements=parameter.placements)
    return gradient
