"""Attention that is linear in the sequence, its heads shared out: delta nets, lightning attention, short convolutions.

    Gated DeltaNet (arXiv:2412.06464; Qwen3-Next, Qwen3.5, OLMo Hybrid); Kimi Delta Attention (arXiv:2510.26692)
        projections          rows by key or value heads, packed [q | k | v] in the order of the ranks
        conv1d               channels [q | k | v] alike
        A_log, dt_bias       by value heads
        norm over one head   whole, its gradient a sum;           output columns
    Lightning attention (arXiv:2501.08313; MiniMax)
        rows by heads, decay constants by heads, a norm over all heads across ranks
    Gated short convolution (LFM2)
        in_proj [B | C | x] and conv by channels

A group of value heads reads one key head: both are cut between the same heads.
"""

from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import Shard

from rl_parallel_plans.checkpoints import segments_read
from rl_parallel_plans.families.parts import (
    Layout,
    NotRecognizedError,
    Styles,
    linear,
    own_parameters,
    parts,
    refuse_unknown,
    replicated_inside,
)
from rl_parallel_plans.styles import Colwise, Norm, OwnRules, PackedColwise, ParameterRule, ReplicatedParallel, Rowwise
from rl_parallel_plans.styles.table import ROWS

# Layers by what their rows are: of all key heads, all value heads, or one row a value head.
BY_KEY_HEADS = ("q_proj", "k_proj")
BY_VALUE_HEADS = ("v_proj", "g_proj", "g_b_proj", "in_proj_z", "a_proj", "b_proj", "in_proj_a", "in_proj_b")
WHOLE = ("g_a_proj",)
OUTPUTS = ("out_proj", "o_proj")
NORMS = ("norm", "o_norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSizes:
    """Sizes of one gated delta net."""

    key_heads: int
    """Heads of queries and keys."""
    value_heads: int
    """Heads of values; a multiple."""
    key_size: int
    """Features of one key head."""
    value_size: int
    """Features of one value head."""

    @property
    def segments(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Rows of [q | k | v], and the indivisible units of each."""
        keys, values = self.key_heads * self.key_size, self.value_heads * self.value_size
        return (keys, keys, values), (self.key_heads, self.key_heads, self.value_heads)

    def attributes(self, tp: int) -> dict[str, int]:
        """What one rank's module must read."""
        (keys, _, values), _ = self.segments
        return {
            "num_heads": self.value_heads // tp,
            "num_k_heads": self.key_heads // tp,
            "num_v_heads": self.value_heads // tp,
            "key_dim": keys // tp,
            "value_dim": values // tp,
            "qkv_dim": values // tp,
            "conv_dim": (2 * keys + values) // tp,
        }


def linear_attention_block(module: nn.Module, layout: Layout) -> Styles | None:
    """Styles of linear attention; None where it is none. NotRecognizedError for unknown parts."""
    own, children = own_parameters(module), parts(module)
    if {"in_proj", "conv", "out_proj"} == children.keys() and isinstance(module.get_submodule("conv"), nn.Conv1d):
        styles = _short_convolution(module, layout)
    elif {"A_log", "dt_bias"} <= own.keys() or "forget_gate" in children:
        styles = _delta_net(module, layout)
    elif hasattr(module, "slope_rate"):
        styles = _lightning(module, layout)
    else:
        return None
    refuse_unknown(module, styles, kind="linear attention")
    return styles


def _delta_net(module: nn.Module, layout: Layout) -> Styles:
    sizes = _delta_sizes(module)
    segments, units = sizes.segments
    styles = _delta_projections(module, sizes, tp=layout.tp)
    convolution = module.get_submodule("conv1d")
    if not _depthwise(convolution, sum(segments)):
        raise NotRecognizedError(f"the convolution of its linear attention is not one filter for each of {segments}")
    styles["conv1d"] = inside = PackedColwise(segments, units, "heads")
    for name in NORMS:
        if name in parts(module):
            if {tuple(p.shape) for p in module.get_submodule(name).parameters()} != {(sizes.value_size,)}:
                raise NotRecognizedError(f"{name} of its linear attention is not over one head of {sizes.value_size}")
            styles |= replicated_inside(module, name)
    output = next((name for name in OUTPUTS if linear(module, name) is not None), None)
    if output is None:
        raise NotRecognizedError(f"its linear attention ({type(module).__name__}) has no output among {OUTPUTS}")
    styles[output] = Rowwise()
    styles[""] = layout.block(
        units={"key heads": sizes.key_heads, "value heads": sizes.value_heads},
        table=dict.fromkeys(own_parameters(module), ROWS),
        sizes=sizes.attributes(layout.tp),
        reads={"conv1d": inside},
    )
    return styles


def _delta_sizes(module: nn.Module) -> DeltaSizes:
    def size(*names: str) -> int:
        found = next((value for name in names if isinstance(value := getattr(module, name, None), int)), None)
        if found is None:
            raise NotRecognizedError(f"its linear attention ({type(module).__name__}) has none of {names}")
        return found

    sizes = DeltaSizes(
        key_heads=size("num_k_heads", "num_heads"),
        value_heads=size("num_v_heads", "num_heads"),
        key_size=size("head_k_dim", "head_dim"),
        value_size=size("head_v_dim", "head_dim"),
    )
    shapes = {name: tuple(p.shape) for name, p in own_parameters(module).items()}
    if sizes.value_heads % sizes.key_heads or any(shape != (sizes.value_heads,) for shape in shapes.values()):
        raise NotRecognizedError(f"its linear attention has {sizes} and parameters {shapes}: its layout is unknown")
    return sizes


def _delta_projections(module: nn.Module, sizes: DeltaSizes, *, tp: int) -> Styles:
    (keys, _, values), units = sizes.segments
    heads = sizes.value_heads
    rows = {
        **dict.fromkeys(BY_KEY_HEADS, (keys, sizes.key_heads, "key heads")),
        **dict.fromkeys(BY_VALUE_HEADS, (values, heads, "value heads")),
        "in_proj_qkvz": (2 * (keys + values), sizes.key_heads, "key heads"),
        "in_proj_ba": (2 * heads, sizes.key_heads, "key heads"),
    }
    styles: Styles = {}
    for name, child in parts(module).items():
        if name == "in_proj_qkv":
            styles[name] = PackedColwise(sizes.segments[0], units, "heads")
        elif name in WHOLE:
            styles |= replicated_inside(module, name)
        elif name == "forget_gate":
            styles |= _forget_gate(child, heads, tp=tp)
        elif name in rows:
            expected, count, what = rows[name]
            layer = linear(module, name)
            if layer is None or layer.out_features not in (expected, heads if name in BY_VALUE_HEADS else expected):
                raise NotRecognizedError(f"{name} of its linear attention has not the {expected} rows of its {what}")
            styles[name] = Colwise(count, what)
    return styles


def _forget_gate(gate: nn.Module, heads: int, *, tp: int) -> Styles:
    """The decay of Kimi Delta Attention: two layers, the second by heads, as its own parameters are."""
    rows, own = linear(gate, "f_b_proj"), own_parameters(gate)
    sharded = {name: [d for d, n in enumerate(p.shape) if n > 1 and n % heads == 0] for name, p in own.items()}
    fits = rows is not None and rows.out_features % heads == 0 and all(len(dims) == 1 for dims in sharded.values())
    if not fits or linear(gate, "f_a_proj") is None:
        raise NotRecognizedError(f"the {type(gate).__name__} of its linear attention is not known")
    table = {name: ParameterRule(placement=Shard(dims[0])) for name, dims in sharded.items()}
    sizes = {name: size // tp for name in ("num_heads", "qkv_dim") if isinstance(size := gate.__dict__.get(name), int)}
    return {
        "forget_gate": OwnRules(table, sizes),
        "forget_gate.f_a_proj": ReplicatedParallel(partial_gradient=True),
        "forget_gate.f_b_proj": Colwise(heads, "heads"),
    }


def _short_convolution(module: nn.Module, layout: Layout) -> Styles:
    rows, output = linear(module, "in_proj"), linear(module, "out_proj")
    channels = 0 if output is None else output.in_features
    if rows is None or rows.out_features != 3 * channels or not _depthwise(module.get_submodule("conv"), channels):
        raise NotRecognizedError(
            f"its short convolution ({type(module).__name__}) is not [B | C | x] of {channels} channels"
        )
    convolution = PackedColwise((channels,), (channels,), "channels")
    return {
        "in_proj": PackedColwise((channels,) * 3, (channels,) * 3, "channels"),
        "conv": convolution,
        "out_proj": Rowwise(),
        "": layout.block(units={"channels": channels}, reads={"conv": convolution}),
    }


def _lightning(module: nn.Module, layout: Layout) -> Styles:
    heads, size = getattr(module, "num_attention_heads", 0), getattr(module, "head_dim", 0)
    layers = {"qkv_proj": 3 * heads * size, "output_gate": heads * size}
    found = {name: layer.out_features for name in layers if (layer := linear(module, name)) is not None}
    if not heads or found != layers or linear(module, "out_proj") is None:
        raise NotRecognizedError(f"its linear attention ({type(module).__name__}) has {found}; expected are {layers}")
    buffers = {}
    for name, buffer in module.named_buffers(recurse=False):
        dims = [d for d, n in enumerate(buffer.shape) if n == heads][:1] if buffer.ndim > 2 else []
        if not dims or dims[0] > 1:
            raise NotRecognizedError(
                f"its linear attention has a buffer {name} {list(buffer.shape)}, which no rule knows"
            )
        buffers[name] = (dims[0], segments_read([heads]))
    return {
        **{name: Colwise(heads, "heads") for name in layers},
        "norm": Norm(),
        "out_proj": Rowwise(),
        "": layout.block(units={"heads": heads}, sizes={"num_attention_heads": heads // layout.tp}, buffers=buffers),
    }


def _depthwise(module: nn.Module, channels: int) -> bool:
    return isinstance(module, nn.Conv1d) and module.groups == module.in_channels == module.out_channels == channels
