"""Muon for matrices that may lie in shards on several ranks, with the numbers of one process.

The update of a matrix is its momentum made orthogonal, which takes the unsharded matrix. Ranks share that work: of as
many matrices as there are ranks with shards of them, each rank makes one orthogonal and sends it to the others. So a
step takes one gather and one broadcast a matrix, and a rank has at most two unsharded matrices at a time. Of a stack of
matrices, one for each expert, a rank gathers only its own.

    m <- m + (1 - momentum)(g - m),   u = g + momentum (m - g) with Nesterov, else m
    W <- (1 - lr decay) W - lr f(A, B) NewtonSchulz(u)

torch.optim.Muon does the same to plain matrices; its arithmetic on DTensors is not followed here. arXiv:2502.16982.
"""

import math
from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from rl_parallel_plans import to_local_if_dtensor

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
        shared: dict[tuple[DeviceMesh, tuple[int, ...]], list[tuple[nn.Parameter, Mapping[str, Any]]]] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                # The mesh's dims, of more than one rank, along which ranks would gather the same matrices.
                dims = tuple(
                    dim
                    for dim, each in enumerate(self._gathered(parameter) if isinstance(parameter, DTensor) else ())
                    if isinstance(each, Replicate) and parameter.device_mesh.size(dim) > 1
                )
                if dims:
                    shared.setdefault((parameter.device_mesh, dims), []).append((parameter, group))
                else:
                    self._apply(parameter, group, self._orthogonalized(self._whole(parameter, group), parameter))
        for (mesh, dims), members in shared.items():
            self._update_together(members, mesh, dims)

    def _update_together(
        self, members: list[tuple[nn.Parameter, Mapping[str, Any]]], mesh: DeviceMesh, dims: tuple[int, ...]
    ) -> None:
        """Update matrices whose shards the same ranks have, those along `dims` of `mesh`.

        Ranks do the same rounds in the same order, since each has collectives. A round is of matrices of like size.
        """
        sizes, place = [mesh.size(dim) for dim in dims], [mesh.get_local_rank(dim) for dim in dims]
        owners = list(product(*map(range, sizes)))
        ordered = sorted(members, key=lambda member: member[0].numel(), reverse=True)
        for start in range(0, len(ordered), len(owners)):
            round_of = list(zip(ordered[start : start + len(owners)], owners, strict=False))
            shapes: list[torch.Size] = []
            own: tuple[Tensor, nn.Parameter] | None = None
            for (parameter, group), owner in round_of:
                whole = self._whole(parameter, group)
                if list(owner) == place:
                    own = whole, parameter
                # Of the matrices of others only the shape is kept: their memory is free for the next.
                shapes.append(whole.shape)
                del whole
            update = None if own is None else self._orthogonalized(*own).contiguous()
            for ((parameter, group), owner), local_shape in zip(round_of, shapes, strict=True):
                mine = list(owner) == place
                sent = update if mine else torch.empty(local_shape, dtype=self._dtype, device=mesh.device_type)
                assert sent is not None
                # From the rank at `owner` along one dim after the other; along the later ones only its ranks have it.
                for index, dim in enumerate(dims):
                    if list(place[index + 1 :]) == list(owner[index + 1 :]):
                        dist.broadcast(sent, group=mesh.get_group(dim), group_src=owner[index])
                self._apply(parameter, group, sent)

    def _whole(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> Tensor:
        """What is made orthogonal, of whole matrices: this rank's local tensor of them. The momentum is updated."""
        gradient = parameter.grad
        assert gradient is not None, "asked for parameters with a gradient only"
        if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
            gradient = gradient.redistribute(placements=parameter.placements)
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        mean = state["momentum_buffer"]
        to_local_if_dtensor(mean).lerp_(to_local_if_dtensor(gradient), 1 - group["momentum"])
        direction = gradient.lerp(mean, group["momentum"]) if group["nesterov"] else mean
        if not isinstance(direction, DTensor):
            return direction
        # Offloaded shards lie in host memory, where the mesh of a GPU cannot gather them.
        on_mesh: DTensor = direction.to(device=direction.device_mesh.device_type)  # type: ignore[assignment]
        return on_mesh.redistribute(placements=self._gathered(parameter)).to_local()

    def _gathered(self, parameter: Any) -> list[Any]:
        """The placements of a DTensor, with Replicate for those that cut matrices and not a stack of them."""
        dims = 2 if self._row_dims.get(id(parameter)) is None else 3  # that are a matrix's

        def cuts(placement: Any) -> bool:
            if isinstance(placement, Replicate):
                return False
            dim: int | None = getattr(placement, "dim", None)  # a _StridedShard is no Shard, and has one too
            assert dim is not None, f"a gradient with the placement {placement} was not summed"
            return bool(dim % parameter.ndim >= parameter.ndim - dims)

        return [Replicate() if cuts(each) else each for each in parameter.placements]

    def _apply(self, parameter: nn.Parameter, group: Mapping[str, Any], update: Tensor) -> None:
        """Move the parameter against `update`, this rank's local tensor of whole matrices."""
        if isinstance(parameter, DTensor):
            whole = DTensor.from_local(
                update,
                parameter.device_mesh,
                self._gathered(parameter),
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
            update = whole.redistribute(placements=parameter.placements).to_local()
        row_dim = self._row_dims.get(id(parameter))
        weight = to_local_if_dtensor(parameter)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        rows, columns = parameter.shape[-2:]
        if row_dim is not None:
            rows, columns = parameter.flatten(row_dim, row_dim + 1).shape[-2:]
        if self._adjust_lr_fn == "original":
            adjusted = math.sqrt(max(1, rows / columns))
        else:
            adjusted = 0.2 * math.sqrt(max(rows, columns))
        weight.add_(update.to(weight.device), alpha=-group["lr"] * adjusted)

    def _orthogonalized(self, local: Tensor, parameter: nn.Parameter) -> Tensor:
        """The update for matrices; the order of their rows makes no difference to it."""
        row_dim = self._row_dims.get(id(parameter))
        matrices = local if row_dim is None else local.flatten(row_dim, row_dim + 1)
        return orthogonalized(matrices, dtype=self._dtype).view(local.shape)


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
