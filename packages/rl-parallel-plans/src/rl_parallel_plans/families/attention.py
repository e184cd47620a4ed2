"""Softmax attention, its heads shared out: separate or fused q, k and v, and multi-head latent attention (MLA).

q_proj k_proj v_proj | qkv_proj     rows by heads             o_proj    columns
q_norm k_norm over one head         whole, gradients summed
              over all heads        a norm across ranks (OLMo 2)
              a weight per head     rows by heads (Cohere)
MLA (DeepSeek-V2, arXiv:2405.04434): q_b_proj and kv_b_proj by heads; all that leads to them whole, and the indexer
that chooses positions for all heads at once (DeepSeek-V3.2)
sinks [heads]                       by heads (GPT-OSS)

Fewer key/value heads than ranks, a divisor of them: each head is that of a group of ranks. k_proj and v_proj are whole,
a rank computes its head, and the gradients of all ranks are summed; the rows of a fused qkv_proj are gathered.
"""

from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from rl_parallel_plans.families.parts import (
    Layout,
    NotRecognizedError,
    Styles,
    first_linear,
    linear,
    own_parameters,
    parts,
    refuse_unknown,
    replicated_inside,
)
from rl_parallel_plans.structure import head_size, reshapes_to_input_width
from rl_parallel_plans.styles import Colwise, Norm, PackedColwise, ReplicatedHeads, ReplicatedParallel
from rl_parallel_plans.styles.table import ROWS

OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj", "wo")
QUERY_NORMS = ("q_norm", "q_layernorm", "query_layernorm", "query_norm")
KEY_NORMS = ("k_norm", "k_layernorm", "key_layernorm", "key_norm")
LATENT = ("q_a_proj", "q_a_layernorm", "q_a_norm", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_a_norm", "indexer")
GATES = ("gate_proj", "g_proj")
INTERLEAVED = ("GPTNeoXAttention", "PersimmonAttention")
"""Classes whose query_key_value holds q, k and v of the first head, then of the second; shapes do not tell."""
OUTPUT_SIZES = ("hidden_size", "embed_dim")
"""Attributes in which modules hold the features of all heads together, to give their output that shape."""


def attention_block(module: nn.Module, config: object, layout: Layout) -> Styles | None:
    """Styles of the block by path inside it; None where it is no attention. NotRecognizedError for unknown parts."""
    config = getattr(module, "config", config)
    if "kv_b_proj" in parts(module):
        styles = _latent(module, config)
    elif linear(module, "q_proj") is not None:
        styles = _separate(module, config, tp=layout.tp)
    elif linear(module, "qkv_proj") is not None:
        styles = _fused(module, config, tp=layout.tp)
    elif type(module).__name__ in INTERLEAVED and linear(module, "query_key_value") is not None:
        styles = _interleaved(module, config)
    else:
        return None
    if (width := reshapes_to_input_width(module)) is not None:
        raise NotRecognizedError(
            f"{type(module).__name__}.forward gives the output of its heads the features of its input, in {width}, and "
            "a rank has those of some heads; reshape to -1 features there, or use tp=1"
        )
    if (output := first_linear(module, OUTPUTS)) is None:
        raise NotRecognizedError(f"its attention ({type(module).__name__}) has no output projection among {OUTPUTS}")
    styles[output[0]] = layout.output(output[1])
    # Before transformers 5, attention read how many features its heads have together; later code infers it.
    sizes = tuple(name for name in OUTPUT_SIZES if module.__dict__.get(name) == output[1].in_features)
    styles[""] = layout.block(
        table={name: ROWS for name in own_parameters(module) if name == "sinks"},
        attention=True,
        head_features=sizes,
        key_heads=_replicated_heads(styles, config),
    )
    refuse_unknown(module, styles, kind="attention")
    return styles


def _separate(module: nn.Module, config: Any, *, tp: int) -> Styles:
    size = head_size(module, config)
    if size is None:
        raise NotRecognizedError("neither self_attn.head_dim nor the model's config says how large a head is")
    query = linear(module, "q_proj")
    assert query is not None
    # By the config where rows hold more than the query (a gate beside it).
    heads, configured = query.out_features // size, getattr(config, "num_attention_heads", None)
    heads = configured if isinstance(configured, int) and heads % configured == 0 else heads
    styles: Styles = {"q_proj": Colwise(heads, "query heads")}
    key_heads = heads
    for name, rows in (("k_proj", size), ("v_proj", getattr(module, "v_head_dim", size))):
        if (key := linear(module, name)) is not None:
            key_heads = key.out_features // rows
            styles[name] = Colwise(key_heads, "key/value heads")
    if _are_replicated(key_heads, heads, tp) and not _spans_heads(module, KEY_NORMS, size):
        replicated = ReplicatedHeads(key_heads)
        styles |= {name: replicated for name in ("k_proj", "v_proj") if name in styles}
    styles |= _gates(module, heads=heads, rows=(heads, query.out_features, heads * size))
    for names, rows, units in ((QUERY_NORMS, heads * size, heads), (KEY_NORMS, key_heads * size, key_heads)):
        for name in names:
            if name in parts(module):
                styles[name] = _head_norm(module, name, size=size, rows=rows, heads=units)
                if isinstance(styles[name], Colwise) and units == key_heads:  # a weight a head, where the head is
                    styles[name] = styles.get("k_proj", styles[name])
    if "attn_sub_norm" in parts(module):  # BitNet normalizes all heads before the output projection
        styles["attn_sub_norm"] = _head_norm(module, "attn_sub_norm", size=-1, rows=heads * size, heads=-1)
    return styles


def _gates(module: nn.Module, *, heads: int, rows: tuple[int, ...]) -> Styles:
    """Layers whose output multiplies that of the heads: a number a head, or one for each of its features."""
    styles: Styles = {}
    for name in GATES:
        if (gate := linear(module, name)) is not None:
            if gate.out_features not in rows:
                raise NotRecognizedError(f"{name} of its attention has {gate.out_features} rows for {heads} heads")
            styles[name] = Colwise(heads, "query heads")
    return styles


def _head_norm(module: nn.Module, name: str, *, size: int, rows: int, heads: int) -> ParallelStyle:
    shapes = {tuple(p.shape) for p in module.get_submodule(name).parameters()}
    if shapes == {(size,)}:
        return ReplicatedParallel(partial_gradient=True)
    if shapes == {(rows,)}:
        return Norm()
    if shapes == {(heads, size)}:
        return Colwise(heads, "heads")
    raise NotRecognizedError(
        f"self_attn.{name} has parameters {sorted(shapes)}; known are [{size}] over one head, [{rows}] over all and "
        f"[{heads}, {size}] for each"
    )


def _fused(module: nn.Module, config: Any, *, tp: int) -> Styles:
    size, fused = head_size(module, config), linear(module, "qkv_proj")
    heads = getattr(config, "num_attention_heads", None)
    key_heads = getattr(config, "num_key_value_heads", heads)
    assert fused is not None
    if size is None or heads is None or key_heads is None or fused.out_features != (heads + 2 * key_heads) * size:
        raise NotRecognizedError(
            f"qkv_proj has {fused.out_features} rows, which are not [q | k | v] of {heads} query and {key_heads} "
            f"key/value heads of {size}"
        )
    units = (heads, key_heads, key_heads)
    # With replicated heads every row is on one rank, and each gathers the key/value head that its query heads read.
    shared = (1, 2) if _are_replicated(key_heads, heads, tp) else ()
    return {"qkv_proj": PackedColwise(tuple(n * size for n in units), units, "heads", shared=shared)}


def _replicated_heads(styles: Styles, config: Any) -> int | None:
    """How many key/value heads there are where a head is that of several ranks; None where every rank has its own."""
    if isinstance(key := styles.get("k_proj"), ReplicatedHeads):
        return key.heads
    return int(config.num_key_value_heads) if getattr(styles.get("qkv_proj"), "shared", ()) else None


def _are_replicated(key_heads: int, heads: int, tp: int) -> bool:
    """Whether each key/value head is that of a group of ranks, whose query heads it is for."""
    return key_heads < tp and tp % key_heads == 0 and heads % tp == 0


def _spans_heads(module: nn.Module, names: tuple[str, ...], size: int) -> bool:
    norms = [module.get_submodule(name) for name in names if name in parts(module)]
    return any(p.ndim == 1 and p.shape[0] != size for norm in norms for p in norm.parameters())


def _interleaved(module: nn.Module, config: Any) -> Styles:
    fused, heads = linear(module, "query_key_value"), getattr(config, "num_attention_heads", 0)
    assert fused is not None
    if not heads or fused.out_features % (3 * heads):
        raise NotRecognizedError(
            f"query_key_value has {fused.out_features} rows, which are not q, k and v of {heads} heads"
        )
    styles: Styles = {"query_key_value": Colwise(heads, "heads")}
    for name in (*QUERY_NORMS, *KEY_NORMS):
        if name in parts(module):
            styles[name] = _head_norm(module, name, size=fused.out_features // (3 * heads), rows=-1, heads=-1)
    return styles


def _latent(module: nn.Module, config: Any) -> Styles:
    heads = getattr(module, "num_heads", None) or getattr(config, "num_attention_heads", None)
    query = first_linear(module, ("q_b_proj", "q_gate_proj", "q_proj"))
    if not isinstance(heads, int) or query is None:
        raise NotRecognizedError("its latent attention has neither q_b_proj nor q_proj, or no num_heads")
    styles: Styles = {query[0]: Colwise(heads, "query heads"), "kv_b_proj": Colwise(heads, "key/value heads")}
    for name in LATENT:
        if name in parts(module):
            styles |= replicated_inside(module, name)
    return styles
