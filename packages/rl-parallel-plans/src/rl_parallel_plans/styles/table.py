"""The table of a style: a row for each parameter, which is a DTensor and, inside its module's forward, a plain tensor.

A row (`ParameterRule`) says how the parameter is sharded, what this rank's gradient is a piece of, and what of it the
rank computes with. `LocalParameters`, the base of all styles of this package, carries a table out: a wrapper around the
forward puts the local tensor in place of the DTensor, and autograd wraps its gradient back. Nothing inside the module
dispatches through DTensor, so any code runs there, custom kernels included.

A parameter that every rank holds whole while each computes with its own share of the heads has a Partial gradient: this
rank's is one term of the sum. `partial_gradients` completes it at the end of each backward; under FSDP2, FSDP does.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from rl_parallel_plans.checkpoints import RowOrder, RowsOfRanks, RowsRead, set_row_order
from rl_parallel_plans.dtensor import is_dtensor
from rl_parallel_plans.styles.forward import Call, Communication, Counts, gathered, wrap_forward
from rl_parallel_plans.styles.fused_weights import keep_state_dicts_unsharded
from rl_parallel_plans.styles.partial_gradients import sum_gradient_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Adjacent rows that a rank holds."""

    size: int
    """How many."""
    needed: slice | None = None
    """None where a rank computes with its own; else what it needs of each part, once gathered over the ranks."""
    parts: int = 1
    """Equal parts that the run consists of; each is cut over the ranks by itself."""


