"""What ranks send one another while a program runs, by phase and axes of the mesh. Counted below DTensor and FSDP."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rl_backends.dry_run.report import Collective

__all__ = ["CollectiveCounter"]

KINDS = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_to_all_single": "all_to_all",
    "broadcast_functional": "broadcast",
}
"""Operators of torch.distributed and of its functional collectives."""


class CollectiveCounter:
    """Counts every collective over more than one rank that it is shown.

    phase: the name of what runs now; "" is not counted.
    """

    def __init__(self, phase: Callable[[], str]) -> None:
        self._phase = phase
        self._kinds: dict[object, str | None] = {}
        self._counts: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
        self._sizes: Counter[tuple[str, str, tuple[int, ...]]] = Counter()

    def saw(self, operator: Any, args: Any, result: object) -> None:
        """An operator ran."""
        if operator not in self._kinds:
            self._kinds[operator] = _kind(operator)
        kind, phase = self._kinds[operator], self._phase()
        if kind is None or not phase:
            return
        ranks = _ranks_of(args)
        if len(ranks) > 1:
            self._counts[phase, kind, ranks] += 1
            self._sizes[phase, kind, ranks] += max(tensor.nbytes for tensor in _tensors_in((args, result)))

    def found(self, mesh: DeviceMesh) -> tuple[Collective, ...]:
        """What was counted, over the axes of `mesh`."""
        return tuple(
            Collective(
                phase=phase,
                kind=kind,
                axes=_axes(mesh, ranks),
                ranks=len(ranks),
                count=count,
                num_bytes=self._sizes[phase, kind, ranks],
            )
            for (phase, kind, ranks), count in self._counts.items()
        )


def _kind(operator: Any) -> str | None:
    space, _, name = operator.name().partition("::")
    return KINDS.get(name.partition(".")[0]) if space in {"c10d", "_c10d_functional"} else None


def _ranks_of(args: Any) -> tuple[int, ...]:
    for value in args:
        if isinstance(value, torch.ScriptObject):
            try:
                return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(value)))
            except RuntimeError:  # the operation of a reduction is an object too
                continue
    names = [value for value in args if isinstance(value, str)]
    registry: Any = dist.distributed_c10d
    group = registry._resolve_process_group(names[-1])  # noqa: SLF001 - no public one
    return tuple(dist.get_process_group_ranks(group))


def _tensors_in(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)


def _axes(mesh: DeviceMesh, ranks: tuple[int, ...]) -> str:
    """The axes along which the ranks differ."""
    names = mesh.mesh_dim_names or ()
    shape: Mapping[str, int] = dict(zip(names, mesh.shape, strict=True))
    coordinates = [_coordinates(rank, tuple(shape.values())) for rank in ranks]
    varying = [name for i, name in enumerate(names) if len({each[i] for each in coordinates}) > 1]
    return " x ".join(varying)


def _coordinates(rank: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(rank // math.prod(shape[axis + 1 :]) % shape[axis] for axis in range(len(shape)))
