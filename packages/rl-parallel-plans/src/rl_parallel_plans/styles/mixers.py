"""Borders and insides of a sequence mixer (linear attention, state spaces), and of a mixer that no rank can share.

Their code reads its sizes from attributes, weights of children from outside of the children, constants from buffers:
within the block each is this rank's. Depthwise convolutions have one filter a channel and are shared out by channels.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from rl_parallel_plans.checkpoints import RowsOfRanks, RowsRead
from rl_parallel_plans.dtensor import is_dtensor
from rl_parallel_plans.styles.blocks import BlockParallel, Counts
from rl_parallel_plans.styles.in_block import BlockColwise, BlockNorm, BlockPackedColwise, BlockReplicated, own_names
from rl_parallel_plans.styles.local_parameters import (
    REPLICATED,
    LocalParameters,
    ParameterRule,
    RunsOfRank,
    compute_locally,
    local_views,
)
from rl_parallel_plans.styles.sharded_forward import wrap_forward

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Attributes = Callable[[int], Mapping[str, int]]
"""tp to the sizes that one rank's module must read, by attribute."""
Pieces = tuple[int, Callable[[int, int], Sequence[slice]]]
"""A dim, and (tp, rank) to the runs of its entries that are this rank's."""


class MixerParallel(BlockParallel):
    """A block whose code reads sizes, buffers and the weights of its children by itself.

    units: what is shared out and how many there are, such as heads.
    attributes: the sizes that this rank's module must read.
    inside: by path, the style of each child whose parameters the block's own code reads.
    buffers: by name, what of a buffer is this rank's.
    unfused: whether to take, in training, the code path of evaluation: the kernel that fuses a whole Mamba 2 block
        normalizes what one rank holds, and here the norm spans ranks. For modules that ask `training` for nothing else.
    """

    def __init__(
        self,
        *,
        sequence_parallel: bool = False,
        units: Mapping[str, int],
        own: Mapping[str, ParameterRule] | None = None,
        attributes: Attributes | None = None,
        inside: Mapping[str, LocalParameters] | None = None,
        buffers: Mapping[str, Pieces] | None = None,
        unfused: bool = False,
    ) -> None:
        super().__init__(sequence_parallel=sequence_parallel, own=own)
        self.units, self.attributes = dict(units), attributes
        self.inside = dict(inside or {})
        self.buffers = dict(buffers or {})
        self.unfused = unfused

    def problems(self, module: nn.Module, tp: int) -> list[str]:
        """Units that tp does not divide."""
        found = [
            f"has {n} {what}, which tp={tp} does not divide: choose one that does"
            for what, n in self.units.items()
            if n % tp
        ]
        return [*found, *super().problems(module, tp)]

    def _apply(self, module: nn.Module, device_mesh: "DeviceMesh") -> nn.Module:
        super()._apply(module, device_mesh)
        for name, value in (self.attributes(device_mesh.size()) if self.attributes else {}).items():
            setattr(module, name, value)
        children = [(child := module.get_submodule(path), style.rules(child)) for path, style in self.inside.items()]
        compute_locally(module, [(child, local_views(device_mesh, rules)) for child, rules in children])
        size, rank = device_mesh.size(), device_mesh.get_local_rank()
        if self.buffers:
            pieces = {name: (dim, runs(size, rank)) for name, (dim, runs) in self.buffers.items()}
            wrap_forward(module, partial(_with_own_buffers, pieces=pieces))
        if self.unfused:
            wrap_forward(module, _as_in_evaluation)
        return module

    def __repr__(self) -> str:
        sizes = dict(self.attributes(1)) if self.attributes else {}
        shared = f"units={self.units}, attributes={sizes}, buffers={sorted(self.buffers)}, unfused={self.unfused}"
        return f"{super().__repr__()[:-1]}, {shared})".replace("(, ", "(")


class WholeParallel(LocalParameters):
    """A block that every rank computes whole, on the whole sequence: where no exact way to share it out is known.

    sequence_parallel: whether the residual stream outside is cut along the sequence. It is gathered on the way in and
        cut on the way out; every rank's gradients are whole.
    """

    def __init__(self, *, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.sequence_parallel = sequence_parallel

    def rules(self, module: nn.Module) -> Mapping[str, ParameterRule]:
        """Everything whole."""
        return dict.fromkeys(own_names(module), REPLICATED)

    def collectives(self) -> tuple[Counts, Counts]:
        """How often each collective runs, forward and backward."""
        return ({"all_gather": 1}, {"all_gather": 1}) if self.sequence_parallel else ({}, {})

    def _apply(self, module: nn.Module, device_mesh: "DeviceMesh") -> nn.Module:
        super()._apply(module, device_mesh)
        children = [child for child in module.modules() if child is not module]
        compute_locally(module, [(child, local_views(device_mesh, self.rules(child))) for child in children])
        if self.sequence_parallel:
            wrap_forward(module, partial(_on_whole_sequence, mesh=device_mesh))
        return module

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'sequence_parallel=True' if self.sequence_parallel else ''})"


