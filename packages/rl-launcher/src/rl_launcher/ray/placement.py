"""Where every training rank and every engine of a run is placed: arithmetic on the recipe.

A slot is one GPU of a node, or one process if the policy is on the CPU. Nodes may have different numbers of them. Ranks
take slots from the first node on; separate engines take the last slots of the last nodes.

The ranks of an engine are numbered as vLLM numbers them: stage by stage of its pipeline, and within a stage by tensor
parallelism. A tensor-parallel group talks in every layer and stays within one node if any node is large enough for it;
the stages of a pipeline talk once a stage and may be on several nodes. An engine is on no more nodes than it must be.
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rl_backends import MegatronConfig, select_backend
from rl_launcher.errors import Refusal
from rl_launcher.schema import Recipe

Slot = tuple[int, int]
"""A node and one of its slots; both count from 0."""

GIB = 2**30
VLLM_KEYS = "policy.generation.vllm_cfg"


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
    """The slots of one engine, in the order of its ranks."""

    engine: int
    slots: tuple[Slot, ...]
    tensor_parallel_size: int = 1

    @property
    def node(self) -> int:
        """The node of its first rank, where its actor is."""
        return self.slots[0][0]

    @property
    def nodes(self) -> tuple[int, ...]:
        """Its nodes, each once, in the order of its ranks."""
        return tuple(dict.fromkeys(node for node, _ in self.slots))

    def slots_on(self, node: int) -> tuple[int, ...]:
        """Which slots of a node it has, in the order of its ranks."""
        return tuple(slot for each, slot in self.slots if each == node)

    def part_on(self, node: int) -> str:
        """In words what of it is on a node: all of it, whole stages, or tensor-parallel ranks of a stage."""
        name, tensor = f"engine {self.engine}", self.tensor_parallel_size
        if len(self.nodes) == 1:
            return name
        stages: dict[int, list[int]] = defaultdict(list)
        for rank, (each, _) in enumerate(self.slots):
            if each == node:
                stages[rank // tensor].append(rank % tensor)
        whole = [stage for stage, ranks in stages.items() if len(ranks) == tensor]
        parts = [f"stage{_s(whole)} {_ranges(whole)}"] if whole else []
        parts += [
            f"tensor-parallel rank{_s(ranks)} {_ranges(ranks)} of stage {stage}"
            for stage, ranks in stages.items()
            if len(ranks) < tensor
        ]
        return f"{name} {' and '.join(parts)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The places of all ranks and engines."""

    num_slots: tuple[int, ...]
    """Slots of each node."""
    device: Literal["cpu", "cuda"]
    """What a slot is: a process on the CPU, or a GPU."""
    colocated: bool
    """Whether ranks and engines share the same slots."""
    ranks: tuple[RankPlace, ...]
    engines: tuple[EnginePlace, ...]
    in_process: bool = False
    """Whether everything runs in the process that starts the run."""
    notes: tuple[str, ...] = ()
    """What works and is slower than it need be."""

    @property
    def num_nodes(self) -> int:
        """Nodes of the run."""
        return len(self.num_slots)

    @property
    def spans_nodes(self) -> bool:
        """Whether an engine is on several nodes."""
        return any(len(engine.nodes) > 1 for engine in self.engines)

    def ranks_on(self, node: int) -> tuple[RankPlace, ...]:
        """The training ranks of a node, in their order."""
        return tuple(place for place in self.ranks if place.node == node)

    def explain(self) -> str:
        """A line for each node: its training ranks, and the engines or the stages of engines on it."""
        if self.in_process:
            return "everything is in this process"
        kind = "GPUs" if self.device == "cuda" else "processes"
        sizes = " + ".join(f"{len([*nodes])} x {size}" for size, nodes in itertools.groupby(self.num_slots))
        engines = _counted(self.engines, "engine") if self.engines else "no engine"
        summary = f"{_counted(self.ranks, 'training rank')} and {engines} on {sizes} {kind}"
        lines = [summary + (", colocated" if self.colocated else ", separate") * bool(self.engines)]
        if self.engines and (size := len(self.engines[0].slots)) > 1:
            tensor = self.engines[0].tensor_parallel_size
            lines.append(f"each engine has {size} ranks: {tensor} tensor parallel x {size // tensor} pipeline stages")
        on_node: list[list[str]] = [[] for _ in self.num_slots]
        for node, ranks in itertools.groupby(self.ranks, lambda place: place.node):
            places = [*ranks]
            which = f"rank{_s(places)} {_ranges([place.rank for place in places])}"
            on_node[node].append(f"{which} on {kind} {_ranges([place.slot for place in places])}")
        for engine in self.engines:
            for node in engine.nodes:
                on_node[node].append(f"{engine.part_on(node)} on {kind} {_ranges(engine.slots_on(node))}")
        lines += [f"  node {node}  {'; '.join(parts) or 'idle'}" for node, parts in enumerate(on_node)]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def figures(self) -> list[dict[str, object]]:
        """The same for `--json`: of each node its slots, and who has them by rank."""
        return [
            {
                "node": node,
                "slots": size,
                "ranks": {str(place.rank): place.slot for place in self.ranks_on(node)},
                "engines": [
                    {
                        "engine": engine.engine,
                        "slot": slot,
                        "stage": rank // engine.tensor_parallel_size,
                        "tensor_parallel_rank": rank % engine.tensor_parallel_size,
                    }
                    for engine in self.engines
                    for rank, (each, slot) in enumerate(engine.slots)
                    if each == node
                ],
            }
            for node, size in enumerate(self.num_slots)
        ]


