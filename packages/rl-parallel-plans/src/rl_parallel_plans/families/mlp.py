"""Feed-forward blocks, their intermediate features shared out: gated or not, fused or not, and mixtures of experts.

Every rank routes every token, with the same numbers, and computes its features of every expert: routers, and the gate
of a shared expert, are whole and their gradients sums. All of a mixture is one block with one sum over ranks.
"""

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import Shard

from rl_parallel_plans.checkpoints import halves_in_order
from rl_parallel_plans.families.parts import (
    Layout,
    NotRecognizedError,
    Styles,
    linear,
    own_parameters,
    parts,
    refuse_unknown,
    replicated_inside,
    under,
    whole_block,
)
from rl_parallel_plans.styles import Colwise, Experts, Norm, OwnRules, PackedColwise, ParameterRule, SharedIdentity
from rl_parallel_plans.styles.table import REPLICATED_PARTIAL

# (column-wise layers, row-wise layer): the first whose parts are all there.
LAYOUTS = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("w1", "w3"), "w2"),
    (("fc1",), "fc2"),
    (("c_fc",), "c_proj"),
    (("up_proj",), "down_proj"),
    (("wi_0", "wi_1"), "wo"),
    (("c_fc_0", "c_fc_1"), "c_proj"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("linear_1",), "linear_2"),
    (("gate_up_proj",), "down_proj"),
    (("input_linear",), "output_linear"),
)
FUSED = (("gate_up_proj",), ("input_linear",))
LISTED = ("input_linear", "output_linear")
STACKED = 3
"""Dims of a weight that holds all experts."""
ROUTERS = ("gate", "router", "moe_statics")
BIASES = ("expert_bias", "e_score_correction_bias")
SHARED = ("shared_expert", "shared_experts", "shared_mlp")


def mlp_block(module: nn.Module, layout: Layout) -> Styles | None:
    """Styles of a dense feed-forward block; None where it is none. NotRecognizedError for unknown parts."""
    styles = dense(module, layout)
    if styles is None:
        return None
    if getattr(module, "activation_sparsity", 0):  # Gemma 3n keeps the largest of all features, which no rank has alone
        return whole_block(module, layout)
    styles[""] = layout.block()
    refuse_unknown(module, styles, kind="feed-forward block")
    return styles


def dense(module: nn.Module, layout: Layout) -> Styles | None:
    """Styles of the parts of a dense feed-forward network, without its borders."""
    styles = next(filter(None, (_layers(module, layout, columns, row) for columns, row in LAYOUTS)), None)
    if styles is None:
        return None
    if "ffn_sub_norm" in parts(module):  # BitNet normalizes the intermediate features
        styles["ffn_sub_norm"] = Norm()
    for name in ("act_fn", "act"):  # an activation with parameters (xIELU of Apertus) is the same for every feature
        if name in parts(module):
            styles |= replicated_inside(module, name)
    return styles


def _layers(module: nn.Module, layout: Layout, *names: Any) -> Styles | None:
    (columns, row), output = names, linear(module, names[1])
    fused = columns in FUSED
    layers = [linear(module, name) for name in columns]
    if output is None or any(f is None or f.out_features != (1 + fused) * output.in_features for f in layers):
        return None
    half = output.in_features
    style = PackedColwise((half, half), (half, half)) if fused else Colwise(half)
    return {**dict.fromkeys(columns, style), row: layout.output(output)}


def mixture_block(module: nn.Module, config: Any, layout: Layout) -> Styles | None:
    """Styles of a mixture of experts; None where it is none. NotRecognizedError for unknown parts."""
    children = parts(module)
    if "experts" not in children and not _listed_experts(module):
        return None
    if layout.projections == "colwise":
        raise NotRecognizedError("column-wise output projections are for dense models, and it has experts")
    if getattr(config, "output_router_logits", False):
        raise NotRecognizedError(
            "config.output_router_logits is True: the router's gradient from an auxiliary loss would be counted once "
            "per rank; set it to False"
        )
    stack = children.get("experts")
    styles = _split_by_counts(module) if stack is None else under("experts", experts(stack, layout))
    for name in children:
        if name in ROUTERS or name == "shared_expert_gate":
            styles |= replicated_inside(module, name)
        elif name in SHARED:
            shared = dense(children[name], layout)
            if shared is None:
                raise NotRecognizedError(f"its {name} is a {type(children[name]).__name__}, which no rule knows")
            styles |= under(name, shared)
    styles[""] = layout.block(table={name: REPLICATED_PARTIAL for name in own_parameters(module) if name in BIASES})
    refuse_unknown(module, styles, kind="mixture of experts")
    return styles


