"""Where every training rank and every engine of a run is: arithmetic on the recipe. Knows no Ray and no machine.

A slot is one GPU of a node, or one process where the policy is on the CPU. Ranks take slots from the first node on;
separate engines take the last slots of the last nodes, and an engine lies within one node.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from rl_backends import DTensorConfig, MegatronConfig, select_backend
from rl_launcher.errors import Refusal
from rl_launcher.schema import Recipe

__all__ = ["EnginePlace", "Placement", "PlacementError", "RankPlace", "plan_placement"]


class PlacementError(Refusal):
    """Ranks and engines that do not fit on the machines that the recipe names, or into one another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Of one rank of the trainer."""

    rank: int
    """Among all of them."""

    node: int
    """Which machine, from 0."""

    slot: int
    """Which slot of it, from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlace:
    """Of one engine."""

    engine: int
    """Among all of them."""

    node: int
    """Which machine, from 0."""

    slots: tuple[int, ...]
    """Which slots of it, as many as the engine has ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Who is where."""

    num_nodes: int
    """Machines that the run takes."""

    slots_per_node: int
    """Of each machine."""

    device: Literal["cpu", "cuda"]
    """What a slot is: a process on the CPU, or a GPU."""

    colocated: bool
    """Whether ranks and engines take turns on the same slots."""

    ranks: tuple[RankPlace, ...]
    """By rank."""

    engines: tuple[EnginePlace, ...]
    """By number."""

    in_process: bool = False
    """Whether all of it is the process that the run is started in."""

    def explain(self) -> str:
        """A table: a line a node, and what each of its slots is for."""
        if self.in_process:
            return "everything is in this process"
        slots = "GPUs" if self.device == "cuda" else "processes"
        turns = "which take turns" if self.colocated else "apart from one another"
        summary = (
            f"{len(self.ranks)} training {_plural('rank', self.ranks)} and {len(self.engines)} "
            f"{_plural('engine', self.engines)} on {self.num_nodes} x {self.slots_per_node} {slots}, {turns}"
        )
        width = max(len(words) for node in range(self.num_nodes) for words in self._slots_of(node))
        lines = [
            f"  node {node}  " + " | ".join(words.ljust(width) for words in self._slots_of(node)).rstrip()
            for node in range(self.num_nodes)
        ]
        return "\n".join([summary, *lines])

    def _slots_of(self, node: int) -> list[str]:
        held: list[list[str]] = [[] for _ in range(self.slots_per_node)]
        for place in self.ranks:
            if place.node == node:
                held[place.slot].append(f"rank {place.rank}")
        for engine in self.engines:
            for slot in engine.slots if engine.node == node else ():
                held[slot].append(f"engine {engine.engine}")
        return [" + ".join(names) or "-" for names in held]


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
            engines=(EnginePlace(engine=0, node=0, slots=(0,)),),
            in_process=True,
        )
    num_nodes, per_node = recipe.cluster.num_nodes, recipe.cluster.gpus_per_node
    colocated = recipe.policy.generation.colocated.enabled
    for_engines = [per_node] * num_nodes if colocated else _slots_for_engines(recipe)
    for_ranks = [per_node if colocated else per_node - taken for taken in for_engines]
    ranks = tuple(
        RankPlace(rank=rank, node=node, slot=slot)
        for rank, (node, slot) in enumerate(
            (node, slot) for node, count in enumerate(for_ranks) for slot in range(count)
        )
    )
    _check_mesh(recipe, num_ranks=len(ranks))
    engines = tuple(
        EnginePlace(engine=number, node=node, slots=slots)
        for number, (node, slots) in enumerate(_cut(recipe, for_engines))
    )
    return Placement(
        num_nodes=num_nodes,
        slots_per_node=per_node,
        device=device,
        colocated=colocated,
        ranks=ranks,
        engines=engines,
    )


def _slots_for_engines(recipe: Recipe) -> list[int]:
    """How many slots of each node separate engines take: the last of the last nodes."""
    cluster, resources = recipe.cluster, recipe.policy.generation.colocated.resources
    named = "policy.generation.colocated.resources"
    nodes = cluster.num_nodes if resources.num_nodes is None else resources.num_nodes
    slots = cluster.gpus_per_node if resources.gpus_per_node is None else resources.gpus_per_node
    if nodes > cluster.num_nodes:
        raise PlacementError(
            f"{named}.num_nodes={nodes} is more than cluster.num_nodes={cluster.num_nodes}; it is part of them: give "
            f"at most {cluster.num_nodes - 1 or 1}, or more machines to the run"
        )
    if slots > cluster.gpus_per_node:
        raise PlacementError(
            f"{named}.gpus_per_node={slots} is more than cluster.gpus_per_node={cluster.gpus_per_node}; it is part of "
            f"them: give at most {cluster.gpus_per_node}"
        )
    if nodes == cluster.num_nodes and slots == cluster.gpus_per_node:
        way_out = (
            f"give {named}.gpus_per_node={slots - 1} or less"
            if slots > 1
            else f"give cluster.gpus_per_node={slots + 1} or more, or {named}.num_nodes={nodes - 1}"
            if nodes > 1
            else f"give cluster.gpus_per_node={slots + 1} or more"
        )
        raise PlacementError(
            f"{named} takes all {nodes} x {slots} of cluster.num_nodes x cluster.gpus_per_node for the engines, and "
            f"leaves none to train on; {way_out}, or share them by policy.generation.colocated.enabled=true"
        )
    return [0] * (cluster.num_nodes - nodes) + [slots] * nodes