# ---- The recipe's ranks and engines.


def plan_placement(recipe: Recipe) -> Placement:
    """Give every rank and every engine of `recipe` its place.

    Raises:
        PlacementError: a number does not divide another, nothing is left to train on, or engines do not fill the slots
            that they are given; the message names the keys, the node and what it lacks, and the smallest change.
    """
    device = select_backend(recipe.policy).config.device
    if recipe.cluster.runtime == "in_process":
        _check_mesh(recipe, num_ranks=1)
        return Placement(
            num_slots=(1,),
            device=device,
            colocated=True,
            ranks=(RankPlace(rank=0, node=0, slot=0),),
            engines=(EnginePlace(engine=0, slots=((0, 0),)),) if recipe.has_local_engine else (),
            in_process=True,
        )
    num_slots, generation = recipe.cluster.slots_of_nodes, recipe.policy.generation
    colocated = generation.colocated.enabled
    for_engines, for_ranks = (0,) * len(num_slots), num_slots
    if recipe.generates:
        for_engines = num_slots if colocated else _slots_for_engines(recipe)
        for_ranks = tuple(size - taken * (not colocated) for size, taken in zip(num_slots, for_engines, strict=True))
    slots = [(node, slot) for node, count in enumerate(for_ranks) for slot in range(count)]
    _check_mesh(recipe, num_ranks=len(slots))
    tensor, pipeline = 1, 1
    if generation.backend == "vllm":
        tensor, pipeline = generation.vllm_cfg.tensor_parallel_size, generation.vllm_cfg.pipeline_parallel_size
    given_by = "cluster.gpus_per_node" if colocated else "policy.generation.colocated.resources"
    replicas = (
        place_replicas(for_engines, tensor=tensor, pipeline=pipeline, given_by=given_by) if recipe.generates else ()
    )
    first = [size - taken for size, taken in zip(num_slots, for_engines, strict=True)]
    placement = Placement(
        num_slots=num_slots,
        device=device,
        colocated=colocated,
        ranks=tuple(RankPlace(rank=rank, node=node, slot=slot) for rank, (node, slot) in enumerate(slots)),
        engines=tuple(
            EnginePlace(
                engine=number,
                slots=tuple((node, first[node] + slot) for node, slot in replica),
                tensor_parallel_size=tensor,
            )
            for number, replica in enumerate(replicas)
        ),
    )
    if placement.spans_nodes and device == "cpu":
        raise PlacementError(
            f"an engine takes {tensor * pipeline} processes ({VLLM_KEYS}.tensor_parallel_size={tensor} x "
            f"pipeline_parallel_size={pipeline}) and is on several nodes, and vLLM on a CPU has no executor over "
            f"nodes; on CPUs set {VLLM_KEYS}.tensor_parallel_size=1 and pipeline_parallel_size=1, or train on GPUs"
        )
    return replace(placement, notes=(*_slow_trainer(recipe, placement), *_slow_engines(placement)))


