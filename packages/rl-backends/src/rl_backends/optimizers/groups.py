"""Which parameters an optimizer treats alike: trained by AdamW or Muon, decaying or not, on one mesh.

Decides by names, shapes and module classes; makes no optimizer. A frozen parameter is in no group. Groups are split by
mesh because torch's fused and foreach kernels take the tensors of one mesh at a time.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn

from rl_backends.errors import ModelError
from rl_backends.optimizers.config import OptimizerConfig
from rl_parallel_plans import NamedShard, named_shards

_NO_MATRICES = (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroup:
    """Parameters that one optimizer treats alike."""

    trained_by: Literal["adamw", "muon"]
    """Muon takes the matrices inside layers, where it was asked for; AdamW everything else."""
    decays: bool
    """Whether weight decay pulls them towards 0."""
    names: tuple[str, ...]
    """In the unsharded model; a tied parameter under its first name."""
    parameters: tuple[nn.Parameter, ...]
    """This rank's shards, in the order of the names."""
    row_dims: tuple[int | None, ...]
    """Of a fused weight that is sharded row by row: the first of the two dims that its rows are registered as
    (`rl_parallel_plans.NamedShard.row_order`). None of any other parameter."""


def group_parameters(model: nn.Module, config: OptimizerConfig) -> tuple[ParameterGroup, ...]:
    """The groups of every trainable parameter of `model`, sharded or not, in the model's order.

    Raises:
        ModelError: nothing is trainable.
        ValueError: a pattern of `no_decay` matches no trainable parameter.
    """
    shards = [each for each in named_shards(model) if isinstance(each.tensor, nn.Parameter)]
    trainable = [each for each in shards if each.tensor.requires_grad]
    if not trainable:
        raise ModelError(
            f"none of the {len(shards)} parameters of {type(model).__name__} requires a gradient, so there is nothing "
            "to optimize: unfreeze some, or add adapters"
        )
    names = [each.name for each in trainable]
    for pattern in config.no_decay:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"no_decay pattern {pattern!r} matches none of the {len(names)} trainable parameters "
                f"({', '.join(names[:3])}, ...): `*` stands for anything, and a tied parameter has its first name only"
            )
    owners: dict[int, nn.Module] = {}  # the first module that holds each parameter
    layered: set[int] = set()  # parameters inside a list of modules, as decoder layers and experts are
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), module)
        if isinstance(module, nn.ModuleList):
            layered |= {id(parameter) for parameter in module.parameters()}
    members: dict[tuple[bool, bool, object], list[NamedShard]] = {}
    for each in trainable:
        owner = owners[id(each.tensor)]
        vector = _is_vector(each, owner)
        left_out = any(fnmatchcase(each.name, pattern) for pattern in config.no_decay)
        decays = not left_out and (config.decay_vectors or not vector)
        # A linear map, or a stack of them, one for each expert; not a table of vectors and not a convolution.
        matrix = not vector and not isinstance(owner, _NO_MATRICES) and len(each.shape) in {2, 3}
        by_muon = config.name == "muon" and id(each.tensor) in layered and matrix
        key = (by_muon, decays, getattr(each.tensor, "device_mesh", None))
        members.setdefault(key, []).append(each)
    return tuple(
        ParameterGroup(
            trained_by="muon" if by_muon else "adamw",
            decays=decays,
            names=tuple(each.name for each in group),
            parameters=tuple(each.tensor for each in group if isinstance(each.tensor, nn.Parameter)),
            row_dims=tuple(None if each.row_order is None else each.row_order.dim for each in group),
        )
        for (by_muon, decays, _), group in members.items()
    )


def _is_vector(shard: NamedShard, owner: nn.Module) -> bool:
    """Norms and biases of several heads or experts are stacks of vectors: two dims, and still no matrix."""
    own_name = shard.name.rpartition(".")[2]
    return len(shard.shape) < 2 or own_name.endswith("bias") or "norm" in type(owner).__name__.lower()
