"""What a plan makes of each parameter, and what it communicates over the tp axis, counted without running anything.

Styles describe themselves by `parameter_placements(module)`, `rules(module)` and `collectives()`; torch's own styles
are described here. `ParameterRow` stands for the same parameter in every layer, with the bytes of rank 0, which holds
the largest piece where a dim does not divide evenly. `CollectiveRow` stands for all decoder layers that communicate
alike, or for one place outside them; FSDP's collectives are not counted.

Bytes of collectives are those of the tensors that they gather or reduce, per token: hidden size times the item size of
the activations, taken from the parameters. What a rank sends for a tensor of N bytes, on a ring of t ranks:

    all-reduce 2 N (t - 1) / t      all-gather, reduce-scatter N (t - 1) / t      all-to-all N (t - 1) / t^2
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import nn

from rl_parallel_plans.structure import (
    collapsed,
    direct_parameters,
    input_embedding,
    joined,
    matching_modules,
    text_layers,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement
    from torch.distributed.tensor.parallel import ParallelStyle

    Rule = tuple[str, ParallelStyle]


def parameter_placements(style: "ParallelStyle", module: nn.Module) -> "Mapping[str, Placement] | None":
    """The placement of each of the module's own parameters under `style`; None where the style does not say."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as torch_styles

    if hasattr(style, "parameter_placements"):
        placements: Mapping[str, Placement] = style.parameter_placements(module)
        return placements
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
            counts[_parameter_row(model, path, name, rule=rules.get(path), tp=tp)] += 1
    return tuple(
        replace(row, count=count, global_bytes=count * row.global_bytes, rank_bytes=count * row.rank_bytes)
        for row, count in counts.items()
    )


def _parameter_row(model: nn.Module, path: str, name: str, *, rule: "Rule | None", tp: int) -> ParameterRow:
    module = model.get_submodule(path)
    parameter = module.get_parameter(name)
    pattern: str | None = None
    style: str | None = None
    placement: Placement | None = None
    words, details = "whole", None
    if tp > 1:
        from torch.distributed.tensor import Replicate

        placement = Replicate()  # what no rule names is whole on the mesh
        placements = {} if rule is None else parameter_placements(rule[1], module)
        if rule is not None and (placements is None or name in placements):
            pattern, style = rule[0], type(rule[1]).__name__
            placement = None if placements is None else placements[name]
            if placements is not None and hasattr(rule[1], "rules"):
                details = rule[1].rules(module).get(name)
        words = f"told by {style}" if placement is None else in_words(placement)
    shape = tuple(parameter.shape)
    local = local_shape(shape, placement, tp)
    return ParameterRow(
        name=collapsed(joined(path, name)),
        count=1,
        pattern=pattern,
        style=style,
        placement=words,
        partial_gradient=details is not None and details.gradient.is_partial(),
        reordered=details is not None and details.row_order is not None,
        sharded=local != shape,
        shape=shape,
        local_shape=local,
        dtype=str(parameter.dtype).removeprefix("torch."),
        global_bytes=math.prod(shape) * parameter.element_size(),
        rank_bytes=math.prod(local) * parameter.element_size(),
    )


# -- Collectives -------------------------------------------------------------------------------------

