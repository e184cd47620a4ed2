"""What a plan makes of each parameter: one row for the same parameter in every layer.

Bytes are those of rank 0, which holds the largest piece where a dim does not divide evenly.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from rl_parallel_plans.placements import in_words, local_shape, parameter_placements
from rl_parallel_plans.structure import collapsed, direct_parameters, joined, matching_modules

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement
    from torch.distributed.tensor.parallel import ParallelStyle


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRow:
    """The same parameter in `count` layers."""

    name: str
    """Path of the parameter with `*` for the index of the layer."""
    count: int
    """How many parameters the row stands for."""
    placement: str
    """torch's placement, or `whole` for a plain tensor that every rank holds."""
    sharded: bool
    """Whether a rank holds only a piece."""
    shape: tuple[int, ...]
    """Global shape of one of them."""
    local_shape: tuple[int, ...]
    """Shape on rank 0 of one of them."""
    dtype: str
    """dtype as torch names it, without `torch.`."""
    global_bytes: int
    """Bytes of all of them together, unsharded."""
    rank_bytes: int
    """Bytes of all of them together on rank 0."""


def parameter_rows(model: nn.Module, styles: "Mapping[str, ParallelStyle]", tp: int) -> tuple[ParameterRow, ...]:
    """The rows of a model in the model's order; a tied parameter is counted once, under its first name."""
    styled = {name: style for pattern, style in styles.items() for name, _ in matching_modules(model, pattern)}
    counts: Counter[tuple[str, str, tuple[int, ...], tuple[int, ...], str, int]] = Counter()
    seen = set()
    for path, name, parameter in direct_parameters(model):
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        placement, described = _placement(styled.get(path), model.get_submodule(path), name)
        shape = tuple(parameter.shape)
        dtype = str(parameter.dtype).removeprefix("torch.")
        local = local_shape(shape, placement, tp)
        counts[(collapsed(joined(path, name)), described, shape, local, dtype, parameter.element_size())] += 1
    return tuple(
        ParameterRow(
            name=name,
            count=count,
            placement=described,
            sharded=local != shape,
            shape=shape,
            local_shape=local,
            dtype=dtype,
            global_bytes=count * math.prod(shape) * itemsize,
            rank_bytes=count * math.prod(local) * itemsize,
        )
        for (name, described, shape, local, dtype, itemsize), count in counts.items()
    )


def _placement(style: "ParallelStyle | None", module: nn.Module, name: str) -> "tuple[Placement | None, str]":
    if style is None:
        return None, "whole"
    placements = parameter_placements(style, module)
    if placements is None:
        return None, f"told by {type(style).__name__}"
    placement = placements.get(name)
    if placement is None:
        return None, "whole"
    summed = ", gradient summed" if getattr(style, "partial_gradient", False) else ""
    return placement, f"{in_words(placement)}{summed}"
