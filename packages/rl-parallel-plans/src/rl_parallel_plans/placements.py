"""What a parallel style does to the parameters of a module, told before it is done.

Needs no mesh and no process group, and touches no tensor. It knows torch's own styles and any style that has a
`parameter_placements(module)`; of others it says that it does not know.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement
    from torch.distributed.tensor.parallel import ParallelStyle


def parameter_placements(style: "ParallelStyle", module: nn.Module) -> "Mapping[str, Placement] | None":
    """The placement of each of the module's own parameters under `style`; None where that cannot be told."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as torch_styles

    if hasattr(style, "parameter_placements"):
        told: Mapping[str, Placement] = style.parameter_placements(module)
        return told
    names = [name for name, _ in module.named_parameters(recurse=False)]
    if isinstance(style, torch_styles.ColwiseParallel):
        return dict.fromkeys(names, Shard(1) if isinstance(module, nn.Embedding) else Shard(0))
    if isinstance(style, torch_styles.RowwiseParallel):
        weight = Shard(0) if isinstance(module, nn.Embedding) else Shard(1)
        return {name: weight if name == "weight" else Replicate() for name in names}
    if isinstance(style, torch_styles.SequenceParallel):
        return dict.fromkeys(names, Replicate())
    return None


def in_words(placement: "Placement") -> str:
    """`Shard(0)`, `Replicate`: the same in every release of torch, unlike `str(placement)`."""
    dim = getattr(placement, "dim", None)
    return type(placement).__name__ if dim is None else f"{type(placement).__name__}({dim})"


def local_shape(shape: tuple[int, ...], placement: "Placement | None", tp: int) -> tuple[int, ...]:
    """The shape on rank 0, which holds the largest piece: DTensor cuts `ceil(size / tp)` rows per rank."""
    dim = getattr(placement, "dim", None)
    if dim is None:
        return shape
    return tuple(math.ceil(size / tp) if i == dim % len(shape) else size for i, size in enumerate(shape))


def cuts_sequence(style: object) -> bool:
    """Whether a style works on a residual stream that is cut along the sequence."""
    if type(style).__name__ in ("SequenceParallel", "SplitSequence", "SequenceShardedParallel"):
        return True
    return bool(getattr(style, "sequence_parallel", False))


def shards_features(style: "ParallelStyle | None") -> bool:
    """Whether a column-wise style leaves each rank with a slice of the output features."""
    from torch.distributed.tensor.parallel import ColwiseParallel

    return isinstance(style, ColwiseParallel) and style.output_layouts[0].is_shard()