def _slots_for_engines(recipe: Recipe) -> tuple[int, ...]:
    """How many slots of each node separate engines take: the last of the last nodes."""
    num_slots, resources = recipe.cluster.slots_of_nodes, recipe.policy.generation.colocated.resources
    section, total = "policy.generation.colocated.resources", len(num_slots)
    nodes = total if resources.num_nodes is None else resources.num_nodes
    if nodes > total:
        raise PlacementError(
            f"{section}.num_nodes={nodes} is more than cluster.num_nodes={total}, of which it is a part: "
            f"set it to at most {total - 1 or 1}, or give the run more nodes"
        )
    last = num_slots[total - nodes :]
    wanted = resources.gpus_per_node
    if wanted is not None and wanted > min(last):
        where = f"cluster.gpus_per_node={min(last)}"
        if len(set(num_slots)) > 1:
            where = f"the {min(last)} that cluster.gpus_per_node gives node {total - nodes + last.index(min(last))}"
        raise PlacementError(
            f"{section}.gpus_per_node={wanted} is more than {where}, of which it is a part: set it to at most "
            f"{min(last)}"
        )
    taken = last if wanted is None else (wanted,) * nodes
    if sum(taken) == sum(num_slots):
        slots = max(taken)
        remedy = f"set cluster.gpus_per_node={slots + 1} or more"
        if slots > 1:
            remedy = f"set {section}.gpus_per_node={min(slots - 1, *last)} or less"
        elif nodes > 1:
            remedy += f", or {section}.num_nodes={nodes - 1}"
        raise PlacementError(
            f"{section} takes all {sum(taken)} of cluster.num_nodes x cluster.gpus_per_node for the engines, and "
            f"leaves none to train on; {remedy}, or share them: policy.generation.colocated.enabled=true"
        )
    return (0,) * (total - nodes) + taken


# ---- The slots of engines.


