"""The borders of a block: what enters an attention, a mixer or an MLP, and what leaves it, on each rank of the tp axis.

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

The code of a block may read its sizes from attributes, weights of its children without calling them, and constants from
buffers: within the block each is this rank's.
"""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from rl_parallel_plans.checkpoints import RowsRead
from rl_parallel_plans.dtensor import is_dtensor
from rl_parallel_plans.styles.forward import (
    Call,
    Communication,
    Counts,
    gathered,
    needs_gradient,
    sum_over_ranks,
    with_summed_gradient,
    wrap_forward,
)
from rl_parallel_plans.styles.table import LocalParameters, ParameterRule

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

HEAD_COUNTS = ("num_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads", "num_v_heads", "num_k_heads")
CONFIG_ATTRIBUTES = ("num_attention_heads", "num_key_value_heads")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads")
COUNTS: dict[tuple[str, bool], tuple[Counts, Counts]] = {
    ("sum", False): ({"all_reduce": 1}, {"all_reduce": 1}),
    ("sum", True): ({"all_gather": 1, "reduce_scatter": 1}, {"all_gather": 1, "reduce_scatter": 1}),
    ("features", False): ({"all_gather": 2}, {"all_reduce": 1, "reduce_scatter": 1}),
    ("features", True): ({"all_gather": 2, "all_to_all": 1}, {"reduce_scatter": 2, "all_to_all": 1}),
}
"""Collectives forward and backward, with those of the features before the output projection."""
GROUPS = ("num_key_value_groups", "num_kv_groups", "n_rep")
"""Attributes that count the query heads of one key/value head."""