def _cut(recipe: Recipe, for_engines: list[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Each engine's node and slots: neighbours, from the first slot that engines have there."""
    generation, per_node = recipe.policy.generation, recipe.cluster.gpus_per_node
    size = generation.ranks_per_engine
    key = (
        "cluster.gpus_per_node"
        if generation.colocated.enabled
        else "policy.generation.colocated.resources.gpus_per_node"
    )
    for node, count in enumerate(for_engines):
        if count % size:
            divisors = [number for number in range(1, count + 1) if count % number == 0]
            nearest = min(divisors, key=lambda number: (abs(number - size), number))
            larger = -(-count // size) * size
            why = "too few" if count < size else f"not a multiple of {size}"
            raise PlacementError(
                f"an engine takes {size} ranks of one node ({_engine_size(recipe)}), and {key} gives engines {count} "
                f"of node {node}, which is {why}; give an engine {nearest}, or the engines {larger}"
            )
        first = per_node - count
        for start in range(first, per_node, size):
            yield node, tuple(range(start, start + size))


def _engine_size(recipe: Recipe) -> str:
    vllm = recipe.policy.generation.vllm_cfg
    prefix = "policy.generation.vllm_cfg."
    return (
        f"{prefix}tensor_parallel_size={vllm.tensor_parallel_size} x "
        f"pipeline_parallel_size={vllm.pipeline_parallel_size}"
    )


def _check_mesh(recipe: Recipe, *, num_ranks: int) -> None:
    """Refuse sizes of the backend that `num_ranks` ranks cannot be cut into, as the backend itself would later."""
    selection = select_backend(recipe.policy)
    section = f"policy.{selection.backend}_cfg"
    sizes = _dtensor_sizes(selection.config) if selection.backend == "dtensor" else _megatron_sizes(selection.config)
    product = 1
    for size in sizes.values():
        product *= size
    if num_ranks % product:
        named = " x ".join(f"{section}.{name}={size}" for name, size in sizes.items() if size > 1)
        lower, upper = num_ranks // product * product, -(-num_ranks // product) * product
        nearest = f"{upper} ranks" if not lower else f"{lower} or {upper} ranks"
        where = (
            "say cluster.runtime=ray and give it"
            if recipe.cluster.runtime == "in_process"
            else "change cluster.gpus_per_node or cluster.num_nodes for"
        )
        raise PlacementError(
            f"{_ranks_in_words(recipe, num_ranks)}, and {named} needs a multiple of {product}; {where} {nearest}, or "
            f"lower a size"
        )
    if isinstance(selection.config, MegatronConfig):
        _check_experts(selection.config, num_ranks)


def _check_experts(config: MegatronConfig, num_ranks: int) -> None:
    sharing, experts = num_ranks // config.pipeline_model_parallel_size, config.expert_model_parallel_size
    if sharing % experts:
        raise PlacementError(
            f"policy.megatron_cfg.expert_model_parallel_size={experts} must divide the {sharing} ranks of a pipeline "
            f"stage; give a divisor of {sharing}, or other ranks by cluster.gpus_per_node"
        )


def _dtensor_sizes(config: DTensorConfig | MegatronConfig) -> dict[str, int]:
    names = (
        "data_parallel_replicate_size",
        "expert_parallel_size",
        "context_parallel_size",
        "tensor_parallel_size",
    )
    return {name: getattr(config, name) for name in names}


def _megatron_sizes(config: DTensorConfig | MegatronConfig) -> dict[str, int]:
    names = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
    return {name: getattr(config, name) for name in names}


def _ranks_in_words(recipe: Recipe, num_ranks: int) -> str:
    cluster = recipe.cluster
    if cluster.runtime == "in_process":
        return "cluster.runtime=in_process trains on 1 rank"
    taken = (
        "" if recipe.policy.generation.colocated.enabled else ", less what policy.generation.colocated.resources take"
    )
    return (
        f"cluster.num_nodes={cluster.num_nodes} x cluster.gpus_per_node={cluster.gpus_per_node}{taken}, gives "
        f"{num_ranks} training {'rank' if num_ranks == 1 else 'ranks'}"
    )


def _plural(word: str, things: tuple[Any, ...]) -> str:
    return word if len(things) == 1 else f"{word}s"
