"""Where every training rank and every engine of a run is placed: arithmetic on the recipe.

A slot is one GPU of a node, or one process if the policy is on the CPU. Ranks take slots from the first node on;
separate engines take the last slots of the last nodes. An engine lies within one node.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rl_backends import MegatronConfig, select_backend
from rl_launcher.errors import Refusal
from rl_launcher.schema import Recipe


class PlacementError(Refusal):
    """Ranks and engines that do not fit on the nodes of the recipe, or into one another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """The node and the slot of one rank of the trainer; both count from 0."""

    rank: int
    node: int
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlace:
    """The node of one engine, and as many slots of it as the engine has ranks."""

    engine: int
    node: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The places of all ranks and engines."""

    num_nodes: int
    slots_per_node: int
    device: Literal["cpu", "cuda"]
    """What a slot is: a process on the CPU, or a GPU."""
    colocated: bool
    """Whether ranks and engines share the same slots."""
    ranks: tuple[RankPlace, ...]
    engines: tuple[EnginePlace, ...]
    in_process: bool = False
    """Whether everything runs in the process that starts the run."""

    def explain(self) -> str:
        """A table: one line per node, and what each of its slots is for."""
        if self.in_process:
            return "everything is in this process"
        slots = "GPUs" if self.device == "cuda" else "processes"
        engines = f"{_counted(self.engines, 'engine')}" if self.engines else "no engine"
        summary = f"{_counted(self.ranks, 'training rank')} and {engines} on {self.num_nodes} x {self.slots_per_node} "
        summary += slots + (", colocated" if self.colocated else ", separate") * bool(self.engines)
        names: list[list[list[str]]] = [[[] for _ in range(self.slots_per_node)] for _ in range(self.num_nodes)]
        for place in self.ranks:
            names[place.node][place.slot].append(f"rank {place.rank}")
        for engine in self.engines:
            for slot in engine.slots:
                names[engine.node][slot].append(f"engine {engine.engine}")
        rows = [[" + ".join(slot) or "-" for slot in node] for node in names]
        width = max(len(slot) for row in rows for slot in row)
        lines = [f"  node {node}  " + " | ".join(s.ljust(width) for s in row).rstrip() for node, row in enumerate(rows)]
        return "\n".join([summary, *lines])


def plan_placement(recipe: Recipe) -> Placement:
    """Give every rank and every engine of `recipe` its place.

    Raises:
        PlacementError: a number does not divide another, nothing is left to train on, or an engine is larger than what
            one node gives it; the message names the keys and the nearest number that would do.
    """
    device = select_backend(recipe.policy).config.device
    if recipe.cluster.runtime == "in_process":
        _check_mesh(recipe, num_ranks=1)
        return Placement(
            num_nodes=1,
            slots_per_node=1,
            device=device,
            colocated=True,
            ranks=(RankPlace(rank=0, node=0, slot=0),),
            engines=(EnginePlace(engine=0, node=0, slots=(0,)),) if recipe.has_local_engine else (),
            in_process=True,
        )
    num_nodes, per_node = recipe.cluster.num_nodes, recipe.cluster.gpus_per_node
    colocated = recipe.policy.generation.colocated.enabled
    for_engines, for_ranks = [0] * num_nodes, [per_node] * num_nodes
    if recipe.generates:
        for_engines = [per_node] * num_nodes if colocated else _slots_for_engines(recipe)
        for_ranks = [per_node if colocated else per_node - taken for taken in for_engines]
    slots = [(node, slot) for node, count in enumerate(for_ranks) for slot in range(count)]
    _check_mesh(recipe, num_ranks=len(slots))
    return Placement(
        num_nodes=num_nodes,
        slots_per_node=per_node,
        device=device,
        colocated=colocated,
        ranks=tuple(RankPlace(rank=rank, node=node, slot=slot) for rank, (node, slot) in enumerate(slots)),
        engines=tuple(
            EnginePlace(engine=number, node=node, slots=taken)
            for number, (node, taken) in enumerate(_engine_slots(recipe, for_engines))
        ),
    )


def _slots_for_engines(recipe: Recipe) -> list[int]:
    """How many slots of each node separate engines take: the last of the last nodes."""
    cluster, resources = recipe.cluster, recipe.policy.generation.colocated.resources
    section = "policy.generation.colocated.resources"
    nodes = cluster.num_nodes if resources.num_nodes is None else resources.num_nodes
    slots = cluster.gpus_per_node if resources.gpus_per_node is None else resources.gpus_per_node
    if nodes > cluster.num_nodes:
        raise PlacementError(
            f"{section}.num_nodes={nodes} is more than cluster.num_nodes={cluster.num_nodes}, of which it is a part: "
            f"set it to at most {cluster.num_nodes - 1 or 1}, or give the run more nodes"
        )
    if slots > cluster.gpus_per_node:
        raise PlacementError(
            f"{section}.gpus_per_node={slots} is more than cluster.gpus_per_node={cluster.gpus_per_node}, of which it "
            f"is a part: set it to at most {cluster.gpus_per_node}"
        )
    if nodes == cluster.num_nodes and slots == cluster.gpus_per_node:
        remedy = f"set cluster.gpus_per_node={slots + 1} or more"
        if slots > 1:
            remedy = f"set {section}.gpus_per_node={slots - 1} or less"
        elif nodes > 1:
            remedy += f", or {section}.num_nodes={nodes - 1}"
        raise PlacementError(
            f"{section} takes all {nodes} x {slots} of cluster.num_nodes x cluster.gpus_per_node for the engines, and "
            f"leaves none to train on; {remedy}, or share them: policy.generation.colocated.enabled=true"
        )
    return [0] * (cluster.num_nodes - nodes) + [slots] * nodes


def _engine_slots(recipe: Recipe, for_engines: list[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Each engine's node and slots: neighbours, from the first slot that engines have there."""
    generation, per_node = recipe.policy.generation, recipe.cluster.gpus_per_node
    size = generation.ranks_per_engine
    for node, count in enumerate(for_engines):
        if count % size:
            divisors = [number for number in range(1, count + 1) if count % number == 0]
            nearest = min(divisors, key=lambda number: (abs(number - size), number))
            larger = -(-count // size) * size
            why = "too few" if count < size else f"not a multiple of {size}"
            vllm, prefix = generation.vllm_cfg, "policy.generation.vllm_cfg."
            key = "policy.generation.colocated.resources.gpus_per_node"
            raise PlacementError(
                f"an engine takes {size} ranks of one node ({prefix}tensor_parallel_size={vllm.tensor_parallel_size} x "
                f"pipeline_parallel_size={vllm.pipeline_parallel_size}), and "
                f"{'cluster.gpus_per_node' if generation.colocated.enabled else key} gives engines {count} of node "
                f"{node}, which is {why}; set {nearest} ranks per engine, or give engines {larger}"
            )
        for start in range(per_node - count, per_node, size):
            yield node, tuple(range(start, start + size))


def _check_mesh(recipe: Recipe, *, num_ranks: int) -> None:
    """Refuse sizes of the backend's mesh that do not divide `num_ranks`, as the backend itself would later."""
    selection, cluster = select_backend(recipe.policy), recipe.cluster
    config, section = selection.config, f"policy.{selection.backend}_cfg"
    names = "data_parallel_replicate_size expert_parallel_size context_parallel_size tensor_parallel_size"
    if isinstance(config, MegatronConfig):
        names = "tensor_model_parallel_size context_parallel_size pipeline_model_parallel_size"
    sizes = {name: getattr(config, name) for name in names.split()}
    product = math.prod(sizes.values())
    if num_ranks % product:
        in_process = cluster.runtime == "in_process"
        taken = ", less what policy.generation.colocated.resources take"
        ranks = (
            "cluster.runtime=in_process trains on 1 rank"
            if in_process
            else f"cluster.num_nodes={cluster.num_nodes} x cluster.gpus_per_node={cluster.gpus_per_node}"
            f"{'' if recipe.policy.generation.colocated.enabled else taken}, gives "
            f"{_counted(range(num_ranks), 'training rank')}"
        )
        named = " x ".join(f"{section}.{name}={size}" for name, size in sizes.items() if size > 1)
        lower, upper = num_ranks // product * product, -(-num_ranks // product) * product
        nearest = f"{lower} or {upper} ranks" if lower else f"{upper} ranks"
        change = "change cluster.gpus_per_node or cluster.num_nodes for"
        raise PlacementError(
            f"{ranks}, and {named} needs a multiple of {product}; "
            f"{'set cluster.runtime=ray and give it' if in_process else change} {nearest}, or lower a size"
        )
    if isinstance(config, MegatronConfig):
        sharing, experts = num_ranks // config.pipeline_model_parallel_size, config.expert_model_parallel_size
        if sharing % experts:
            raise PlacementError(
                f"policy.megatron_cfg.expert_model_parallel_size={experts} must divide the {sharing} ranks of a "
                f"pipeline stage; set a divisor of {sharing}, or change the number of ranks by cluster.gpus_per_node"
            )


def _counted(things: Sequence[object], name: str) -> str:
    return f"{len(things)} {name if len(things) == 1 else f'{name}s'}"