def experts(module: nn.Module, layout: Layout) -> Styles:
    """Styles of stacked experts, or of a list of feed-forward networks."""
    styles: Styles = {}
    if not isinstance(module, nn.ModuleList):
        identities = [name for name, child in module.named_children() if isinstance(child, nn.Identity)]
        return {"": stacked(module), **{name: SharedIdentity() for name in identities}}
    for name, expert in module.named_children():
        if isinstance(expert, nn.Identity):  # LongCat's experts that do nothing
            styles[name] = SharedIdentity()
            continue
        found = dense(expert, layout)
        if found is None:
            raise NotRecognizedError(f"expert {name} is a {type(expert).__name__}, which no rule knows")
        styles |= {f"{'*' if name.isdigit() else name}.{path}": style for path, style in found.items()}
    return styles


def _listed_experts(module: nn.Module) -> bool:
    """Granite's experts before transformers 5: a 3-D weight in each of two modules, called with tokens by expert."""
    layers = [getattr(module, name, None) for name in LISTED]
    weights = [layer.weight for layer in layers if isinstance(layer, nn.Module) and hasattr(layer, "weight")]
    return len(weights) == len(layers) and all(isinstance(w, Tensor) and w.ndim == STACKED for w in weights)


def _split_by_counts(module: nn.Module) -> Styles:
    fused, down = (tuple(module.get_submodule(name).get_parameter("weight").shape) for name in LISTED)
    if fused != (down[0], 2 * down[2], down[1]):
        raise NotRecognizedError(f"its experts have the weights {fused} and {down}, which no rule knows")
    return {
        "input_linear": OwnRules({"weight": ParameterRule(placement=Shard(1), row_order=halves_in_order)}),
        "output_linear": OwnRules({"weight": ParameterRule(placement=Shard(2))}),
    }


def stacked(module: nn.Module) -> Experts:
    """The style of experts in 3-D parameters, from their shapes and from what their class says of its layout."""
    shapes = {name: tuple(p.shape) for name, p in own_parameters(module).items()}
    up, down = shapes.get("gate_up_proj", shapes.get("up_proj")), shapes.get("down_proj")
    known = {"gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias"}
    if up is None or down is None or len(up) != 3 or len(down) != 3 or not shapes.keys() <= known or parts(module):
        raise NotRecognizedError(f"its experts are a {type(module).__name__} with {shapes}, which no rule knows")
    factor = 2 if "gate_up_proj" in shapes else 1
    layouts = {
        transposed
        for transposed, (intermediate, fused, hidden_up, hidden_down) in {
            False: (down[2], up[1], up[2], down[1]),
            True: (down[1], up[2], up[1], down[2]),
        }.items()
        if fused == factor * intermediate and hidden_up == hidden_down
    }
    stated = getattr(module, "is_transposed", None)
    if isinstance(stated, bool) and stated in layouts:
        layouts = {stated}
    if len(layouts) != 1:
        raise NotRecognizedError(f"its experts ({type(module).__name__}) with {shapes} can be read in two ways")
    transposed = layouts.pop()
    return Experts(
        intermediate_size=down[1] if transposed else down[2],
        transposed=transposed,
        interleaved=factor == 2 and _interleaved(module),
    )


def _interleaved(module: nn.Module) -> bool:
    stated = getattr(module, "is_concatenated", None)
    # Before transformers 5 no class says so; GPT-OSS alone alternates gate and up.
    return not stated if isinstance(stated, bool) else type(module).__name__ == "GptOssExperts"
