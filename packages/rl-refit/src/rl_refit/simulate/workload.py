"""A refit to simulate: real manifests of both sides, small enough that a trillion parameters plan in seconds.

Knows no seconds. Tensors that have one role, shape and dtype and lie alike on both sides are planned as one tensor with
a leading dim that counts them, which no layout cuts: boxes, bytes and balance are those of the single tensors, and the
leading dim says how many of them a route carries. Each such stack is cut into a few, so that the planner can choose
among the ranks that hold a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from rl_refit.manifest import Manifest, TensorMeta
from rl_refit.simulate.models import MODELS, ModelTensor, SimulatedModel
from rl_refit.simulate.parallelism import Parallelism
from rl_refit.topology import Topology

__all__ = ["Wire", "Workload"]

Wire = Literal["bfloat16", "float8"]
"""What crosses the wire: the trainer's bfloat16, or projections that it has put into FP8 blocks."""

MAX_STACKS = 8
"""Stacks of equal tensors, at most; more would spread the choice of sender finer, and plan slower."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, two sides and the nodes that they lie on."""

    model: str
    """A name of `MODELS`."""

    train: Parallelism
    engine: Parallelism
    gpus_per_node: int

    colocated: bool = False
    """Whether trainer and engine share GPUs: rank 0 of both is one GPU."""

    wire: Wire = "bfloat16"

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ValueError(f"no model {self.model!r}; the presets are {', '.join(MODELS)}")
        if self.colocated and self.train.gpus != self.engine.gpus:
            raise ValueError(
                f"colocated sides share their GPUs; got {self.train.gpus} trainer and {self.engine.gpus} engine GPUs"
            )
        self.train.check(self.definition)
        self.engine.check(self.definition)

    @property
    def definition(self) -> SimulatedModel:
        """The model itself."""
        return MODELS[self.model]

    @property
    def num_tensors(self) -> int:
        """Tensors that travel, by their names in the checkpoint."""
        return sum(count for _, count in _groups(self))

    @property
    def total_bytes(self) -> int:
        """Bytes of the model on the wire, once."""
        return self.manifests[0].total_bytes

    @cached_property
    def manifests(self) -> tuple[Manifest, Manifest]:
        """The stacks as the trainer and as the engine hold them."""
        source: list[TensorMeta] = []
        sink: list[TensorMeta] = []
        for number, (tensor, count) in enumerate(_groups(self)):
            held, wanted = (side.layout(tensor, self.definition) for side in (self.train, self.engine))
            for part, size in enumerate(_even(count, held.mesh_shape[0])):
                name, shape = f"{number}.{part} like {tensor.name}", (size, *tensor.shape)
                source.append(TensorMeta(name=name, shape=shape, dtype=tensor.dtype, layout=held))
                sink.append(TensorMeta(name=name, shape=shape, dtype=tensor.dtype, layout=wanted))
        return Manifest(tuple(source)), Manifest(tuple(sink))

    @cached_property
    def topology(self) -> Topology:
        """Nodes of consecutive ranks; where the sides are colocated, the same nodes."""
        train, engine = ("node", "node") if self.colocated else ("trainer", "engine")
        return Topology(
            source_nodes=_nodes(train, self.train.gpus, self.gpus_per_node),
            sink_nodes=_nodes(engine, self.engine.gpus, self.gpus_per_node),
        )


def _nodes(name: str, gpus: int, size: int) -> tuple[str, ...]:
    return tuple(f"{name} {rank // size}" for rank in range(gpus))


def _even(count: int, replicas: int) -> Sequence[int]:
    """`count` in almost equal parts, as many as there are replicas to choose from, within reason."""
    parts = min(count, replicas, MAX_STACKS)
    return [count // parts + (part < count % parts) for part in range(parts)]


@lru_cache(maxsize=32)
def _groups(workload: Workload) -> tuple[tuple[ModelTensor, int], ...]:
    """Tensors that are planned as one, each by its first, with how many they are."""
    model = workload.definition
    sides = (workload.train, workload.engine)
    groups: dict[object, tuple[ModelTensor, int]] = {}
    for tensor in model.tensors_as(workload.wire):
        places = tuple((side.stage_of(tensor, model), side.slot_of(tensor, model)) for side in sides)
        key = (tensor.role, tensor.shape, tensor.dtype, places)
        first, count = groups.get(key, (tensor, 0))
        groups[key] = (first, count + 1)
    return tuple(groups.values())
