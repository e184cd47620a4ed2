"""The borders of a block: what enters an attention or an MLP, and what leaves it, on each rank of the tp axis.

A block is a SUM over ranks of functions that each rank computes by itself on plain tensors:

    block(x) = sum over r of f_r(x; this rank's heads, features or experts)

so its input is copied to every rank and its gradient summed (entrance), its output is summed and its gradient copied
(exit): the f and g of Megatron-LM (arXiv:1909.08053). With sequence parallelism (arXiv:2205.05198) the residual stream
outside is cut along the sequence, a DTensor Shard(1): the entrance gathers and the exit scatters.

                      forward          backward
    tp      entrance  nothing          all-reduce
            exit      all-reduce       nothing
    tp, sp  entrance  all-gather       reduce-scatter
            exit      reduce-scatter   all-gather

Hence the rule for everything whole inside a block (a router, the norm over a head, MLA's down-projections): this rank's
gradient is one term of a sum. Axes: [B, S, H] batch, sequence, hidden. Any S will do: DTensor cuts ceil(S / tp) each.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from rl_parallel_plans.dtensor import is_dtensor
from rl_parallel_plans.styles.local_heads import LocalHeads
from rl_parallel_plans.styles.local_parameters import LocalParameters, ParameterRule
from rl_parallel_plans.styles.sharded_forward import wrap_forward
from rl_parallel_plans.styles.sums import sum_over_ranks, with_summed_gradient

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Counts = dict[str, int]


class BlockParallel(LocalParameters):
    """Entrance and exit of a block.

    sequence_parallel: whether the residual stream outside is cut along the sequence.
    output: "sum" where each rank's output is one term of the block's; "features" where it is a slice of its last dim
        (column-wise output projections: no sum over ranks, hence the same rounding as on one rank).
    own: rules of parameters that the block's module itself holds, such as attention sinks.
    local_heads: attributes of the module that count heads and must count this rank's.
    """

    def __init__(
        self,
        *,
        sequence_parallel: bool = False,
        output: Literal["sum", "features"] = "sum",
        own: Mapping[str, ParameterRule] | None = None,
        local_heads: LocalHeads | None = None,
    ) -> None:
        super().__init__()
        self.sequence_parallel = sequence_parallel
        self.output = output
        self.own = dict(own or {})
        self.local_heads = local_heads

    def rules(self, module: nn.Module) -> Mapping[str, ParameterRule]:
        """Those of `own`."""
        del module
        return self.own

    def problems(self, module: nn.Module, tp: int) -> list[str]:
        """Heads that tp does not divide."""
        return [] if self.local_heads is None else self.local_heads.problems(module, tp)

    def collectives(self) -> tuple[Counts, Counts]:
        """How often each collective runs, forward and backward."""
        if self.output == "features":
            inside = {"all_gather": 1}, {"reduce_scatter": 1}  # of the heads, before the output projection
            if self.sequence_parallel:
                return {"all_gather": 2, "all_to_all": 1}, {"reduce_scatter": 2, "all_to_all": 1}
            return {"all_gather": inside[0]["all_gather"] + 1}, {"all_reduce": 1, **inside[1]}
        if self.sequence_parallel:
            return {"all_gather": 1, "reduce_scatter": 1}, {"all_gather": 1, "reduce_scatter": 1}
        return {"all_reduce": 1}, {"all_reduce": 1}

    def _apply(self, module: nn.Module, device_mesh: "DeviceMesh") -> nn.Module:
        super()._apply(module, device_mesh)
        if self.local_heads is not None:
            self.local_heads.apply(module, device_mesh.size())
        produced: Placement = Partial() if self.output == "sum" else Shard(-1)
        outside: Placement = Shard(1) if self.sequence_parallel else Replicate()
        wrap_forward(module, partial(_across_borders, mesh=device_mesh, produced=produced, outside=outside))
        return module

    def __repr__(self) -> str:
        options = [f"output={self.output!r}"] if self.output != "sum" else []
        if self.sequence_parallel:
            options.append("sequence_parallel=True")
        if self.own:  # styles that differ must read differently: equal ones of different layers are merged
            options.append(f"own={ {name: rule.placement for name, rule in self.own.items()} }")
        return f"{type(self).__name__}({', '.join(options)})"


class SplitSequence(LocalParameters):
    """Where the residual stream begins to be cut along the sequence: the entrance of the first decoder layer."""

    def rules(self, module: nn.Module) -> Mapping[str, ParameterRule]:
        """None: a layer's parameters are its children's."""
        del module
        return {}

    def collectives(self) -> tuple[Counts, Counts]:
        """The gradient of what is before the layers is whole."""
        return {}, {"all_gather": 1}

    def _apply(self, module: nn.Module, device_mesh: "DeviceMesh") -> nn.Module:
        wrap_forward(module, partial(_split, mesh=device_mesh))
        return module

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def _across_borders(
    _module: nn.Module,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    mesh: "DeviceMesh",
    produced: Placement,
    outside: Placement,
) -> Any:
    args, kwargs = _enter(args, kwargs, mesh)
    return _leave(call(*args, **kwargs), mesh, produced=produced, outside=outside)


def _enter(args: tuple[Any, ...], kwargs: dict[str, Any], mesh: "DeviceMesh") -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Whole plain tensors, whose gradients are summed over the ranks."""

    def whole(value: Any) -> Any:
        # Dicts, lists and caches are shared between blocks and written to: what they hold is this rank's own already.
        if isinstance(value, tuple):
            return tuple(map(whole, value)) if any(_needs_sum(item) for item in value) else value
        if not _needs_sum(value):
            return value
        if not is_dtensor(value):
            return with_summed_gradient(value, mesh)
        return value.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    return tuple(map(whole, args)), {name: whole(value) for name, value in kwargs.items()}


def _needs_sum(value: object) -> bool:
    if not isinstance(value, Tensor):
        return False
    return is_dtensor(value) or (value.requires_grad and torch.is_grad_enabled())


def _leave(output: Any, mesh: "DeviceMesh", *, produced: Placement, outside: Placement) -> Any:
    """The sum (or the joined features), whole or cut along the sequence; what else is returned is left alone."""

    def joined(tensor: Tensor) -> Tensor:
        if produced.is_partial() and outside.is_replicate():
            return sum_over_ranks(tensor, mesh)
        placement = Shard(tensor.ndim - 1) if produced.is_shard() else produced
        summed = DTensor.from_local(tensor, mesh, [placement], run_check=False).redistribute(placements=[outside])
        return summed if outside.is_shard() else summed.to_local()

    if isinstance(output, tuple | list):
        return type(output)([joined(output[0]), *output[1:]])
    return joined(output)


def _split(
    _module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, mesh: "DeviceMesh"
) -> Any:
    def cut(hidden: Tensor) -> DTensor:
        return DTensor.from_local(hidden, mesh, [Replicate()], run_check=False).redistribute(placements=[Shard(1)])

    if args:
        return call(cut(args[0]), *args[1:], **kwargs)
    return call(**{**kwargs, "hidden_states": cut(kwargs["hidden_states"])})
