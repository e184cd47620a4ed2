"""Parallel styles of the modules inside a block, where every rank computes on plain tensors with its own part.

None of them communicates, but for `BlockNorm` and `BlockGatheredColwise`, which need what other ranks hold: the borders
of the block do it for all (`blocks`). Weights are those of nn.Linear, [out, in], unless a style says otherwise.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from rl_parallel_plans.checkpoints import RowsRead, halves_in_order, segments_in_order, segments_read
from rl_parallel_plans.dtensor import is_dtensor
from rl_parallel_plans.styles.local_parameters import REPLICATED_PARTIAL, LocalParameters, ParameterRule
from rl_parallel_plans.styles.sharded_forward import wrap_forward

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def own_names(module: nn.Module) -> list[str]:
    """Names of the module's own parameters."""
    return [name for name, _ in module.named_parameters(recurse=False)]


class BlockColwise(LocalParameters):
    """A linear layer whose output features are shared out, `units` indivisible ones (heads, say) over the ranks.

    Also fits whatever else has one row of each parameter per output feature: a norm with a weight for each head.
    """

    def __init__(self, *, units: int, what: str = "output features") -> None:
        super().__init__()
        self.units, self.what = units, what

    def rules(self, module: nn.Module) -> Mapping[str, ParameterRule]:
        """Rows: weight and bias on dim 0."""
        return {name: ParameterRule(placement=Shard(0)) for name in own_names(module)}

    def problems(self, module: nn.Module, tp: int) -> list[str]:
        """Units that tp does not divide."""
        if self.units % tp == 0:
            return []
        rows = next(iter(module.parameters())).shape[0]
        size = f"{rows} rows, {rows // max(self.units, 1)} each"
        return [f"has {self.units} {self.what} ({size}), which tp={tp} does not divide: choose one that does"]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.units} {self.what})"


class BlockRowwise(LocalParameters):
    """A linear layer whose input features are shared out: its output is one term of a sum; rank 0 adds the bias."""

    def rules(self, module: nn.Module) -> Mapping[str, ParameterRule]:
        """Columns of the weight; the bias whole."""
        bias = ParameterRule(placement=Replicate(), first_rank_only=True)
        return {name: bias if name == "bias" else ParameterRule(placement=Shard(1)) for name in own_names(module)}

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class BlockReplicated(LocalParameters):
    """A module that every rank runs whole on the way to its own heads or features: a router, the norm over a head."""

    def rules(self, module: nn.Module) -> Mapping[str, ParameterRule]:
        """Everything whole, its gradient a sum."""
        return dict.fromkeys(own_names(module), REPLICATED_PARTIAL)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class BlockPackedColwise(BlockColwise):
    """A fused linear layer, [q | k | v] or [gate | up], each segment shared out.

    sizes: rows of each segment. units: indivisible units of each.
    A rank's rows are q_r k_r v_r, its part of each segment; state dicts and exports have the unsharded order.
    """

    def __init__(self, sizes: Sequence[int], *, units: Sequence[int], what: str = "output features") -> None:
        super().__init__(units=min(units), what=what)
        self.sizes, self.all_units = tuple(sizes), tuple(units)

    def rules(self, module: nn.Module) -> Mapping[str, ParameterRule]:
        """Rows, in the order of the ranks; a bias, being small, whole."""
        rule = ParameterRule(placement=Shard(0), row_order=segments_in_order(self.sizes))
        bias = ParameterRule(placement=Replicate(), reads=segments_read(self.sizes))
        return {name: rule if p.ndim > 1 else bias for name, p in module.named_parameters(recurse=False)}

    def problems(self, module: nn.Module, tp: int) -> list[str]:
        """Segments that tp does not divide."""
        if sum(self.sizes) != (rows := next(iter(module.parameters())).shape[0]):
            return [f"has {rows} rows and its segments {list(self.sizes)} are {sum(self.sizes)}: its layout is unknown"]
        bad = [units for units in self.all_units if units % tp]
        return [
            f"has {units} {self.what} in a segment, which tp={tp} does not divide: choose one that does"
            for units in bad[:1]
        ]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.sizes)} of {list(self.all_units)} {self.what})"


class BlockReplicatedHeads(LocalParameters):
    """A linear layer of fewer heads than there are ranks: whole on each, which computes one head with its rows.

    Rank r has head r * heads // tp, as the query heads of r need it. Each rank's gradient is a term of the sum, which
    is zero in the other heads' rows. Also fits whatever else has its rows by heads: a norm with a weight for each head.
    """

    def __init__(self, *, heads: int, what: str = "key/value heads") -> None:
        super().__init__()
        self.heads, self.what = heads, what

    def rules(self, module: nn.Module) -> Mapping[str, ParameterRule]:
        """Every parameter whole, and of its rows those of one head read."""
        return {
            name: ParameterRule(placement=Replicate(), reads=self._reads(p.shape[0] // self.heads))
            for name, p in module.named_parameters(recurse=False)
        }

    def _reads(self, size: int) -> RowsRead:
        def read(tp: int, rank: int) -> list[slice]:
            first = rank * self.heads // tp * size
            return [slice(first, first + size)]

        return read

    def problems(self, module: nn.Module, tp: int) -> list[str]:
        """Heads of which tp is no multiple."""
        del module
        if tp % self.heads == 0:
            return []
        return [f"has {self.heads} {self.what}, of which tp={tp} is no multiple: choose one that is"]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.heads} {self.what})"


