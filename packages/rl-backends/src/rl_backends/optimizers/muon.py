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
from collections.abc import Iterable, Mapping, Sequence
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
                dims = _sharing_dims(parameter, row_dim=self._row_dim(parameter))
                if dims:
                    mesh: DeviceMesh = parameter.device_mesh
                    shared.setdefault((mesh, dims), []).append((parameter, group))
                else:
                    whole = _whole(self._direction(parameter, group), row_dim=self._row_dim(parameter))
                    update = self._orthogonalized(whole, parameter)
                    self._apply(parameter, group, _placed(update, parameter, row_dim=self._row_dim(parameter)))
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
                whole = _whole(self._direction(parameter, group), row_dim=self._row_dim(parameter))
                assert isinstance(whole, DTensor)
                if list(owner) == place:
                    own = whole, parameter
                # Of the matrices of others only the shape is kept: their memory is free for the next.
                shapes.append(whole.to_local().shape)
                del whole
            update = None if own is None else self._orthogonalized(*own).contiguous()
            for ((parameter, group), owner), local_shape in zip(round_of, shapes, strict=True):
                mine = list(owner) == place
                sent = update if mine else torch.empty(local_shape, dtype=self._dtype, device=mesh.device_type)
                assert sent is not None
                _broadcast(sent, mesh, dims, owner=owner, place=place)
                self._apply(parameter, group, _placed(sent, parameter, row_dim=self._row_dim(parameter)))

    def _direction(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> Tensor:
        """What is made orthogonal, as the parameter is sharded; the momentum is updated."""
        gradient = _placed_as(parameter, parameter.grad)
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        mean = state["momentum_buffer"]
        to_local_if_dtensor(mean).lerp_(to_local_if_dtensor(gradient), 1 - group["momentum"])
        return gradient.lerp(mean, group["momentum"]) if group["nesterov"] else mean

    def _apply(self, parameter: nn.Parameter, group: Mapping[str, Any], update: Tensor) -> None:
        """Move the parameter against `update`, an unsharded matrix or this rank's stack of them."""
        if isinstance(update, DTensor) and isinstance(parameter, DTensor):
            update = update.redistribute(placements=parameter.placements)
        row_dim = self._row_dim(parameter)
        weight = to_local_if_dtensor(parameter)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        rows, columns = parameter.shape[-2:]
        if row_dim is not None:
            rows, columns = parameter.flatten(row_dim, row_dim + 1).shape[-2:]
        update = to_local_if_dtensor(update).to(weight.device)
        weight.add_(update, alpha=-group["lr"] * self._adjusted(rows, columns))

    def _orthogonalized(self, whole: Tensor, parameter: nn.Parameter) -> Tensor:
        """This rank's update for what it has of `whole`. The order of rows makes no difference to it."""
        local, row_dim = to_local_if_dtensor(whole), self._row_dim(parameter)
        matrices = local if row_dim is None else local.flatten(row_dim, row_dim + 1)
        return orthogonalized(matrices, dtype=self._dtype).view(local.shape)

    def _row_dim(self, parameter: nn.Parameter) -> int | None:
        return self._row_dims.get(id(parameter))

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


def _whole(direction: Tensor, *, row_dim: int | None) -> Tensor:
    """Gather what shards cut within matrices; shards that are whole matrices of a stack stay on their ranks."""
    if not isinstance(direction, DTensor):
        return direction
    # Offloaded shards lie in host memory, where the mesh of a GPU cannot gather them.
    on_mesh: DTensor = direction.to(device=direction.device_mesh.device_type)  # type: ignore[assignment]
    return on_mesh.redistribute(placements=_gathered(direction, row_dim=row_dim))


def _gathered(tensor: DTensor, *, row_dim: int | None) -> list[Any]:
    """The placements of `tensor`, with Replicate for those that cut matrices."""
    dims = 2 if row_dim is None else 3
    return [Replicate() if _cuts_matrices(each, tensor.ndim, dims) else each for each in tensor.placements]


def _sharing_dims(parameter: Tensor, *, row_dim: int | None) -> tuple[int, ...]:
    """The dims of the parameter's mesh, of more than one rank, along which ranks would gather the same matrices."""
    if not isinstance(parameter, DTensor):
        return ()
    placements, mesh = _gathered(parameter, row_dim=row_dim), parameter.device_mesh
    return tuple(dim for dim, each in enumerate(placements) if isinstance(each, Replicate) and mesh.size(dim) > 1)


def _placed(local: Tensor, parameter: Tensor, *, row_dim: int | None) -> Tensor:
    """What is `local` of the matrices that `_whole` gathers for `parameter`, as a DTensor if that is one."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        _gathered(parameter, row_dim=row_dim),
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _broadcast(
    tensor: Tensor, mesh: DeviceMesh, dims: Sequence[int], *, owner: Sequence[int], place: Sequence[int]
) -> None:
    """Send the tensor of the rank at `owner` to all ranks along `dims`: along one dim after the other."""
    for index, dim in enumerate(dims):
        # Along the later dims, only the owner's ranks have it by now.
        if list(place[index + 1 :]) == list(owner[index + 1 :]):
            dist.broadcast(tensor, group=mesh.get_group(dim), group_src=owner[index])


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
