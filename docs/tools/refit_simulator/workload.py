"""A refit to simulate: real manifests of both sides, small enough that a trillion parameters plan in seconds.

Tensors that have one role, shape and dtype and lie alike on both sides are planned as one tensor with a leading dim
that counts them, and routed experts with a second one, which expert parallelism cuts: boxes and bytes are those of the
single tensors, and the leading dims of a route say how many of them it carries.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, get_args

from refit_simulator.models import ModelTensor, SimulatedModel
from refit_simulator.parallelism import Parallelism
from rl_refit.layout import Region
from rl_refit.manifest import Manifest, TensorMeta
from rl_refit.plan import Topology

__all__ = ["Stack", "Wire", "Workload"]

Wire = Literal["bfloat16", "float8"]
"""What crosses the wire: the trainer's bfloat16, or projections that it has put into FP8 blocks."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, two sides and the nodes that they lie on."""

    model: SimulatedModel
    """Whose tensors."""

    train: Parallelism
    engine: Parallelism
    gpus_per_node: int

    colocated: bool = False
    """Whether trainer and engine share GPUs: rank 0 of both is one GPU."""

    wire: Wire = "bfloat16"

    stacked_experts: bool = False
    """Whether each layer's experts travel as one tensor of [experts, …], as transformers 5 holds them."""

    def __post_init__(self) -> None:
        if self.wire not in get_args(Wire):
            raise ValueError(f"no wire {self.wire!r}; it is one of {', '.join(get_args(Wire))}")
        if self.colocated and self.train.gpus != self.engine.gpus:
            raise ValueError(
                f"colocated sides share their GPUs; got {self.train.gpus} trainer and {self.engine.gpus} engine GPUs"
            )
        self.train.check(self.model)
        self.engine.check(self.model)

    @property
    def num_tensors(self) -> int:
        """Tensors that travel, by their names."""
        return sum(stack.tensors for stack in self.stacks)

    @property
    def total_bytes(self) -> int:
        """Bytes of the model on the wire, once."""
        return self.manifests[0].total_bytes

    @cached_property
    def stacks(self) -> tuple[Stack, ...]:
        """The tensors, grouped."""
        return tuple(
            Stack(meta, wanted, 1 if tensor.expert is None or self.stacked_experts else self.model.experts)
            for (tensor, _), meta, wanted in zip(_groups(self), *(side.tensors for side in self.manifests), strict=True)
        )

    @cached_property
    def manifests(self) -> tuple[Manifest, Manifest]:
        """The stacks as the trainer and as the engine hold them."""
        sides = (self.train, self.engine)
        metas = ([self._meta(side, number, group) for number, group in enumerate(_groups(self))] for side in sides)
        source, sink = (Manifest(tuple(side)) for side in metas)
        return source, sink

    @cached_property
    def topology(self) -> Topology:
        """Nodes of consecutive ranks; where the sides are colocated, the same nodes."""
        train, engine = ("node", "node") if self.colocated else ("trainer", "engine")
        return Topology(
            source_nodes=_nodes(train, self.train.gpus, self.gpus_per_node),
            sink_nodes=_nodes(engine, self.engine.gpus, self.gpus_per_node),
        )

    def _meta(self, side: Parallelism, number: int, group: tuple[ModelTensor, int]) -> TensorMeta:
        tensor, count = group
        experts = () if tensor.expert is None else (self.model.experts,)
        return TensorMeta(
            name=f"{number}: {count} like {tensor.name}",
            shape=(count, *experts, *tensor.shape),
            dtype=tensor.dtype,
            layout=side.layout(tensor, self.model, stacked_experts=self.stacked_experts),
        )


@dataclass(frozen=True, slots=True)
class Stack:
    """Equal tensors that are planned as one."""

    held: TensorMeta
    """As the trainer holds them."""

    wanted: TensorMeta
    """As the engine does."""

    names_per_layer: int
    """How many names the second dim stands for: the experts, where each is a tensor of its own."""

    @property
    def tensors(self) -> int:
        """How many tensors it stands for."""
        return self.held.shape[0] * self.names_per_layer

    def pieces(self, box: Region) -> int:
        """Boxes of single tensors in a box of the stack."""
        return box.shape[0] * (box.shape[1] if self.names_per_layer > 1 else 1)


def _nodes(name: str, gpus: int, size: int) -> tuple[str, ...]:
    return tuple(f"{name} {rank // size}" for rank in range(gpus))


@lru_cache(maxsize=32)
def _groups(workload: Workload) -> tuple[tuple[ModelTensor, int], ...]:
    """Tensors that are planned as one, each by its first, with how many they are; of the experts, only the first."""
    model = workload.model
    groups: dict[object, tuple[ModelTensor, int]] = {}
    for tensor in model.tensors_as(workload.wire):
        if tensor.expert:
            continue
        stages = workload.train.stage_of(tensor, model), workload.engine.stage_of(tensor, model)
        key = (tensor.role, tensor.shape, tensor.dtype, tensor.expert, stages)
        first, count = groups.get(key, (tensor, 0))
        groups[key] = (first, count + 1)
    return tuple(groups.values())