class BlockExperts(LocalParameters):
    """Stacked experts, [experts, ...] in each parameter, their intermediate features shared out.

    transposed: weights are [experts, in, out] (GPT-OSS, Llama 4) and not [experts, out, in].
    interleaved: gate and up alternate along the fused dim (GPT-OSS) instead of following one another.
    intermediate_size: features of one expert between its two layers.
    """

    def __init__(self, *, intermediate_size: int, transposed: bool = False, interleaved: bool = False) -> None:
        super().__init__()
        self.intermediate_size, self.transposed, self.interleaved = intermediate_size, transposed, interleaved

    def rules(self, module: nn.Module) -> Mapping[str, ParameterRule]:
        """By name: gate_up and up over their output features, down over its input features."""
        return {name: self._rule(name, parameter.ndim) for name, parameter in module.named_parameters(recurse=False)}

    def _rule(self, name: str, ndim: int) -> ParameterRule:
        bias = name.endswith("bias")
        if name.startswith("down"):
            if bias:
                return ParameterRule(placement=Replicate(), first_rank_only=True)
            return ParameterRule(placement=Shard(ndim - 2 if self.transposed else ndim - 1))
        dim = ndim - 1 if self.transposed or bias else ndim - 2
        if name.startswith("gate_up") and not self.interleaved:
            return ParameterRule(placement=Shard(dim), row_order=halves_in_order)
        return ParameterRule(placement=Shard(dim))

    def problems(self, module: nn.Module, tp: int) -> list[str]:
        """Intermediate features that tp does not divide."""
        del module
        if self.intermediate_size % tp == 0:
            return []
        size = self.intermediate_size
        return [f"has {size} intermediate features an expert, which tp={tp} does not divide: choose one that does"]

    def __repr__(self) -> str:
        layout = [f"{name}=True" for name in ("transposed", "interleaved") if getattr(self, name)]
        return f"{type(self).__name__}({', '.join([f'intermediate_size={self.intermediate_size}', *layout])})"


class BlockNorm(LocalParameters):
    """A norm over features that are themselves shared out (OLMo 2's q_norm over all heads at once).

    Each rank has its features of the weight and of the input. The mean costs an all-reduce of [B, S, 1] forward, and
    backward, where DTensor sums before it cuts, a reduce-scatter of the features.
    """

    def collectives(self) -> tuple[dict[str, int], dict[str, int]]:
        """How often each collective runs, forward and backward."""
        return {"all_reduce": 1}, {"reduce_scatter": 1}

    def rules(self, module: nn.Module) -> Mapping[str, ParameterRule]:
        """The features of this rank."""
        return {name: ParameterRule(placement=Shard(0)) for name in own_names(module)}

    def problems(self, module: nn.Module, tp: int) -> list[str]:
        """Features that tp does not divide."""
        size = next(iter(module.parameters())).shape[0]
        return [] if size % tp == 0 else [f"spans {size} features, which tp={tp} does not divide: choose one that does"]

    def _apply(self, module: nn.Module, device_mesh: "DeviceMesh") -> nn.Module:
        for name, rule in self.rules(module).items():
            old = module.get_parameter(name)
            new = distribute_tensor(old.detach(), device_mesh, [rule.placement], src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(new, requires_grad=old.requires_grad))
        wrap_forward(module, partial(_over_all_features, mesh=device_mesh))
        return module

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class BlockGatheredColwise(BlockColwise):
    """An output projection by columns: gathers its input features and makes a slice of the output's.

    No sum is cut over ranks, so that its rounding is that of one rank, at the price of more communication.
    """

    def _apply(self, module: nn.Module, device_mesh: "DeviceMesh") -> nn.Module:
        super()._apply(module, device_mesh)
        wrap_forward(module, partial(_gather_features, mesh=device_mesh))
        return module


def _over_all_features(
    _module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, mesh: "DeviceMesh"
) -> Any:
    def features(value: Any) -> Any:
        if not isinstance(value, Tensor) or is_dtensor(value):
            return value
        return DTensor.from_local(value, mesh, [Shard(value.ndim - 1)], run_check=False)

    output = call(*map(features, args), **{name: features(value) for name, value in kwargs.items()})
    # A tensor of its own: models change it in place (OLMoE's clip_qkv), which a view of a DTensor must not be.
    return output.to_local().clone() if is_dtensor(output) else output


def _gather_features(
    _module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, mesh: "DeviceMesh"
) -> Any:
    hidden, *others = args
    features = DTensor.from_local(hidden, mesh, [Shard(hidden.ndim - 1)], run_check=False)
    return call(
        features.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()]), *others, **kwargs
    )