@dataclass(eq=False, repr=False, kw_only=True)
class Block(LocalParameters):
    """Entrance and exit of a block.

    sequence_parallel: whether the residual stream outside is cut along the sequence.
    output: "sum" where each rank's output is one term of the block's; "features" where it is a slice of its last dim
        (column-wise output projections: no sum over ranks, hence the same rounding as on one rank).
    table: rows of parameters that the block's module itself holds, such as attention sinks.
    attention: whether attributes of the module, and of its config, count heads (HEAD_COUNTS).
    head_features: its attributes that count the features of all heads.
    key_heads: how many key/value heads there are, where ranks are more.
    units: what else is shared out and how many there are.
    sizes: what this rank's module must read in attributes, of which it has some.
    reads: by path, the style of each child whose parameters the block's own code reads.
    buffers: by name, a dim of a buffer and what of it is this rank's.
    unfused: whether to take, in training, the code path of evaluation: the kernel that fuses a whole Mamba 2 block
        normalizes what one rank holds, and here the norm spans ranks. For modules that ask `training` for nothing else.
    """

    sequence_parallel: bool = False
    output: Literal["sum", "features"] = "sum"
    table: Mapping[str, ParameterRule] = field(default_factory=dict)
    attention: bool = False
    head_features: tuple[str, ...] = ()
    key_heads: int | None = None
    units: Mapping[str, int] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    reads: Mapping[str, LocalParameters] = field(default_factory=dict)
    buffers: Mapping[str, tuple[int, RowsRead]] = field(default_factory=dict)
    unfused: bool = False

    @property
    def _head_counts(self) -> tuple[str, ...]:
        return (*HEAD_COUNTS, *self.head_features) if self.attention else ()

    def inside(self, module: nn.Module) -> Iterable[tuple[nn.Module, Mapping[str, ParameterRule]]]:
        """The children that its code reads."""
        return [(child := module.get_submodule(path), style.rules(child)) for path, style in self.reads.items()]

    def problems(self, module: nn.Module, tp: int) -> list[str]:
        """Units and heads that tp does not divide."""
        units = [(f"{n} {what}", n) for what, n in self.units.items()]
        for name in self._head_counts:
            n = module.__dict__.get(name)
            if isinstance(n, int) and n % tp and not (name in KEY_HEADS and tp % n == 0):  # one for several ranks
                units.append((f"{name}={n}", n))
        return [f"has {what}, which tp={tp} does not divide: choose one that does" for what, n in units if n % tp]

    def attributes(self, module: nn.Module, tp: int) -> Mapping[str, int]:
        """Counts of this rank's heads, and the sizes that were given."""
        known = {name: n for name, n in module.__dict__.items() if isinstance(n, int)}
        local = {name: max(known[name] // tp, 1) for name in self._head_counts if name in known}
        if (key_heads := self.key_heads) is not None:
            local |= {name: known[name] * key_heads // max(tp, key_heads) for name in GROUPS if name in known}
        return local | {name: size for name, size in self.sizes.items() if name in known}

    def communications(self) -> tuple[Communication, ...]:
        """Those of the table above."""
        forward, backward = COUNTS[self.output, self.sequence_parallel]
        produced: Placement = Partial() if self.output == "sum" else Shard(-1)
        outside: Placement = Shard(1) if self.sequence_parallel else Replicate()
        leave = partial(_leave, produced=produced, outside=outside)
        return (Communication(enter=_enter, leave=leave, forward=forward, backward=backward),)

    def communicate(self, module: nn.Module, mesh: "DeviceMesh") -> None:
        """Across the borders; and inside them, its buffers, its config and its code path."""
        if self.sequence_parallel:
            wrap_forward(module, _in_the_shape_of_the_stream)
        super().communicate(module, mesh)
        config = module.__dict__.get("config")
        if self.attention and config is not None and not isinstance(config, LocalHeadsConfig):
            module.__dict__["config"] = LocalHeadsConfig(config, mesh.size())
        if self.buffers:
            size, rank = mesh.size(), mesh.get_local_rank()
            pieces = {name: (dim, tuple(rows(size, rank))) for name, (dim, rows) in self.buffers.items()}
            wrap_forward(module, partial(_with_own_buffers, pieces=pieces))
        if self.unfused:
            wrap_forward(module, _as_in_evaluation)


class LocalHeadsConfig:
    """A model's config as one rank's attention must read it: fewer heads, all else as it is at that moment.

    Most attention code infers heads from shapes; some reads the config that the whole model shares.
    """

    def __init__(self, config: Any, tp: int) -> None:
        self.__dict__["_whole"], self.__dict__["_tp"] = config, tp

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(self.__dict__["_whole"], name)
        is_count = name in CONFIG_ATTRIBUTES and isinstance(value, int)
        return max(value // self.__dict__["_tp"], 1) if is_count else value

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.__dict__["_whole"], name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> "LocalHeadsConfig":
        return LocalHeadsConfig(copy.deepcopy(self.__dict__["_whole"], memo), self.__dict__["_tp"])

    def __reduce__(self) -> tuple[type["LocalHeadsConfig"], tuple[Any, int]]:
        return LocalHeadsConfig, (self.__dict__["_whole"], self.__dict__["_tp"])


def _enter(value: Any, mesh: "DeviceMesh") -> Any:
    """Whole plain tensors, whose gradients are summed over the ranks."""
    # Dicts, lists and caches are shared between blocks and written to: what they hold is this rank's own already.
    if isinstance(value, tuple):
        any_needs_sum = any(is_dtensor(each) or needs_gradient(each) for each in value)
        return tuple([_enter(each, mesh) for each in value]) if any_needs_sum else value
    if is_dtensor(value):
        return gathered(value, summed=True)
    return with_summed_gradient(value, mesh) if needs_gradient(value) else value


def _leave(tensor: Tensor, mesh: "DeviceMesh", *, produced: Placement, outside: Placement) -> Tensor:
    """The sum (or the joined features), whole or cut along the sequence."""
    if produced.is_partial() and outside.is_replicate():
        return sum_over_ranks(tensor, mesh)
    placement = Shard(tensor.ndim - 1) if produced.is_shard() else produced
    summed = DTensor.from_local(tensor, mesh, [placement], run_check=False).redistribute(placements=[outside])
    return summed if outside.is_shard() else summed.to_local()


def _in_the_shape_of_the_stream(_module: nn.Module, call: Call, /, *args: Any, **kwargs: Any) -> Any:
    """Llama 4's mixture returns [B * S, H], whose dim 1 is not the sequence; its layer views that as the stream."""
    output = call(*args, **kwargs)
    first = output[0] if isinstance(output, tuple | list) else output
    if first.ndim != 2:
        return output
    streams = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.ndim == 3]
    if not streams or first.shape != (streams[0].shape[0] * streams[0].shape[1], streams[0].shape[2]):
        return output
    first = first.view(streams[0].shape)
    return type(output)([first, *output[1:]]) if isinstance(output, tuple | list) else first


def _with_own_buffers(
    module: nn.Module, call: Call, /, *args: Any, pieces: Mapping[str, tuple[int, tuple[slice, ...]]], **kwargs: Any
) -> Any:
    # An entry of the instance's __dict__ hides the buffer of the same name, which stays whole.
    names = [name for name in pieces if name not in module.__dict__]
    try:
        for name in names:
            dim, runs = pieces[name]
            buffer = module.get_buffer(name)
            before = (slice(None),) * (dim % buffer.ndim)
            module.__dict__[name] = torch.cat([buffer[(*before, run)] for run in runs], dim)
        return call(*args, **kwargs)
    finally:
        for name in names:
            module.__dict__.pop(name, None)


def _as_in_evaluation(module: nn.Module, call: Call, /, *args: Any, **kwargs: Any) -> Any:
    training = module.training
    module.training = False
    try:
        return call(*args, **kwargs)
    finally:
        module.training = training
