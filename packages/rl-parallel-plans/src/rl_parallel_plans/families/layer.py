"""One decoder layer from its parts: which are blocks, which stand between blocks, and what enters beside the stream.

Every parameter must be of a known part: a plan that is nearly right is wrong.
"""

from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from rl_parallel_plans.families.attention import attention_block
from rl_parallel_plans.families.linear_attention import linear_attention_block
from rl_parallel_plans.families.mamba import mamba_block
from rl_parallel_plans.families.mlp import mixture_block, mlp_block, stacked
from rl_parallel_plans.families.parts import (
    Layout,
    NotRecognizedError,
    Styles,
    linear,
    own_parameters,
    parts,
    under,
    whole_inside,
)
from rl_parallel_plans.structure import joined
from rl_parallel_plans.styles import Block, ReadsInside, ReplicatedParallel, SequenceShardedParallel, SplitSequence

LEFT_WHOLE = ("altup", "laurel")
"""Children that compute on the whole residual stream beside the blocks (Gemma 3n)."""
LAYER_INPUTS = {"per_layer_input_gate": "per_layer_input"}
"""Child of a layer to the argument of the layer's forward that comes with it (Gemma 4)."""


def layer_styles(layer: nn.Module, config: object, layout: Layout) -> Styles:
    """Styles of one decoder layer by path inside it; it is for whole sequences where `why_whole` says why."""
    if own := own_parameters(layer):
        raise NotRecognizedError(f"its {type(layer).__name__} itself holds parameters {sorted(own)}")
    styles = {**_spread_blocks(layer), **_left_whole(layer)}
    for name, child in _children(layer).items():
        if any(path.split(".")[0] == name for path in styles):
            continue
        found = (
            mixture_block(child, config, layout)
            or mixer_block(child, layout)
            or attention_block(child, config, layout)
            or mlp_block(child, layout)
            or _between_blocks(child, layout)
        )
        if found is None:
            raise NotRecognizedError(
                f"{type(layer).__name__}.{name} is a {type(child).__name__} with the parts {sorted(parts(child))}, "
                "which no rule knows"
            )
        styles |= under(name, found)
    return styles


def why_whole(layer: nn.Module) -> str | None:
    """What the layer's own code does with the stream that a rank cannot do on a part of the sequence, if anything."""
    children = parts(layer)
    kind = type(layer).__name__
    if {"router", "experts"} <= children.keys():
        return f"{kind} calls router and experts one by one, on positions in an order of its own"
    if linear(layer, "fc1") is not None and linear(layer, "fc2") is not None:
        return f"{kind} calls fc1 and fc2 one by one, on positions in an order of its own"
    if found := [name for name in LEFT_WHOLE if name in children]:
        return f"{kind} has several residual streams and mixes them itself ({', '.join(found)})"
    return None


def stream_styles(layers: nn.ModuleList, path: str) -> Styles:
    """Where the residual stream is cut along the sequence, and what enters later layers beside it."""
    styles: Styles = {f"{path}.0": SplitSequence()}
    for index, layer in layers.named_children():
        arguments = [name for child, name in LAYER_INPUTS.items() if child in parts(layer)]
        if arguments:
            first = ["hidden_states"] if index == "0" else []
            styles[f"{path}.{index}"] = SplitSequence((*first, *arguments))
    return styles


def mixer_block(module: nn.Module, layout: Layout) -> Styles | None:
    """Styles of linear attention or a state-space mixer; None where it is neither."""
    styles = mamba_block(module, layout) or linear_attention_block(module, layout)
    if styles is not None and layout.projections == "colwise":
        raise NotRecognizedError(
            "column-wise output projections are for attention and feed-forward blocks, and it has a "
            f"{type(module).__name__}"
        )
    return styles


def _children(layer: nn.Module) -> dict[str, nn.Module]:
    """Parts of the layer; those in a list (LongCat's two attentions) each by itself."""
    lists = {n: parts(child) if isinstance(child, nn.ModuleList) else {"": child} for n, child in parts(layer).items()}
    return {joined(name, index): item for name, items in lists.items() for index, item in items.items()}


def _left_whole(layer: nn.Module) -> Styles:
    """Children whose methods the layer calls, on the whole residual stream."""
    names = tuple(name for name in LEFT_WHOLE if name in parts(layer))
    styles: Styles = {path: style for name in names for path, style in whole_inside(layer, name).items()}
    return {**styles, "": ReadsInside(names)} if names else {}


def _spread_blocks(layer: nn.Module) -> Styles:
    """Blocks whose parts the layer calls one by one."""
    styles: Styles = {}
    children = parts(layer)
    if {"router", "experts"} <= children.keys():  # the router is whole on every rank, and outside of the block
        features = stacked(children["experts"])
        units = {"intermediate features an expert": features.intermediate_size}
        styles |= whole_inside(layer, "router")
        styles["experts"] = Block(units=units, table=features.rules(children["experts"]))
    first, second = linear(layer, "fc1"), linear(layer, "fc2")
    if first is not None and second is not None:
        fit = (first.in_features, first.out_features) == (second.out_features, second.in_features)
        if not fit or "ffn_layernorm" in children:
            raise NotRecognizedError(f"fc1 and fc2 of its {type(layer).__name__} do not follow one another")
        styles |= {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()}
    return styles


def _between_blocks(module: nn.Module, layout: Layout) -> Styles | None:
    """A norm or a linear layer between blocks, which treats each position by itself."""
    vectors = all(p.ndim <= 1 for p in own_parameters(module).values())
    if parts(module) or not (vectors or isinstance(module, nn.Linear)):
        return None
    return {"": SequenceShardedParallel() if layout.sequence_parallel else ReplicatedParallel()}
