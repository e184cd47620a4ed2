"""Styles of single modules: linear layers, norms, experts and embeddings, each a table of its parameters.

Inside a block none of them communicates, unless its computation needs what other ranks hold: the borders of the block
do it for all (`block`). Weights are those of nn.Linear, [out, in], unless a style says otherwise.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from rl_parallel_plans.checkpoints import halves_in_order, segments_in_order
from rl_parallel_plans.dtensor import has_numbers, is_dtensor
from rl_parallel_plans.logp.chunks import VocabularySlice
from rl_parallel_plans.styles.forward import (
    GATHER_FEATURES,
    OVER_ALL_FEATURES,
    SHARE_OUTPUT,
    SUM_INPUT_GRADIENTS,
    Call,
    Communication,
    Counts,
    sum_over_ranks,
    wrap_forward,
)
from rl_parallel_plans.styles.table import (
    COLUMNS,
    FIRST_RANK_ONLY,
    REPLICATED,
    REPLICATED_PARTIAL,
    ROWS,
    LocalParameters,
    ParameterRule,
    Run,
    every,
    own_names,
    uneven,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(eq=False, repr=False)
class Colwise(LocalParameters):
    """A linear layer whose output features are shared out.

    units: indivisible ones of them (heads, say), and `what` they are; None for single features.

    Also fits whatever else has one row of each parameter per output feature: a norm with a weight for each head, or
    over each group of features, of which it may keep a count in `n_groups`.
    """

    units: int | None = None
    what: str = "output features"
    table = every(ROWS)
    in_block = True

    def attributes(self, module: nn.Module, tp: int) -> Mapping[str, int]:
        """A norm's groups."""
        groups = getattr(module, "n_groups", None)
        return {"n_groups": groups // tp} if isinstance(groups, int) else {}

    def problems(self, module: nn.Module, tp: int) -> list[str]:
        """Units that tp does not divide."""
        if self.units is None:
            return uneven(module, self.rules(module), tp)
        if self.units % tp == 0:
            return []
        rows = next(iter(module.parameters())).shape[0]
        size = f"{rows} rows, {rows // max(self.units, 1)} each"
        return [f"has {self.units} {self.what} ({size}), which tp={tp} does not divide: choose one that does"]


@dataclass(eq=False, repr=False)
class GatheredColwise(Colwise):
    """An output projection by columns: gathers its input features and makes a slice of the output's.

    No sum is cut over ranks, so that its rounding is that of one rank, at the price of more communication.
    """

    around = (GATHER_FEATURES,)


@dataclass(eq=False, repr=False)
class Rowwise(LocalParameters):
    """A linear layer whose input features are shared out: its output is one term of a sum; rank 0 adds the bias."""

    table = every(COLUMNS, bias=FIRST_RANK_ONLY)
    in_block = True


@dataclass(eq=False, repr=False)
class PackedColwise(LocalParameters):
    """A fused linear layer, [q | k | v] or [gate | up], each segment shared out; or a depthwise convolution after it.

    sizes: rows of each segment; empty for two halves.
    units: indivisible units of each segment, and `what` they are.
    shared: numbers of the segments with fewer units than ranks, a divisor of them: several ranks read each unit. Its
        rows are dealt over all ranks, and gathered for the forward: a few rows beside many.
    sum_input_gradients: outside of blocks, whether the gradient of what enters is summed.

    A rank's rows are q_r k_r v_r, its part of each segment; state dicts and exports have the unsharded order.
    """

    sizes: tuple[int, ...] = ()
    units: tuple[int, ...] = ()
    what: str | tuple[str, ...] = "output features"
    shared: tuple[int, ...] = ()
    sum_input_gradients: bool = False

    @property
    def in_block(self) -> bool:  # type: ignore[override]
        """Unless it sums gradients itself."""
        return not self.sum_input_gradients

    def rules(self, module: nn.Module) -> Mapping[str, ParameterRule]:
        """Rows, in the order of the ranks; a bias, being small, whole."""
        order = segments_in_order(self.sizes) if self.sizes else halves_in_order
        weight = ParameterRule(placement=Shard(0), row_order=order, runs=self.runs if self.shared else None)

        def bias(rows: int) -> ParameterRule:
            return ParameterRule(placement=Replicate(), reads=partial(self.reads, sizes=(rows // 2,) * 2))

        return {name: weight if p.ndim > 1 else bias(len(p)) for name, p in module.named_parameters(recurse=False)}

    def reads(self, tp: int, rank: int, *, sizes: Sequence[int] = ()) -> list[slice]:
        """The rows that a rank computes with, as they stand in the whole; sizes: of the segments, where unknown."""
        found, start = [], 0
        for number, size in enumerate(self.sizes or sizes):
            own = self._unit(number, tp, rank) if number in self.shared else _share(size, tp, rank)
            found.append(slice(start + own.start, start + own.stop))
            start += size
        return found

    def runs(self, tp: int, rank: int) -> list[Run]:
        """A rank's rows; adjacent segments that are gathered are gathered together."""
        runs: list[Run] = []
        for number, size in enumerate(self.sizes):
            needed = self._unit(number, tp, rank) if number in self.shared else None
            if needed is not None and runs and runs[-1].needed == needed:
                runs[-1] = Run(size=runs[-1].size + size // tp, needed=needed, parts=runs[-1].parts + 1)
            else:
                runs.append(Run(size=size // tp, needed=needed))
        return runs

    def _unit(self, number: int, tp: int, rank: int) -> slice:
        """Rows of a shared segment's unit that a rank reads."""
        size = self.sizes[number] // self.units[number]
        first = rank * self.units[number] // tp * size
        return slice(first, first + size)

    def attributes(self, module: nn.Module, tp: int) -> Mapping[str, int]:
        """A convolution's channels."""
        channels = sum(rows.stop - rows.start for rows in self.reads(tp, 0))
        names = ("groups", "in_channels", "out_channels") if isinstance(module, nn.Conv1d) else ()
        return dict.fromkeys(names, channels)

    def problems(self, module: nn.Module, tp: int) -> list[str]:
        """Segments that tp does not divide."""
        if not self.sizes:
            return uneven(module, self.rules(module), tp)
        if sum(self.sizes) != (rows := next(iter(module.parameters())).shape[0]):
            return [f"has {rows} rows and its segments {list(self.sizes)} are {sum(self.sizes)}: its layout is unknown"]
        whats = [self.what] * len(self.sizes) if isinstance(self.what, str) else self.what
        for number, (size, units, what) in enumerate(zip(self.sizes, self.units, whats, strict=True)):
            if number not in self.shared and units % tp:
                where = " in a segment" if isinstance(self.what, str) else ""
                return [f"has {units} {what}{where}, which tp={tp} does not divide: choose one that does"]
            if number in self.shared and (tp % units or size % tp):
                return [f"has {size} rows of {units} {what}, which tp={tp} does not divide: choose one that does"]
        return []

    def communications(self) -> tuple[Communication, ...]:
        """What enters, outside of blocks."""
        return (SUM_INPUT_GRADIENTS,) if self.sum_input_gradients else ()

    def collectives(self) -> tuple[Counts, Counts]:
        """The rows that are gathered, too: those of the weight."""
        if not self.shared:
            return super().collectives()
        return {"all_gather": 1}, {"reduce_scatter": 1}


@dataclass(eq=False, repr=False)
class ReplicatedHeads(LocalParameters):
    """A linear layer of fewer heads than there are ranks: whole on each, which computes one head with its rows.

    Rank r has head r * heads // tp, as the query heads of r need it. Each rank's gradient is a term of the sum, which
    is zero in the other heads' rows. Also fits whatever else has its rows by heads: a norm with a weight for each head.
    """

    heads: int
    what: str = "key/value heads"
    in_block = True

    def rules(self, module: nn.Module) -> Mapping[str, ParameterRule]:
        """Every parameter whole, and of its rows those of one head read."""

        def reads(tp: int, rank: int, *, size: int) -> list[slice]:
            first = rank * self.heads // tp * size
            return [slice(first, first + size)]

        return {
            name: ParameterRule(placement=Replicate(), reads=partial(reads, size=p.shape[0] // self.heads))
            for name, p in module.named_parameters(recurse=False)
        }

    def problems(self, module: nn.Module, tp: int) -> list[str]:
        """Heads of which tp is no multiple."""
        if tp % self.heads == 0:
            return []
        return [f"has {self.heads} {self.what}, of which tp={tp} is no multiple: choose one that is"]


@dataclass(eq=False, repr=False, kw_only=True)
class ReplicatedParallel(LocalParameters):
    """Keep a module's own parameters whole on every rank; inside it, everything is a plain tensor.

    partial_gradient: this rank's gradient is one term of the sum over ranks, and is completed at the end of each
        backward, once, whatever is accumulated. Otherwise every rank is known to hold the whole gradient already.
        A norm over each head (Qwen3's `q_norm`) sees only its rank's heads: without the sum the copies drift apart.
    reads_inside: the module reads the parameters of all modules inside it by itself.
    """

    partial_gradient: bool = False
    reads_inside: bool = False

    def rules(self, module: nn.Module) -> Mapping[str, ParameterRule]:
        """Everything whole."""
        return dict.fromkeys(own_names(module), REPLICATED_PARTIAL if self.partial_gradient else REPLICATED)

    def inside(self, module: nn.Module) -> Iterable[tuple[nn.Module, Mapping[str, ParameterRule]]]:
        """All of them, or none."""
        return [(each, self.rules(each)) for each in module.modules() if each is not module and self.reads_inside]


@dataclass(eq=False, repr=False)
class OwnRules(LocalParameters):
    """A module inside a block whose own parameters each have a rule, and its sizes those of this rank."""

    table: Mapping[str, ParameterRule] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    in_block = True

    def attributes(self, module: nn.Module, tp: int) -> Mapping[str, int]:
        """Those that were given."""
        return self.sizes


@dataclass(eq=False, repr=False)
class Experts(LocalParameters):
    """Stacked experts, [experts, ...] in each parameter, their intermediate features shared out.

    intermediate_size: features of one expert between its two layers.
    transposed: weights are [experts, in, out] (GPT-OSS, Llama 4) and not [experts, out, in].
    interleaved: gate and up alternate along the fused dim (GPT-OSS) instead of following one another.
    """

    intermediate_size: int
    transposed: bool = False
    interleaved: bool = False
    in_block = True

    def rules(self, module: nn.Module) -> Mapping[str, ParameterRule]:
        """By name: gate_up and up over their output features, down over its input features."""
        return {name: self._rule(name, parameter.ndim) for name, parameter in module.named_parameters(recurse=False)}

    def _rule(self, name: str, ndim: int) -> ParameterRule:
        bias = name.endswith("bias")
        if name.startswith("down"):
            return FIRST_RANK_ONLY if bias else ParameterRule(placement=Shard(ndim - (2 if self.transposed else 1)))
        dim = ndim - 1 if self.transposed or bias else ndim - 2
        follow = name.startswith("gate_up") and not self.interleaved
        return ParameterRule(placement=Shard(dim), row_order=halves_in_order if follow else None)

    def problems(self, module: nn.Module, tp: int) -> list[str]:
        """Intermediate features that tp does not divide."""
        if self.intermediate_size % tp == 0:
            return []
        size = self.intermediate_size
        return [f"has {size} intermediate features an expert, which tp={tp} does not divide: choose one that does"]


@dataclass(eq=False, repr=False)
class SharedIdentity(LocalParameters):
    """A module that hands its input on, in a block whose outputs are summed over ranks: each an equal share of it."""

    around = (SHARE_OUTPUT,)
    in_block = True


@dataclass(eq=False, repr=False)
class Norm(LocalParameters):
    """A norm over features that are themselves shared out (OLMo 2's q_norm over all heads at once).

    Each rank has its features of the weight and of the input (and of a gate, in Mamba 2). The mean costs an all-reduce
    of [B, S, 1] forward, and backward, where DTensor sums before it cuts, a reduce-scatter of the features.
    """

    table = every(ROWS)
    around = (OVER_ALL_FEATURES,)
    in_block = True

    def problems(self, module: nn.Module, tp: int) -> list[str]:
        """Features that tp does not divide."""
        size = next(iter(module.parameters())).shape[0]
        return [] if size % tp == 0 else [f"spans {size} features, which tp={tp} does not divide: choose one that does"]

    def _apply(self, module: nn.Module, device_mesh: "DeviceMesh") -> nn.Module:
        for name, rule in self.rules(module).items():  # DTensors inside its forward too
            old = module.get_parameter(name)
            new = distribute_tensor(old.detach(), device_mesh, [rule.placement], src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(new, requires_grad=old.requires_grad))
        self.communicate(module, device_mesh)
        return module


@dataclass(eq=False, repr=False)
class VocabularyParallelEmbedding(LocalParameters):
    """An nn.Embedding with its rows shared out, any number of words: each rank looks up its own, and the sum has all.

    torch's row-wise embedding (2.13) makes the gradient of all words on every rank; here it is cut as the weight is. A
    padding word is one on the rank that holds it and on no other.
    """

    table = MappingProxyType({"weight": ROWS})

    def collectives(self) -> tuple[Counts, Counts]:
        """The sum."""
        return {"all_reduce": 1}, {}

    def communicate(self, module: nn.Module, mesh: "DeviceMesh") -> None:
        """Look up the words of this rank."""
        weight = module.get_parameter("weight")
        assert is_dtensor(weight)
        total, local = weight.shape[0], weight.to_local().shape[0]
        start = min(total, mesh.get_local_rank() * -(-total // mesh.size()))
        where = VocabularySlice(start=start, size=local, total=total, group=None)
        padding = getattr(module, "padding_idx", None)
        if padding is not None:
            module.padding_idx = padding - start if start <= padding < start + local else None  # type: ignore[assignment]
        wrap_forward(module, partial(_own_tokens, where=where, mesh=mesh))


def _own_tokens(
    _module: nn.Module, call: Call, /, *args: Any, where: VocabularySlice, mesh: "DeviceMesh", **kwargs: Any
) -> Tensor:
    tokens, *others = args
    inside = ((tokens >= 0) & (tokens < where.total)).all()
    if tokens.device.type == "cuda":
        torch._assert_async(inside)  # noqa: SLF001 - no public one; without waiting for the device
    elif has_numbers(tokens) and not inside:
        raise IndexError(f"token ids must lie in 0 to {where.total - 1}, as an embedding's must on one rank")
    index, mine = where.owned(tokens)
    output = call(index, *others, **kwargs)
    return sum_over_ranks(output * mine[..., None].to(output.dtype), mesh)


def _share(size: int, tp: int, rank: int) -> slice:
    return slice(rank * (size // tp), (rank + 1) * (size // tp))