Counts = Mapping[str, int]
Sized = list[tuple[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """The collectives of one kind of decoder layer, or of one module outside the layers."""

    where: str
    """Path with `*` for the index of a layer."""
    parts: tuple[str, ...]
    """Paths inside the layer of the modules that communicate; empty outside the layers."""
    in_layers: bool
    """Whether `where` is a decoder layer."""
    count: int
    """How many layers or modules the row stands for."""
    forward: Counts
    """How often each collective runs in one forward of one of them."""
    backward: Counts
    """How often each collective runs in one backward of one of them."""
    forward_bytes: int
    """Bytes per token of the tensors of `forward`."""
    backward_bytes: int
    """Bytes per token of the tensors of `backward`."""
    sent_bytes: int
    """Bytes per token that a rank sends, forward and backward together, where collectives are rings."""
    untold: tuple[str, ...]
    """Styles that do not say what they communicate; what they do is not counted."""

    @property
    def blocks(self) -> tuple[str, ...]:
        """The children of the layer in which `parts` lie."""
        return tuple(dict.fromkeys(part.partition(".")[0] for part in self.parts))


def collective_rows(model: nn.Module, styles: "Mapping[str, ParallelStyle]", *, tp: int) -> tuple[CollectiveRow, ...]:
    """The rows of a plan: kinds of decoder layers first, then what is outside of them, each in the model's order."""
    if tp == 1:
        return ()
    stack = text_layers(model)
    layers = "" if stack is None else f"{stack[0]}."
    inside: dict[str, list[_Communication]] = {}
    outside: list[_Communication] = []
    for each in _communications(model, styles):
        in_stack = bool(layers) and each.name.startswith(layers)
        index, _, within = each.name.removeprefix(layers).partition(".") if in_stack else ("", "", "")
        if within:
            inside.setdefault(index, []).append(replace(each, name=collapsed(within)))
        else:  # what is a layer itself, such as the first, keeps its index
            is_item = in_stack or "." not in each.name
            outside.append(each if is_item else replace(each, name=collapsed(each.name)))
    kinds = Counter(map(tuple, inside.values()))
    return (
        *(_collective_row(f"{layers}*", kind, count, tp=tp, in_layers=True) for kind, count in kinds.items()),
        *(
            _collective_row(each.name, (each,), count, tp=tp, in_layers=False)
            for each, count in Counter(outside).items()
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Communication:
    """What one module communicates: each collective with the bytes per token of its tensor."""

    name: str
    style: str
    told: bool = True
    forward: tuple[tuple[str, int], ...] = ()
    backward: tuple[tuple[str, int], ...] = ()


def _communications(model: nn.Module, styles: "Mapping[str, ParallelStyle]") -> Iterator[_Communication]:
    """In the model's order, the modules whose style communicates or does not tell."""
    hidden, itemsize = _activation(model)
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    matches = [(name, module, style) for p, style in styles.items() for name, module in matching_modules(model, p)]
    for name, module, style in sorted(matches, key=lambda match: order[match[0]]):
        described = _collectives_of(style, module, hidden)
        if described is None:
            yield _Communication(name=name, style=type(style).__name__, told=False)
        elif any(described):
            forward, backward = (tuple((what, size * itemsize) for what, size in each) for each in described)
            yield _Communication(name=name, style=type(style).__name__, forward=forward, backward=backward)


def _collectives_of(style: "ParallelStyle", module: nn.Module, hidden: int) -> tuple[Sized, Sized] | None:
    """The collectives of a style, forward and backward, with elements per token; None where it does not tell."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    if hasattr(style, "collectives"):
        size = getattr(style, "elements_per_token", hidden)
        forward, backward = style.collectives()
        return [(what, size) for what in Counter(forward).elements()], [(w, size) for w in Counter(backward).elements()]
    features_in = getattr(module, "in_features", 0)  # an embedding has none: its indices have no gradient
    features_out = getattr(module, "out_features", getattr(module, "embedding_dim", 0))
    if isinstance(style, ColwiseParallel):
        whole_input = style.input_layouts[0].is_replicate()
        gathered = [("all_gather", features_in)] if features_in and not whole_input else []
        joined_output = [("all_gather", features_out)] if style.output_layouts[0].is_replicate() else []
        summed = [("all_reduce" if whole_input else "reduce_scatter", features_in)] if features_in else []
        return gathered + joined_output, summed
    if isinstance(style, RowwiseParallel):
        whole_output = style.output_layouts[0].is_replicate()
        summed = [("all_reduce" if whole_output else "reduce_scatter", features_out)]
        spread = [] if whole_output else [("all_gather", features_out)]
        split = [("all_gather", features_in)] if features_in and style.input_layouts[0].is_replicate() else []
        return summed, spread + split
    return ([], []) if hasattr(style, "rules") else None  # those of ours that communicate have collectives()


def _collective_row(
    where: str, kind: tuple[_Communication, ...], count: int, *, tp: int, in_layers: bool
) -> CollectiveRow:
    forward = [run for each in kind for run in each.forward]
    backward = [run for each in kind for run in each.backward]

    def sent(what: str, size: int) -> float:
        share = size * (tp - 1) / tp
        return {"all_reduce": 2 * share, "all_to_all": share / tp}.get(what, share)

    return CollectiveRow(
        where=where,
        parts=tuple(dict.fromkeys(each.name for each in kind)) if in_layers else (),
        in_layers=in_layers,
        count=count,
        forward=dict(Counter(what for what, _ in forward)),
        backward=dict(Counter(what for what, _ in backward)),
        forward_bytes=sum(size for _, size in forward),
        backward_bytes=sum(size for _, size in backward),
        sent_bytes=round(sum(sent(what, size) for what, size in (*forward, *backward))),
        untold=tuple(dict.fromkeys(each.style for each in kind if not each.told)),
    )


def _activation(model: nn.Module) -> tuple[int, int]:
    """Hidden size and item size of the residual stream, from the input embedding; hidden size 0 without one."""
    path = input_embedding(model)
    embeddings = [model.get_submodule(path)] if path is not None else []
    embeddings += [module for module in model.modules() if isinstance(module, nn.Embedding)]
    for embedding in embeddings:
        weight = getattr(embedding, "weight", None)
        if weight is not None and weight.ndim == 2:
            return int(weight.shape[1]), int(weight.element_size())
    return 0, next((parameter.element_size() for parameter in model.parameters()), 0)
