"""One decoder layer from its parts: which are blocks, which stand between blocks, and what enters beside the stream.

Every parameter must be of a known part: a plan that is nearly right is wrong.
"""

from typing import TYPE_CHECKING

from torch import nn

from rl_parallel_plans.families.attention import Projections, attention_block
from rl_parallel_plans.families.linear_attention import linear_attention_block
from rl_parallel_plans.families.mamba import mamba_block
from rl_parallel_plans.families.mlp import mixture_block, mlp_block, stacked
from rl_parallel_plans.families.parts import NotRecognizedError, linear, own_parameters, parts, under, whole_inside

if TYPE_CHECKING:
    from rl_parallel_plans.families.parts import Styles

LEFT_WHOLE = ("altup", "laurel")
"""Children that compute on the whole residual stream beside the blocks (Gemma 3n)."""
LAYER_INPUTS = {"per_layer_input_gate": "per_layer_input"}
"""Child of a layer to the argument of the layer's forward that comes with it (Gemma 4)."""


def layer_styles(
    layer: nn.Module, config: object, *, tp: int, sequence_parallel: bool, projections: Projections
) -> "Styles":
    """Styles of one decoder layer by path inside it.

    sequence_parallel: whether its blocks take a stream that is cut along the sequence; not where `why_whole` says why.
    """
    if own := own_parameters(layer):
        raise NotRecognizedError(f"its {type(layer).__name__} itself holds parameters {sorted(own)}")
    styles = {**_spread_blocks(layer), **_left_whole(layer)}
    for name, child in _children(layer).items():
        if any(path.split(".")[0] == name for path in styles):
            continue
        found = (
            mixture_block(child, config, sequence_parallel=sequence_parallel, projections=projections)
            or mixer_block(child, tp=tp, sequence_parallel=sequence_parallel, projections=projections)
            or attention_block(child, config, tp=tp, sequence_parallel=sequence_parallel, projections=projections)
            or mlp_block(child, sequence_parallel=sequence_parallel, projections=projections)
            or _between_blocks(child, sequence_parallel=sequence_parallel)
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


def stream_styles(layers: nn.ModuleList, path: str) -> "Styles":
    """Where the residual stream is cut along the sequence, and what enters later layers beside it."""
    from rl_parallel_plans.styles import SplitSequence

    styles: Styles = {f"{path}.0": SplitSequence()}
    for index, layer in layers.named_children():
        arguments = [name for child, name in LAYER_INPUTS.items() if child in parts(layer)]
        if arguments:
            first = ["hidden_states"] if index == "0" else []
            styles[f"{path}.{index}"] = SplitSequence((*first, *arguments))
    return styles


def mixer_block(module: nn.Module, *, tp: int, sequence_parallel: bool, projections: Projections) -> "Styles | None":
    """Styles of linear attention or a state-space mixer; None where it is neither."""
    styles = mamba_block(module, tp=tp, sequence_parallel=sequence_parallel) or linear_attention_block(
        module, tp=tp, sequence_parallel=sequence_parallel
    )
    if styles is not None and projections == "colwise":
        raise NotRecognizedError(
            "column-wise output projections are for attention and feed-forward blocks, and it has a "
            f"{type(module).__name__}"
        )
    return styles


def _children(layer: nn.Module) -> dict[str, nn.Module]:
    """Parts of the layer; those in a list (LongCat's two attentions) each by itself."""
    found: dict[str, nn.Module] = {}
    for name, child in parts(layer).items():
        if isinstance(child, nn.ModuleList):
            found |= {f"{name}.{index}": item for index, item in parts(child).items()}
        else:
            found[name] = child
    return found


def _left_whole(layer: nn.Module) -> "Styles":
    """Children whose methods the layer calls, on the whole residual stream."""
    from rl_parallel_plans.styles import ReadsInside

    names = tuple(name for name in LEFT_WHOLE if name in parts(layer))
    styles: Styles = {path: style for name in names for path, style in whole_inside(layer, name).items()}
    return {**styles, "": ReadsInside(names)} if names else {}


def _spread_blocks(layer: nn.Module) -> "Styles":
    """Blocks whose parts the layer calls one by one."""
    styles: Styles = {}
    if {"router", "experts"} <= parts(layer).keys():
        styles |= _experts_of_layer(layer)
    first, second = linear(layer, "fc1"), linear(layer, "fc2")
    if first is not None and second is not None:
        styles |= _feed_forward_of_layer(layer, first, second)
    return styles


def _experts_of_layer(layer: nn.Module) -> "Styles":
    """Experts that are a block by themselves, with a router outside of it that every rank computes whole (Gemma 4)."""
    from rl_parallel_plans.styles import Block

    features = stacked(layer.get_submodule("experts"))
    units = {"intermediate features an expert": features.intermediate_size}
    own = features.rules(layer.get_submodule("experts"))
    return {**whole_inside(layer, "router"), "experts": Block(units=units, own=own)}


def _feed_forward_of_layer(layer: nn.Module, first: nn.Linear, second: nn.Linear) -> "Styles":
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    if (
        first.in_features != second.out_features
        or first.out_features != second.in_features
        or "ffn_layernorm" in parts(layer)
    ):
        raise NotRecognizedError(f"fc1 and fc2 of its {type(layer).__name__} do not follow one another")
    return {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()}


def _between_blocks(module: nn.Module, *, sequence_parallel: bool) -> "Styles | None":
    """A norm or a linear layer between blocks, which treats each position by itself."""
    from rl_parallel_plans.styles import ReplicatedParallel, SequenceShardedParallel

    vectors = all(p.ndim <= 1 for p in own_parameters(module).values())
    if parts(module) or not (vectors or isinstance(module, nn.Linear)):
        return None
    return {"": SequenceShardedParallel() if sequence_parallel else ReplicatedParallel()}