def place_replicas(
    num_slots: Sequence[int], *, tensor: int, pipeline: int, given_by: str = "cluster.gpus_per_node"
) -> tuple[tuple[Slot, ...], ...]:
    """Divide slots among engines, so that none is left over and the engines together are on as few nodes as can be.

    Args:
        num_slots: of each node, for engines.
        tensor: size of a tensor-parallel group. It is within one node if the largest node has room for one; otherwise
            it fills several.
        pipeline: number of such groups in an engine.
        given_by: the key that gives engines their slots, for messages.

    Returns:
        Of each engine its slots by rank, with the slots of each node counted from 0. The engines are in the order of
        their first slot.

    Raises:
        PlacementError: slots would be left over, or a group would be torn although a node has room for it.
    """
    if (lacking := lacking_slots(num_slots, tensor=tensor, pipeline=pipeline)) is not None:
        raise PlacementError(
            f"an engine takes {tensor * pipeline} ranks ({VLLM_KEYS}.tensor_parallel_size={tensor} x "
            f"pipeline_parallel_size={pipeline}), and {given_by} {lacking}; "
            f"{_smallest_change(num_slots, tensor=tensor, pipeline=pipeline)}"
        )
    unit = tensor if tensor <= max(num_slots) else 1  # what is not torn
    per_engine = tensor * pipeline // unit
    order = _line_up([size // unit for size in num_slots], per_engine)
    line = [(node, slot) for node in order for slot in range(num_slots[node])]
    size = tensor * pipeline
    return tuple(sorted(tuple(sorted(line[start : start + size])) for start in range(0, len(line), size)))


def lacking_slots(num_slots: Sequence[int], *, tensor: int, pipeline: int) -> str | None:
    """Why engines of this shape do not fill the slots, naming the node and what it lacks, or None if they do."""
    largest, total, size = max(num_slots), sum(num_slots), tensor * pipeline
    if tensor <= largest:
        for node, count in enumerate(num_slots):
            if over := count % tensor:
                return (
                    f"gives engines {count} of node {node}, which is not a multiple of {tensor}: {tensor - over} short "
                    f"of {count // tensor + 1} tensor-parallel group{'s' * (count >= tensor)} in one node"
                )
    if over := total % size:
        why = "too few" if total < size else f"not a multiple of {size}"
        given = [node for node, count in enumerate(num_slots) if count]
        where = f"node {given[0]}" if len(given) == 1 else f"nodes {_ranges(given)} together"
        engines = _counted(range(total // size + 1), "engine")
        return f"gives engines {total} of {where}, which is {why}: {size - over} short of {engines}"
    return None


def _smallest_change(num_slots: Sequence[int], *, tensor: int, pipeline: int) -> str:
    """The engine's sizes that fit and are nearest to the given ones, and the slots that the given ones would need."""
    total, size = sum(num_slots), tensor * pipeline
    shapes = [
        (each, count // each)
        for count in range(1, total + 1)
        if total % count == 0
        for each in range(1, count + 1)
        if count % each == 0 and each <= max(num_slots)
    ]
    fitting = [(t, p) for t, p in shapes if lacking_slots(num_slots, tensor=t, pipeline=p) is None]
    # The same number of ranks keeps the memory of each; of those, the nearest tensor-parallel size.
    nearest = min(fitting, key=lambda shape: (abs(shape[0] * shape[1] - size), abs(shape[0] - tensor), shape))
    enough = needed_slots(num_slots, tensor=tensor, pipeline=pipeline)
    more = [f"{count} of node {node}" for node, count in enumerate(enough) if count != num_slots[node]]
    if len(more) == len(enough) > 1 and len(set(enough)) == 1:
        more = [f"{enough[0]} of each node"]
    return (
        f"set tensor_parallel_size={nearest[0]} and pipeline_parallel_size={nearest[1]} "
        f"({_counted(range(nearest[0] * nearest[1]), 'rank')}), or give engines {' and '.join(more)}"
    )


def needed_slots(num_slots: Sequence[int], *, tensor: int, pipeline: int) -> tuple[int, ...]:
    """The given nodes with so many more slots that engines of this shape fill them."""
    enough = list(num_slots)
    if tensor <= max(enough):
        enough = [-(-count // tensor) * tensor for count in enough]
    last = max(node for node, count in enumerate(enough) if count)
    enough[last] += -sum(enough) % (tensor * pipeline)
    if lacking_slots(enough, tensor=tensor, pipeline=pipeline) is None:
        return tuple(enough)
    return needed_slots(enough, tensor=tensor, pipeline=pipeline)  # the last node has room for a group by now


def _line_up(units: Sequence[int], per_engine: int) -> list[int]:
    """An order of the nodes with units in which engines that fill them one after another are on the fewest nodes.

    An engine that ends within a node makes the next one share that node. So the fewest nodes are touched if the units
    up to and including a node are as often as possible a multiple of `per_engine`. Nodes of the same remainder are
    alike, which leaves few cases: of each remainder, how many nodes are used already.
    """
    nodes = [node for node, count in enumerate(units) if count]
    ends_in: dict[int, list[int]] = defaultdict(list)
    for node in nodes:
        ends_in[units[node] % per_engine].append(node)
    done = ends_in.pop(0, [])
    kinds = sorted(ends_in)
    best: dict[tuple[int, ...], tuple[int, int]] = {(0,) * len(kinds): (0, -1)}  # hits, and the kind of the last node
    for used in itertools.product(*(range(len(ends_in[kind]) + 1) for kind in kinds)):
        if not any(used):
            continue
        hit = sum(kind * count for kind, count in zip(kinds, used, strict=True)) % per_engine == 0
        before = [
            (best[*used[:index], used[index] - 1, *used[index + 1 :]][0] + hit, index)
            for index in range(len(kinds))
            if used[index]
        ]
        best[used] = max(before, key=lambda each: (each[0], each[1]))
    used = tuple(len(ends_in[kind]) for kind in kinds)
    filled = itertools.accumulate(units[node] for node in nodes)
    if sum(each % per_engine == 0 for each in filled) == best[used][0] + len(done):
        return nodes  # the order that they have is as good as any
    backwards: list[int] = []
    while any(used):
        last = best[used][1]
        backwards.append(ends_in[kinds[last]][used[last] - 1])
        used = (*used[:last], used[last] - 1, *used[last + 1 :])
    return [*done, *reversed(backwards)]


def _slow_engines(placement: Placement) -> Iterator[str]:
    """Say where tensor parallelism crosses nodes."""
    torn = [
        engine.engine
        for engine in placement.engines
        for start in range(0, len(engine.slots), engine.tensor_parallel_size)
        if len({node for node, _ in engine.slots[start : start + engine.tensor_parallel_size]}) > 1
    ]
    if torn:
        tensor, size = placement.engines[0].tensor_parallel_size, len(placement.engines[0].slots)
        counts = Counter(node for engine in placement.engines for node, _ in engine.slots)
        within = max(
            each for each in range(1, tensor) if tensor % each == 0 and not any(n % each for n in counts.values())
        )
        engines = [*dict.fromkeys(torn)]
        yield (
            f"no node has room for a tensor-parallel group of {tensor}, so every layer of engine{_s(engines)} "
            f"{_ranges(engines)} crosses nodes; {VLLM_KEYS}.tensor_parallel_size={within} with "
            f"pipeline_parallel_size={size // within} crosses them once a stage"
        )


def _slow_trainer(recipe: Recipe, placement: Placement) -> Iterator[str]:
    """Say where the trainer's tensor parallelism crosses nodes: neighbouring ranks are a group."""
    selection = select_backend(recipe.policy)
    config, name = selection.config, "tensor_parallel_size"
    if isinstance(config, MegatronConfig):
        name = "tensor_model_parallel_size"
    size: int = getattr(config, name)
    nodes = [place.node for place in placement.ranks]
    torn = [first for first in range(0, len(nodes), size) if len(set(nodes[first : first + size])) > 1]
    if torn:
        counts = [len(placement.ranks_on(node)) for node in dict.fromkeys(nodes)]
        within = max(each for each in range(1, size + 1) if size % each == 0 and all(n % each == 0 for n in counts))
        yield (
            f"ranks {torn[0]}-{torn[0] + size - 1} are a tensor-parallel group of the trainer on several nodes, since "
            f"the nodes have {', '.join(map(str, counts))} ranks: every layer crosses nodes; "
            f"policy.{selection.backend}_cfg.{name}={within} would not"
        )


# ---- The nodes that there are.


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeResources:
    """What a run takes of a node, or what a node has."""

    name: str
    gpus: float
    cpus: float
    memory_bytes: float = 0.0
    """Host memory; 0 asks for none."""

    def lacks(self, needed: "NodeResources") -> list[str]:
        """What this node lacks for what is needed, in words; empty if nothing."""
        pairs = [("GPUs", self.gpus, needed.gpus), ("CPUs", self.cpus, needed.cpus)]
        pairs.append(("GiB of host memory", self.memory_bytes / GIB, needed.memory_bytes / GIB))
        return [f"{wanted - has:.4g} {kind} short of {wanted:.4g}" for kind, has, wanted in pairs if wanted > has]

    def __str__(self) -> str:
        """As messages name it."""
        return f"{self.name} ({self.gpus:g} GPUs, {self.cpus:g} CPUs)"


def needs_of_nodes(
    placement: Placement, *, cpus_per_rank: int, memory_bytes: Sequence[float] | None = None
) -> list[NodeResources]:
    """What each node of a placement must have; `memory_bytes` of each node, where it is known."""
    return [
        NodeResources(
            name=f"node {node}",
            gpus=size if placement.device == "cuda" else 0,
            cpus=size * cpus_per_rank,
            memory_bytes=0 if memory_bytes is None else memory_bytes[node],
        )
        for node, size in enumerate(placement.num_slots)
    ]


def match_nodes(needs: Sequence[NodeResources], there: Sequence[NodeResources]) -> Mapping[int, int]:
    """Find a node of its own for each node of a placement.

    Returns:
        Index in `needs` to index in `there`.

    Raises:
        PlacementError: there are none; names one that is left without, and what the nearest node lacks for it.
    """
    taken: dict[int, int] = {}  # index in `there` to index in `needs`

    def take(wanted: int, tried: set[int]) -> bool:
        """Whether `wanted` gets a node, which another one may give up for one that it can have as well."""
        for index, node in enumerate(there):
            if index not in tried and not node.lacks(needs[wanted]):
                tried.add(index)
                if index not in taken or take(taken[index], tried):
                    taken[index] = wanted
                    return True
        return False

    largest_first = sorted(range(len(needs)), key=lambda each: (-needs[each].gpus, -needs[each].cpus, each))
    for wanted in largest_first:
        if take(wanted, set()):
            continue
        left = [node for index, node in enumerate(there) if index not in taken]
        if not left:
            raise PlacementError(
                f"the run needs {_counted(needs, 'node')}, and the cluster has {len(there)}: none is left for "
                f"{needs[wanted].name} with {needs[wanted].gpus:g} GPUs and {needs[wanted].cpus:g} CPUs"
            )
        nearest = min(left, key=lambda node: (len(node.lacks(needs[wanted])), -node.gpus, -node.cpus))
        raise PlacementError(
            f"{needs[wanted].name} of the run has no node in the cluster: the nearest that is left, {nearest}, is "
            f"{' and '.join(nearest.lacks(needs[wanted]))}"
        )
    return {wanted: index for index, wanted in taken.items()}


# ---- The trainer's mesh.


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
        given = f"cluster.num_nodes={cluster.num_nodes} x cluster.gpus_per_node={cluster.gpus_per_node}"
        if not isinstance(cluster.gpus_per_node, int):
            given = f"cluster.gpus_per_node={[*cluster.gpus_per_node]}"
        ranks = (
            "cluster.runtime=in_process trains on 1 rank"
            if in_process
            else f"{given}{'' if recipe.policy.generation.colocated.enabled else taken}, gives "
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


# ---- Words.


def _counted(things: Sequence[object], name: str) -> str:
    return f"{len(things)} {name if len(things) == 1 else f'{name}s'}"


def _s(things: Sequence[object]) -> str:
    return "" if len(things) == 1 else "s"


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers in words: `0-3, 6`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
