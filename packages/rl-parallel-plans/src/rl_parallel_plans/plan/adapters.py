"""Low-rank adapters inside linear layers: the plan by structure of the model without them, extended to them.

An adapter is a module in the place of a linear layer X, with the children `base_layer` (X itself) and `lora_A`,
`lora_B`, which hold linear layers A [rank, in] and B [out, rank], as peft has it: y = X x + s B A x. Recognised by
these names; no library is imported. Inside a block, where each rank computes on plain tensors:

    X cut by output features    A whole, its gradient a sum    B cut as X
    X cut by input features     A cut as X                     B whole, its gradient a sum
    X whole, its gradient a sum                                A and B likewise

so that the adapter's output is the same slice, or term of the block's sum, as X's, and no collective is added.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from torch import nn

from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.structure import collapsed, joined, matching_modules

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

    Styles = dict[str, ParallelStyle]

BASE, MATRICES = "base_layer", ("lora_A", "lora_B")


def has_adapters(model: nn.Module) -> bool:
    """Whether any module is an adapter around a linear layer."""
    return any(map(_is_adapter, model.modules()))


def without_adapters(model: nn.Module) -> nn.Module:
    """The model as it was before: the same parameters in copies of its modules. For looking at only."""
    return _bare(model, {})


def with_adapters(model: nn.Module, styles: "Mapping[str, ParallelStyle]") -> "Styles":
    """Styles of `without_adapters(model)` as those of `model`.

    Raises PlanError where a linear layer with an adapter has a style that says nothing of one.
    """
    extended: Styles = {}
    adapted = {path for path, module in model.named_modules() if _is_adapter(module)}
    left = set(adapted)
    for pattern, style in styles.items():
        matches = {path for path, _ in matching_modules(model, pattern)}
        if not matches & adapted:
            extended[pattern] = style
        elif matches <= adapted:
            extended |= _around(pattern, style, model.get_submodule(min(matches)))
        else:  # some layers of the stack have one, and some have none
            for path in sorted(matches):
                around = path in adapted
                extended |= _around(path, style, model.get_submodule(path)) if around else {path: style}
        left -= matches
    if left:
        raise PlanError(
            f"{collapsed(min(left))} has an adapter, and no rule shards the linear layer inside of it by itself: leave "
            "it out of the layers that get adapters, or use tp=1"
        )
    return extended


def _around(path: str, style: "ParallelStyle", adapter: nn.Module) -> "Styles":
    return {
        joined(path, BASE): style,
        **{
            f"{path}.{matrix}.{name}": matrix_style
            for matrix, matrix_style in zip(MATRICES, _matrix_styles(path, style), strict=True)
            for name, _ in adapter.get_submodule(matrix).named_children()
        },
    }


def _matrix_styles(path: str, style: "ParallelStyle") -> "tuple[ParallelStyle, ParallelStyle]":
    from rl_parallel_plans import styles

    whole = styles.ReplicatedParallel(partial_gradient=True)
    # Not what does more to what enters or leaves the linear layer than cut its weight.
    cuts_rows = isinstance(style, styles.Colwise | styles.PackedColwise | styles.ReplicatedHeads)
    if cuts_rows and not any((*style.collectives(), *style.communications())):  # type: ignore[attr-defined]
        return whole, style
    if isinstance(style, styles.Rowwise):
        return styles.Rowwise(), whole
    if isinstance(style, styles.ReplicatedParallel) and style.partial_gradient and not style.reads_inside:
        return whole, whole
    raise PlanError(
        f"{collapsed(path)} has an adapter, and is sharded by {type(style).__name__}, which has no rule for one: leave "
        "it out of the layers that get adapters, or use tp=1"
    )


def _is_adapter(module: nn.Module) -> bool:
    return {BASE, *MATRICES} <= dict(module.named_children()).keys()


def _bare(module: nn.Module, copies: dict[int, nn.Module]) -> nn.Module:
    while _is_adapter(module):
        module = module.get_submodule(BASE)
    if id(module) not in copies:
        copies[id(module)] = shallow = copy.copy(module)
        shallow.__dict__["_modules"] = dict(_children(module, copies))
    return copies[id(module)]


def _children(module: nn.Module, copies: dict[int, nn.Module]) -> Iterator[tuple[str, nn.Module | None]]:
    for name, child in module._modules.items():  # noqa: SLF001 - named_children leaves out a second name of the same
        yield name, None if child is None else _bare(child, copies)
