"""Feed-forward blocks, their intermediate features shared out: gated or not, fused or not, and mixtures of experts.

Every rank routes every token, with the same numbers, and computes its features of every expert: routers, and the gate
of a shared expert, are whole and their gradients sums. All of a mixture is one block with one sum over ranks.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from rl_parallel_plans.families.attention import Projections
from rl_parallel_plans.families.parts import (
    NotRecognizedError,
    linear,
    own_parameters,
    parts,
    refuse_unknown,
    replicated_inside,
    whole_block,
)

if TYPE_CHECKING:
    from rl_parallel_plans.families.parts import Styles

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
)
FUSED = (("gate_up_proj", "down_proj"), ("input_linear", "output_linear"))
STACKED = 3
"""Dims of a weight that holds all experts."""
ROUTERS = ("gate", "router", "moe_statics")
BIASES = ("expert_bias", "e_score_correction_bias")
SHARED = ("shared_expert", "shared_experts", "shared_mlp")


def mlp_block(module: nn.Module, *, sequence_parallel: bool, projections: Projections) -> "Styles | None":
    """Styles of a dense feed-forward block; None where it is none. NotRecognizedError for unknown parts."""
    from rl_parallel_plans.styles import BlockParallel

    styles = dense(module, projections=projections)
    if styles is None:
        return None
    if getattr(module, "activation_sparsity", 0):  # Gemma 3n keeps the largest of all features, which no rank has alone
        return whole_block(module, sequence_parallel=sequence_parallel)
    styles[""] = BlockParallel(
        sequence_parallel=sequence_parallel, output="features" if projections == "colwise" else "sum"
    )
    refuse_unknown(module, styles, kind="feed-forward block")
    return styles


def dense(module: nn.Module, *, projections: Projections = "rowwise") -> "Styles | None":
    """Styles of the parts of a dense feed-forward network, without its borders."""
    from rl_parallel_plans.styles import BlockColwise, BlockGatheredColwise, BlockNorm, BlockPackedColwise, BlockRowwise

    styles: Styles = {}
    for columns, row in LAYOUTS:
        layers = [linear(module, name) for name in columns]
        output = linear(module, row)
        if output is not None and all(
            layer is not None and layer.out_features == output.in_features for layer in layers
        ):
            styles |= {
                n: BlockColwise(units=f.out_features) for n, f in zip(columns, layers, strict=True) if f is not None
            }
            break
    else:
        for fused, row in FUSED:
            layer, output = linear(module, fused), linear(module, row)
            if layer is not None and output is not None and layer.out_features == 2 * output.in_features:
                half = output.in_features
                styles[fused] = BlockPackedColwise([half, half], units=[half, half])
                break
        else:
            return None
    if projections == "colwise":
        styles[row] = BlockGatheredColwise(units=module.get_submodule(row).out_features)  # type: ignore[arg-type]
    else:
        styles[row] = BlockRowwise()
    if "ffn_sub_norm" in parts(module):  # BitNet normalizes the intermediate features
        styles["ffn_sub_norm"] = BlockNorm()
    for name in ("act_fn", "act"):  # an activation with parameters (xIELU of Apertus) is the same for every feature
        if name in parts(module):
            styles |= replicated_inside(module, name)
    return styles


def mixture_block(
    module: nn.Module, config: Any, *, sequence_parallel: bool, projections: Projections
) -> "Styles | None":
    """Styles of a mixture of experts; None where it is none. NotRecognizedError for unknown parts."""
    from rl_parallel_plans.styles import BlockParallel
    from rl_parallel_plans.styles.local_parameters import REPLICATED_PARTIAL

    children = parts(module)
    if "experts" not in children and not _listed_experts(module):
        return None
    if projections == "colwise":
        raise NotRecognizedError("column-wise output projections are for dense models, and it has experts")
    if getattr(config, "output_router_logits", False):
        raise NotRecognizedError(
            "config.output_router_logits is True: the router's gradient from an auxiliary loss would be counted once "
            "per rank; set it to False"
        )
    styles = _under("experts", experts(children["experts"])) if "experts" in children else _split_by_counts(module)
    for name in children:
        if name in ROUTERS or name == "shared_expert_gate":
            styles |= replicated_inside(module, name)
        elif name in SHARED:
            shared = dense(children[name])
            if shared is None:
                raise NotRecognizedError(f"its {name} is a {type(children[name]).__name__}, which no rule knows")
            styles |= _under(name, shared)
    own = {name: REPLICATED_PARTIAL for name in own_parameters(module) if name in BIASES}
    styles[""] = BlockParallel(sequence_parallel=sequence_parallel, own=own)
    refuse_unknown(module, styles, kind="mixture of experts")
    return styles


def experts(module: nn.Module) -> "Styles":
    """Styles of stacked experts, or of a list of feed-forward networks."""
    from rl_parallel_plans.styles import BlockShare

    styles: Styles = {}
    if not isinstance(module, nn.ModuleList):
        identities = [name for name, child in module.named_children() if isinstance(child, nn.Identity)]
        return {"": stacked(module), **{name: BlockShare() for name in identities}}
    for name, expert in module.named_children():
        if isinstance(expert, nn.Identity):  # LongCat's experts that do nothing
            styles[name] = BlockShare()
            continue
        found = dense(expert)
        if found is None:
            raise NotRecognizedError(f"expert {name} is a {type(expert).__name__}, which no rule knows")
        styles |= {f"{'*' if name.isdigit() else name}.{path}": style for path, style in found.items()}
    return styles


def _listed_experts(module: nn.Module) -> bool:
    """Granite's experts before transformers 5: a 3-D weight in each of two modules, called with tokens by expert."""
    layers = [getattr(module, name, None) for name in ("input_linear", "output_linear")]
    weights = [layer.weight for layer in layers if isinstance(layer, nn.Module) and hasattr(layer, "weight")]
    return len(weights) == len(layers) and all(isinstance(w, Tensor) and w.ndim == STACKED for w in weights)


def _split_by_counts(module: nn.Module) -> "Styles":
    from torch.distributed.tensor import Shard

    from rl_parallel_plans.checkpoints import halves_in_order
    from rl_parallel_plans.styles import BlockParameters, ParameterRule

    fused, down = (tuple(module.get_submodule(name).get_parameter("weight").shape) for name in FUSED[1])
    if fused != (down[0], 2 * down[2], down[1]):
        raise NotRecognizedError(f"its experts have the weights {fused} and {down}, which no rule knows")
    return {
        "input_linear": BlockParameters({"weight": ParameterRule(placement=Shard(1), row_order=halves_in_order)}),
        "output_linear": BlockParameters({"weight": ParameterRule(placement=Shard(2))}),
    }


def stacked(module: nn.Module) -> "Any":
    """The style of experts in 3-D parameters, from their shapes and from what their class says of its layout."""
    from rl_parallel_plans.styles import BlockExperts

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
    return BlockExperts(
        intermediate_size=down[1] if transposed else down[2],
        transposed=transposed,
        interleaved=factor == 2 and _interleaved(module),
    )


def _interleaved(module: nn.Module) -> bool:
    stated = getattr(module, "is_concatenated", None)
    # Before transformers 5 no class says so; GPT-OSS alone alternates gate and up.
    return not stated if isinstance(stated, bool) else type(module).__name__ == "GptOssExperts"


def _under(name: str, styles: "Styles") -> "Styles":
    return {f"{name}.{path}" if path else name: style for path, style in styles.items()}
