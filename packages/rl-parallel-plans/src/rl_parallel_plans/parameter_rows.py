"""What a plan makes of each parameter: one row for the same parameter in every layer.

Bytes are those of rank 0, which holds the largest piece where a dim does not divide evenly. Knows styles by what they
tell of themselves; knows no mesh and no process group.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import nn

from rl_parallel_plans.placements import in_words, local_shape, parameter_placements
from rl_parallel_plans.structure import collapsed, direct_parameters, joined, matching_modules

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement
    from torch.distributed.tensor.parallel import ParallelStyle

    Rule = tuple[str, ParallelStyle]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRow:
    """The same parameter in `count` layers."""

    name: str
    """Path of the parameter with `*` for the index of the layer."""
    count: int
    """How many parameters the row stands for."""
    pattern: str | None
    """Key of `ParallelPlan.styles` that decided; None where no rule names the parameter."""
    style: str | None
    """Class of the style under that pattern; None where no rule names the parameter."""
    placement: str
    """torch's placement on the tp mesh; `whole` at tp=1, where there is none; else that the style does not tell."""
    partial_gradient: bool
    """Whether each rank holds one term of the gradient, which backward sums over the tp ranks."""
    reordered: bool
    """Whether rows of a fused weight are put in the order of the ranks before they are cut."""
    sharded: bool
    """Whether a rank of the tp axis holds only a piece."""
    shape: tuple[int, ...]
    """Global shape of one of them."""
    local_shape: tuple[int, ...]
    """Shape on rank 0 of the tp axis of one of them."""
    dtype: str
    """dtype as torch names it, without `torch.`."""
    global_bytes: int
    """Bytes of all of them together, unsharded."""
    rank_bytes: int
    """Bytes of all of them together on rank 0 of the tp axis, before FSDP."""

    @property
    def rule(self) -> str:
        """`pattern: style`, or `no rule`."""
        return "no rule" if self.pattern is None else f"{self.pattern}: {self.style}"

    def shape_over(self, dp: int) -> tuple[int, ...]:
        """Shape on rank 0 once FSDP has sharded dim 0 of the local tensor over `dp` ranks."""
        return tuple(math.ceil(size / dp) if i == 0 else size for i, size in enumerate(self.local_shape))

    def rank_bytes_over(self, dp: int) -> int:
        """`rank_bytes` once FSDP has sharded dim 0 of the local tensors over `dp` ranks."""
        elements = math.prod(self.local_shape)
        return self.rank_bytes // elements * math.prod(self.shape_over(dp)) if elements else 0


def parameter_rows(model: nn.Module, styles: "Mapping[str, ParallelStyle]", tp: int) -> tuple[ParameterRow, ...]:
    """The rows of a model in the model's order; a tied parameter is counted once, under its first name."""
    rules = {
        name: (pattern, style) for pattern, style in styles.items() for name, _ in matching_modules(model, pattern)
    }
    counts: Counter[ParameterRow] = Counter()
    seen = set()
    for path, name, parameter in direct_parameters(model):
        if id(parameter) not in seen:
            seen.add(id(parameter))
            counts[_row(model, path, name, rule=rules.get(path), tp=tp)] += 1
    return tuple(
        replace(row, count=count, global_bytes=count * row.global_bytes, rank_bytes=count * row.rank_bytes)
        for row, count in counts.items()
    )


def _row(model: nn.Module, path: str, name: str, *, rule: "Rule | None", tp: int) -> ParameterRow:
    module = model.get_submodule(path)
    parameter = module.get_parameter(name)
    decision = _decision(rule, module, name) if tp > 1 else _Decision()
    shape = tuple(parameter.shape)
    local = local_shape(shape, decision.placement, tp)
    return ParameterRow(
        name=collapsed(joined(path, name)),
        count=1,
        pattern=decision.pattern,
        style=decision.style,
        placement=decision.words,
        partial_gradient=decision.partial_gradient,
        reordered=decision.reordered,
        sharded=local != shape,
        shape=shape,
        local_shape=local,
        dtype=str(parameter.dtype).removeprefix("torch."),
        global_bytes=math.prod(shape) * parameter.element_size(),
        rank_bytes=math.prod(local) * parameter.element_size(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decision:
    """What was decided over one parameter, and by which rule."""

    pattern: str | None = None
    style: str | None = None
    placement: "Placement | None" = None
    partial_gradient: bool = False
    reordered: bool = False

    @property
    def words(self) -> str:
        if self.placement is not None:
            return in_words(self.placement)
        return "whole" if self.style is None else f"told by {self.style}"


def _decision(rule: "Rule | None", module: nn.Module, name: str) -> _Decision:
    from torch.distributed.tensor import Replicate

    left_out = _Decision(placement=Replicate())  # what no rule names lies whole on the mesh
    if rule is None:
        return left_out
    pattern, style = rule
    placements = parameter_placements(style, module)
    if placements is None:
        return _Decision(pattern=pattern, style=type(style).__name__)
    if name not in placements:
        return left_out
    details = style.rules(module).get(name) if hasattr(style, "rules") else None
    return _Decision(
        pattern=pattern,
        style=type(style).__name__,
        placement=placements[name],
        partial_gradient=details is not None and details.gradient.is_partial(),
        reordered=details is not None and details.row_order is not None,
    )