class BlockConvolution(BlockPackedColwise):
    """A depthwise convolution over channels that are shared out, in segments as the layer before it is."""

    def _apply(self, module: nn.Module, device_mesh: "DeviceMesh") -> nn.Module:
        super()._apply(module, device_mesh)
        for name in ("groups", "in_channels", "out_channels"):
            setattr(module, name, getattr(module, name) // device_mesh.size())
        return module


class BlockSharedRows(LocalParameters):
    """A fused layer, or a depthwise convolution after it, some of whose rows are for all ranks.

    Every row lies on one rank; what more than one needs is gathered for the forward: a few rows beside many (B and C of
    Mamba 2). Rows are put in the order of the ranks, as in `BlockPackedColwise`.
    sizes: rows of each segment.
    parameters: how many the layer has that are sharded: a bias, being small, stays whole.
    fits: tp to why it does not fit, a sentence that goes on after the module's name, or None.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        parameters: int,
        row_order: RowsOfRanks,
        reads: RowsRead,
        runs: RunsOfRank,
        fits: Callable[[int], str | None],
    ) -> None:
        super().__init__()
        self.sizes, self.parameters = tuple(sizes), parameters
        self.row_order, self.reads, self.runs, self.fits = row_order, reads, runs, fits

    def rules(self, module: nn.Module) -> Mapping[str, ParameterRule]:
        """Rows, in the order of the ranks; a bias whole."""
        rule = ParameterRule(placement=Shard(0), row_order=self.row_order, runs=self.runs)
        bias = ParameterRule(placement=Replicate(), reads=self.reads)
        return {name: rule if p.ndim > 1 else bias for name, p in module.named_parameters(recurse=False)}

    def problems(self, module: nn.Module, tp: int) -> list[str]:
        """Units that tp does not divide."""
        del module
        return [problem] if (problem := self.fits(tp)) is not None else []

    def collectives(self) -> tuple[Counts, Counts]:
        """For each parameter with rows for all ranks; a layer whose groups only some tp share counts none."""
        gathered = self.parameters * sum(run.needed is not None for run in self.runs(2, 0))
        return ({"all_gather": gathered}, {"reduce_scatter": gathered}) if gathered else ({}, {})

    def _apply(self, module: nn.Module, device_mesh: "DeviceMesh") -> nn.Module:
        super()._apply(module, device_mesh)
        if isinstance(module, nn.Conv1d):
            runs = self.runs(device_mesh.size(), device_mesh.get_local_rank())
            rows = [
                run.size if run.needed is None else run.parts * (run.needed.stop - run.needed.start) for run in runs
            ]
            module.groups = module.in_channels = module.out_channels = sum(rows)
        return module

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.sizes)})"


class BlockReplicatedTree(BlockReplicated):
    """A module that every rank runs whole, and that reads the parameters of its children by itself."""

    def _apply(self, module: nn.Module, device_mesh: "DeviceMesh") -> nn.Module:
        super()._apply(module, device_mesh)
        children = [child for child in module.modules() if child is not module]
        compute_locally(module, [(child, local_views(device_mesh, self.rules(child))) for child in children])
        return module


class BlockShare(LocalParameters):
    """A module that hands its input on, in a block whose outputs are summed over ranks: each an equal share of it."""

    def rules(self, module: nn.Module) -> Mapping[str, ParameterRule]:
        """None: it has no parameters."""
        del module
        return {}

    def _apply(self, module: nn.Module, device_mesh: "DeviceMesh") -> nn.Module:
        wrap_forward(module, partial(_share, ranks=device_mesh.size()))
        return module

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class BlockParameters(LocalParameters):
    """A module inside a block whose own parameters each have a rule.

    attributes: the sizes that this rank's module must read.
    """

    def __init__(self, given: Mapping[str, ParameterRule], *, attributes: Attributes | None = None) -> None:
        super().__init__()
        self.given, self.attributes = dict(given), attributes

    def rules(self, module: nn.Module) -> Mapping[str, ParameterRule]:
        """Those that were given."""
        del module
        return self.given

    def _apply(self, module: nn.Module, device_mesh: "DeviceMesh") -> nn.Module:
        super()._apply(module, device_mesh)
        for name, value in (self.attributes(device_mesh.size()) if self.attributes else {}).items():
            setattr(module, name, value)
        return module

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}: {rule.placement}' for name, rule in self.given.items())})"


class BlockGroupNorm(BlockColwise):
    """A norm over each group of features, with whole groups on every rank.

    Its module may count the groups in `n_groups`, which becomes this rank's.
    """

    def _apply(self, module: nn.Module, device_mesh: "DeviceMesh") -> nn.Module:
        super()._apply(module, device_mesh)
        if isinstance(groups := getattr(module, "n_groups", None), int):
            module.__dict__["n_groups"] = groups // device_mesh.size()
        return module


class BlockGatedNorm(BlockNorm):
    """A norm over features that are shared out, multiplied by a gate that is shared out alike."""


def _share(
    _module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, ranks: int
) -> Tensor:
    output: Tensor = call(*args, **kwargs)
    return output / ranks


def _with_own_buffers(  # noqa: PLR0917 - a wrapper
    module: nn.Module,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    pieces: Mapping[str, tuple[int, Sequence[slice]]],
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


def _as_in_evaluation(  # noqa: PLR0917 - a wrapper
    module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    training = module.training
    module.training = False
    try:
        return call(*args, **kwargs)
    finally:
        module.training = training


def _on_whole_sequence(
    _module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, mesh: "DeviceMesh"
) -> Any:
    """Whole plain tensors inside, and each rank's gradient of them is whole; outside, this rank's part again."""

    def whole(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(whole, value))
        if not is_dtensor(value):
            return value
        return value.redistribute(placements=[Replicate()]).to_local(grad_placements=[Replicate()])

    def cut(tensor: Tensor) -> DTensor:
        return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False).redistribute(placements=[Shard(1)])

    output = call(*map(whole, args), **{name: whole(value) for name, value in kwargs.items()})
    if isinstance(output, tuple | list):  # what else is returned is left alone
        return type(output)([cut(output[0]), *output[1:]])
    return cut(output)