RunsOfRank = Callable[[int, int], Sequence[Run]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRule:
    """How one parameter lies on the tp mesh."""

    placement: Placement
    """`Shard(d)` or `Replicate()`."""
    partial_gradient: bool = False
    """Whether a whole parameter's gradient on this rank is one term of a sum over ranks."""
    first_rank_only: bool = False
    """Whether only the first rank computes with it: a bias that is added before outputs are summed over ranks."""
    row_order: RowsOfRanks | None = None
    """Of a fused weight that is sharded over the dim of `placement`: which of its rows each rank holds; see
    `rl_parallel_plans.row_order`. None keeps their order."""
    reads: RowsRead | None = None
    """The rows of a replicated parameter that a rank computes with; None for all. Its gradient is one term of a sum."""
    runs: RunsOfRank | None = None
    """(tp, rank) to the runs of a rank's rows, of which some are gathered for the forward. None gathers nothing."""

    @property
    def registered(self) -> Placement:
        """The placement of the parameter in the shape in which it is registered."""
        if self.row_order is None:
            return self.placement
        assert isinstance(self.placement, Shard)
        return Shard(max(self.placement.dim, 1))  # RowOrder.ranks_dim

    @property
    def gradient(self) -> Placement:
        """What this rank's gradient is a piece of."""
        is_term = self.partial_gradient or self.first_rank_only or self.reads is not None
        return Partial() if is_term else self.registered


REPLICATED = ParameterRule(placement=Replicate())
REPLICATED_PARTIAL = ParameterRule(placement=Replicate(), partial_gradient=True)
FIRST_RANK_ONLY = ParameterRule(placement=Replicate(), first_rank_only=True)
ROWS, COLUMNS = ParameterRule(placement=Shard(0)), ParameterRule(placement=Shard(1))
"""Of a weight [out, in]."""
EVERY = "*"


def every(rule: ParameterRule, **others: ParameterRule) -> Mapping[str, ParameterRule]:
    """A table of one row for every parameter, but for those that have another."""
    return MappingProxyType({EVERY: rule, **others})


class LocalParameters(ParallelStyle):
    """Base of the styles whose module computes on plain tensors with its own part of each parameter.

    A style is its table and what its module communicates around its forward; what depends on the module is in methods.
    Each subclass is a dataclass of what determines these.
    """

    table: Mapping[str, ParameterRule] = MappingProxyType({})
    """By name, the row of each of the module's own parameters; EVERY stands for all that are not named."""
    around: tuple[Communication, ...] = ()
    """What the module communicates around its forward, the innermost first."""
    in_block = False
    """Whether it leaves communication to the borders of the block around it."""

    def rules(self, module: nn.Module) -> Mapping[str, ParameterRule]:
        """The row of each of the module's own parameters; of none where those are left alone."""
        if EVERY not in self.table:
            return self.table
        return {name: self.table.get(name, self.table[EVERY]) for name in own_names(module)}

    def communications(self) -> tuple[Communication, ...]:
        """What the module communicates around its forward, the innermost first."""
        return self.around

    def inside(self, module: nn.Module) -> Iterable[tuple[nn.Module, Mapping[str, ParameterRule]]]:
        """Modules inside this one, with their rules, whose parameters its own code reads."""
        return ()

    def attributes(self, module: nn.Module, tp: int) -> Mapping[str, int]:
        """Sizes that this rank's module must read."""
        return {}

    def problems(self, module: nn.Module, tp: int) -> list[str]:
        """Why this style does not fit this module at this tp: each a sentence that goes on after the module's name."""
        return []

    def parameter_placements(self, module: nn.Module) -> dict[str, Placement]:
        """The placement of each of the module's own parameters."""
        return {name: rule.placement for name, rule in self.rules(module).items()}

    def collectives(self) -> tuple[Counts, Counts]:
        """How often each collective runs, forward and backward."""
        told = self.communications()
        return _total(each.forward for each in told), _total(each.backward for each in told)

    def communicate(self, module: nn.Module, mesh: "DeviceMesh") -> None:
        """Let the module communicate."""
        for each in self.communications():
            each.wrap(module, mesh)

    def _apply(self, module: nn.Module, device_mesh: "DeviceMesh") -> nn.Module:
        place_parameters(module, device_mesh, self.rules(module), src_data_rank=self.src_data_rank)
        compute_locally(module, [(child, local_views(device_mesh, rules)) for child, rules in self.inside(module)])
        for name, value in self.attributes(module, device_mesh.size()).items():
            setattr(module, name, value)
        self.communicate(module, device_mesh)
        return module

    def __repr__(self) -> str:
        """What differs reads differently: styles of a place in each layer that read alike become one."""
        options = [(each, getattr(self, each.name)) for each in fields(self) if each.repr]  # type: ignore[arg-type]
        told = [f"{each.name}={_readable(value)!r}" for each, value in options if value and value != each.default]
        return f"{type(self).__name__}({', '.join(told)})"


def _total(counts: Iterable[Counts]) -> Counts:
    return dict(sum(map(Counter, counts), Counter()))


def _readable(value: object) -> object:
    if isinstance(value, ParameterRule):
        return value.placement
    if isinstance(value, Mapping):
        return {name: _readable(each) for name, each in value.items()}
    if isinstance(value, tuple):
        return [_readable(each) for each in value]
    return getattr(value, "__qualname__", value)  # of a function, whose repr has an address


def own_names(module: nn.Module) -> list[str]:
    """Names of the module's own parameters."""
    return [name for name, _ in module.named_parameters(recurse=False)]


def uneven(module: nn.Module, rules: Mapping[str, ParameterRule], tp: int) -> list[str]:
    """A sentence for each parameter whose features tp does not divide."""
    found = []
    for name, rule in rules.items():
        dim = getattr(rule.placement, "dim", None)
        if dim is None:
            continue
        size = module.get_parameter(name).shape[dim]
        matrices = 1 if rule.row_order is None else 2  # packed are gate and up
        if size % (tp * matrices):
            what = f"tp={tp}" if matrices == 1 else f"tp={tp} times {matrices} packed matrices"
            found.append(f"has {name} with {size} features, which {what} does not divide: choose a tp that does")
    return found


def place_parameters(
    module: nn.Module,
    mesh: "DeviceMesh",
    rules: Mapping[str, ParameterRule],
    *,
    src_data_rank: int | None,
    leading: tuple[Placement, ...] = (),
) -> None:
    """Make the module's own parameters DTensors by `rules`, and local tensors inside its forward.

    The rules speak of the last axis of `mesh`; `leading` are the placements on those before it.
    """
    if not rules:
        return
    for name, rule in rules.items():
        old = module.get_parameter(name)
        data = old.detach()
        if rule.row_order is not None:
            dim, tp = rule.placement.dim, mesh.size(-1)  # type: ignore[attr-defined]
            order = RowOrder(dim=dim, rows=rule.row_order(tp, data.shape[dim]).view(tp, -1))
            data = order.dealt(data)
            set_row_order(module, name, order)
            keep_state_dicts_unsharded(module)
        # A piece of its own memory: a whole copy of `data` must not stay alive behind it.
        new = nn.Parameter(distribute_tensor(data, mesh, [*leading, rule.registered], src_data_rank=src_data_rank))
        new.requires_grad_(old.requires_grad)
        module.register_parameter(name, new)
        if rule.gradient.is_partial():  # of a frozen one too: it may thaw
            sum_gradient_of(module, name)
    compute_locally(module, [(None, local_views(mesh, rules, leading))])


@dataclass(frozen=True, kw_only=True)
class LocalView:
    """A parameter as one rank computes with it: constants only, which torch.compile need not look into."""

    name: str
    axes: int
    """Axes of the parameter's mesh. FSDP's own come on top: what has more is not gathered."""
    gradient: tuple[Placement, ...]
    """What the local gradient is a piece of."""
    ranks_dim: int | None = None
    """Dim of size 1 that a fused weight is registered with."""
    reads: tuple[slice, ...] | None = None
    """Rows of a whole parameter that this rank computes with."""
    is_zero: bool = False
    """Whether another rank alone computes with it."""
    runs: tuple[Run, ...] | None = None
    """Rows of which some are gathered."""

    def of(self, parameter: DTensor) -> Tensor:
        """This rank's part, whose gradient autograd places as the rule says."""
        local = parameter.to_local(grad_placements=list(self.gradient))
        if self.ranks_dim is not None:
            local = local.squeeze(self.ranks_dim)
        if self.reads is not None:
            rows = [local[each] for each in self.reads]
            local = rows[0] if len(rows) == 1 else torch.cat(rows)
        if self.is_zero:
            return torch.zeros_like(local) * local  # a gradient of zero, and not none: every rank takes part in the sum
        if self.runs is not None:
            pieces = zip(torch.split(local, [run.size for run in self.runs]), self.runs, strict=True)
            return torch.cat([_needed(piece, run, parameter.device_mesh) for piece, run in pieces])
        return local


def local_views(
    mesh: "DeviceMesh", rules: Mapping[str, ParameterRule], leading: tuple[Placement, ...] = ()
) -> tuple[LocalView, ...]:
    """What this rank computes with, of parameters that lie on `mesh` by `rules`."""
    tp, rank = mesh.size(-1), mesh.get_local_rank(-1)
    return tuple(
        LocalView(
            name=name,
            axes=len(leading) + 1,
            gradient=(*leading, rule.gradient),
            ranks_dim=None if rule.row_order is None else rule.registered.dim,  # type: ignore[attr-defined]
            reads=None if rule.reads is None else tuple(rule.reads(tp, rank)),
            is_zero=rule.first_rank_only and rank > 0,
            runs=None if rule.runs is None else tuple(rule.runs(tp, rank)),
        )
        for name, rule in rules.items()
    )


Parts = Sequence[tuple[nn.Module | None, tuple[LocalView, ...]]]
"""Modules with their parameters; None for the module that runs, which would otherwise refer to itself."""


def compute_locally(module: nn.Module, parts: Parts) -> None:
    """Put local tensors in place of the parameters of `parts` while `module` runs, whether it calls them or not."""
    if parts := [(part, views) for part, views in parts if views]:
        wrap_forward(module, partial(_with_local_tensors, parts=parts))


def _with_local_tensors(module: nn.Module, call: Call, /, *args: Any, parts: Parts, **kwargs: Any) -> Any:
    hidden: list[tuple[nn.Module, str]] = []
    try:
        for other, views in parts:
            part = module if other is None else other
            for view in views:
                # An entry of the instance's __dict__ hides the parameter of the same name, which stays registered.
                if view.name in part.__dict__:
                    continue
                parameter = getattr(part, view.name)
                if is_dtensor(parameter) and parameter.device_mesh.ndim == view.axes:
                    part.__dict__[view.name] = view.of(parameter)
                    hidden.append((part, view.name))
        return call(*args, **kwargs)
    finally:
        for part, name in hidden:
            del part.__dict__[name]


def _needed(piece: Tensor, run: Run, mesh: "DeviceMesh") -> Tensor:
    """What a rank needs of rows that are cut over all; the gradient of each row goes back to who holds it."""
    if run.needed is None:
        return piece
    placed = DTensor.from_local(piece, mesh, [Shard(0)], run_check=False)
    whole = gathered(placed, summed=True)
    cut = whole.view(mesh.size(), run.parts, -1, *whole.shape[1:])
    parts: Tensor = cut.transpose(0, 1).flatten(1, 2)[:, run.needed]
    return parts.flatten(0, 1)
