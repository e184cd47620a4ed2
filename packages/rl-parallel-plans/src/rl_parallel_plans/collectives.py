"""What a plan communicates over the tp axis in one forward and one backward, counted without running anything.

Knows what styles tell of themselves (`collectives()`), and what torch's own column-wise and row-wise styles do. One row
for all decoder layers that communicate alike, and one for each place outside them. FSDP's are not counted.

Bytes are those of the tensors that the collectives make whole or cut, per token: hidden size times the activations'
item size, taken from the parameters. What a rank really sends for a tensor of N bytes, on a ring of t ranks:

    all-reduce 2 N (t - 1) / t      all-gather, reduce-scatter N (t - 1) / t      all-to-all N (t - 1) / t^2
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import nn

from rl_parallel_plans.structure import collapsed, input_embedding, matching_modules, text_layers

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

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
    """The rows of a plan: kinds of decoder layers first, then what lies outside, each in the model's order."""
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
        *(_row(f"{layers}*", kind, count, tp=tp, in_layers=True) for kind, count in kinds.items()),
        *(_row(each.name, (each,), count, tp=tp, in_layers=False) for each, count in Counter(outside).items()),
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
        told = _told(style, module, hidden)
        if told is None:
            yield _Communication(name=name, style=type(style).__name__, told=False)
        elif any(told):
            forward, backward = (tuple((what, size * itemsize) for what, size in each) for each in told)
            yield _Communication(name=name, style=type(style).__name__, forward=forward, backward=backward)


def _told(style: "ParallelStyle", module: nn.Module, hidden: int) -> tuple[Sized, Sized] | None:
    """The collectives of a style, forward and backward, with elements per token; None where it does not tell."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    if hasattr(style, "collectives"):
        size = getattr(style, "elements_per_token", hidden)
        forward, backward = style.collectives()
        return [(what, size) for what in Counter(forward).elements()], [(w, size) for w in Counter(backward).elements()]
    features_in = getattr(module, "in_features", 0)  # an embedding has none: its indices have no gradient
    features_out = getattr(module, "out_features", getattr(module, "embedding_dim", 0))
    if isinstance(style, ColwiseParallel):
        return _of_colwise(style, features_in, features_out)
    if isinstance(style, RowwiseParallel):
        return _of_rowwise(style, features_in, features_out)
    return ([], []) if hasattr(style, "rules") else None  # those of ours that communicate have collectives()


def _of_colwise(style: "ColwiseParallel", features_in: int, features_out: int) -> tuple[Sized, Sized]:
    """Of torch's column-wise linear layer or embedding."""
    whole_input = style.input_layouts[0].is_replicate()
    gathered = [("all_gather", features_in)] if features_in and not whole_input else []
    joined = [("all_gather", features_out)] if style.output_layouts[0].is_replicate() else []
    summed = [("all_reduce" if whole_input else "reduce_scatter", features_in)] if features_in else []
    return gathered + joined, summed


def _of_rowwise(style: "RowwiseParallel", features_in: int, features_out: int) -> tuple[Sized, Sized]:
    """Of torch's row-wise linear layer or embedding."""
    whole_output = style.output_layouts[0].is_replicate()
    summed = [("all_reduce" if whole_output else "reduce_scatter", features_out)]
    spread = [] if whole_output else [("all_gather", features_out)]
    split = [("all_gather", features_in)] if features_in and style.input_layouts[0].is_replicate() else []
    return summed, spread + split


def _row(where: str, kind: tuple[_Communication, ...], count: int, *, tp: int, in_layers: bool) -> CollectiveRow:
    forward = [run for each in kind for run in each.forward]
    backward = [run for each in kind for run in each.backward]
    return CollectiveRow(
        where=where,
        parts=tuple(dict.fromkeys(each.name for each in kind)) if in_layers else (),
        in_layers=in_layers,
        count=count,
        forward=dict(Counter(what for what, _ in forward)),
        backward=dict(Counter(what for what, _ in backward)),
        forward_bytes=sum(size for _, size in forward),
        backward_bytes=sum(size for _, size in backward),
        sent_bytes=round(sum(_sent(what, size, tp) for what, size in (*forward, *backward))),
        untold=tuple(dict.fromkeys(each.style for each in kind if not each.told)),
    )


def _sent(what: str, size: int, tp: int) -> float:
    share = size * (tp - 1) / tp
    return {"all_reduce": 2 * share, "all_to_all": share / tp}.get(what, share)


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
