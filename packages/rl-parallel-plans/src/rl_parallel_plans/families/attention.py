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

from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from rl_parallel_plans.checkpoints import segments_in_order
from rl_parallel_plans.families.parts import (
    NotRecognizedError,
    first_linear,
    linear,
    own_parameters,
    parts,
    refuse_unknown,
    replicated_inside,
)
from rl_parallel_plans.structure import head_size

if TYPE_CHECKING:
    from rl_parallel_plans.families.parts import Styles
    from rl_parallel_plans.styles import LocalParameters

OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj", "wo")
QUERY_NORMS = ("q_norm", "q_layernorm", "query_layernorm", "query_norm")
KEY_NORMS = ("k_norm", "k_layernorm", "key_layernorm", "key_norm")
GATES = ("gate_proj", "g_proj")
INTERLEAVED = ("GPTNeoXAttention", "PersimmonAttention")
"""Classes whose query_key_value holds q, k and v of the first head, then of the second; shapes do not tell."""
OUTPUT_SIZES = ("hidden_size", "embed_dim")
"""Attributes in which modules hold the features of all heads together, to give their output that shape."""
Projections = Literal["rowwise", "colwise"]


def attention_block(
    module: nn.Module, config: object, *, tp: int, sequence_parallel: bool, projections: Projections
) -> "Styles | None":
    """Styles of the block by path inside it; None where it is no attention. NotRecognizedError for unknown parts."""
    from torch.distributed.tensor import Shard

    from rl_parallel_plans.styles import BlockParallel, LocalHeads, ParameterRule
    from rl_parallel_plans.styles.local_heads import ATTRIBUTES

    config = getattr(module, "config", config)
    if "kv_b_proj" in parts(module):
        styles = _latent(module, config)
    elif linear(module, "q_proj") is not None:
        styles = _separate(module, config, tp=tp)
    elif linear(module, "qkv_proj") is not None:
        styles = _fused(module, config, tp=tp)
    elif type(module).__name__ in INTERLEAVED and linear(module, "query_key_value") is not None:
        styles = _interleaved(module, config)
    else:
        return None
    styles |= _output(module, projections)
    own = {name: ParameterRule(placement=Shard(0)) for name in own_parameters(module) if name == "sinks"}
    styles[""] = BlockParallel(
        sequence_parallel=sequence_parallel,
        output="features" if projections == "colwise" else "sum",
        own=own,
        local_heads=LocalHeads((*ATTRIBUTES, *_output_sizes(module)), key_heads=_replicated_heads(styles, config)),
    )
    refuse_unknown(module, styles, kind="attention")
    return styles


def _separate(module: nn.Module, config: Any, *, tp: int) -> "Styles":
    from rl_parallel_plans.styles import BlockColwise, BlockReplicatedHeads

    size = head_size(module, config)
    if size is None:
        raise NotRecognizedError("neither self_attn.head_dim nor the model's config says how large a head is")
    query = linear(module, "q_proj")
    assert query is not None
    heads = _query_heads(query, size, config)
    styles: Styles = {"q_proj": BlockColwise(units=heads, what="query heads")}
    key_heads = heads
    for name, rows in (("k_proj", size), ("v_proj", getattr(module, "v_head_dim", size))):
        if (key := linear(module, name)) is not None:
            key_heads = key.out_features // rows
            styles[name] = BlockColwise(units=key_heads, what="key/value heads")
    if _are_replicated(key_heads, heads, tp) and not _spans_heads(module, KEY_NORMS, size):
        replicated = BlockReplicatedHeads(heads=key_heads)
        styles |= {name: replicated for name in ("k_proj", "v_proj") if name in styles}
    styles |= _gates(module, heads=heads, rows=(heads, query.out_features, heads * size))
    for names, rows, units in ((QUERY_NORMS, heads * size, heads), (KEY_NORMS, key_heads * size, key_heads)):
        for name in names:
            if name in parts(module):
                styles |= _head_norm(module, name, size=size, rows=rows, heads=units)
                if units == key_heads and {tuple(p.shape) for p in module.get_submodule(name).parameters()} == {
                    (units, size)
                }:
                    styles[name] = styles.get("k_proj", styles[name])
    if "attn_sub_norm" in parts(module):  # BitNet normalizes all heads before the output projection
        styles |= _head_norm(module, "attn_sub_norm", size=-1, rows=heads * size, heads=-1)
    return styles


def _gates(module: nn.Module, *, heads: int, rows: tuple[int, ...]) -> "Styles":
    """Layers whose output multiplies that of the heads: a number a head, or one for each of its features."""
    from rl_parallel_plans.styles import BlockColwise

    styles: Styles = {}
    for name in GATES:
        if (gate := linear(module, name)) is not None:
            if gate.out_features not in rows:
                raise NotRecognizedError(f"{name} of its attention has {gate.out_features} rows for {heads} heads")
            styles[name] = BlockColwise(units=heads, what="query heads")
    return styles


def _query_heads(query: nn.Linear, size: int, config: Any) -> int:
    """Heads by the rows of q_proj; by the config where rows hold more than the query (a gate beside it)."""
    by_rows = query.out_features // size
    configured = getattr(config, "num_attention_heads", by_rows)
    return int(configured) if isinstance(configured, int) and by_rows % configured == 0 else by_rows


def _head_norm(module: nn.Module, name: str, *, size: int, rows: int, heads: int) -> "Styles":
    from rl_parallel_plans.styles import BlockColwise, BlockNorm, BlockReplicated

    shapes = {tuple(p.shape) for p in module.get_submodule(name).parameters()}
    if shapes == {(size,)}:
        return {name: BlockReplicated()}
    if shapes == {(rows,)}:
        return {name: BlockNorm()}
    if shapes == {(heads, size)}:
        return {name: BlockColwise(units=heads, what="heads")}
    raise NotRecognizedError(
        f"self_attn.{name} has parameters {sorted(shapes)}; known are [{size}] over one head, [{rows}] over all and "
        f"[{heads}, {size}] for each"
    )


def _fused(module: nn.Module, config: Any, *, tp: int) -> "Styles":
    from rl_parallel_plans.styles import BlockPackedColwise

    size, fused = head_size(module, config), linear(module, "qkv_proj")
    heads = getattr(config, "num_attention_heads", None)
    key_heads = getattr(config, "num_key_value_heads", heads)
    assert fused is not None
    if size is None or heads is None or key_heads is None or fused.out_features != (heads + 2 * key_heads) * size:
        raise NotRecognizedError(
            f"qkv_proj has {fused.out_features} rows, which are not [q | k | v] of {heads} query and {key_heads} "
            f"key/value heads of {size}"
        )
    if _are_replicated(key_heads, heads, tp):
        return {"qkv_proj": _with_shared_heads(heads=heads, key_heads=key_heads, size=size)}
    units = (heads, key_heads, key_heads)
    return {"qkv_proj": BlockPackedColwise([n * size for n in units], units=units, what="heads")}


def _replicated_heads(styles: "Styles", config: Any) -> int | None:
    """How many key/value heads there are where a head is that of several ranks; None where every rank has its own."""
    from rl_parallel_plans.styles import BlockReplicatedHeads, BlockSharedRows

    if isinstance(key := styles.get("k_proj"), BlockReplicatedHeads):
        return key.heads
    return int(config.num_key_value_heads) if isinstance(styles.get("qkv_proj"), BlockSharedRows) else None


def _are_replicated(key_heads: int, heads: int, tp: int) -> bool:
    """Whether each key/value head is that of a group of ranks, whose query heads it is for."""
    return key_heads < tp and tp % key_heads == 0 and heads % tp == 0


def _spans_heads(module: nn.Module, names: tuple[str, ...], size: int) -> bool:
    norms = [module.get_submodule(name) for name in names if name in parts(module)]
    return any(p.ndim == 1 and p.shape[0] != size for norm in norms for p in norm.parameters())


def _with_shared_heads(*, heads: int, key_heads: int, size: int) -> "LocalParameters":
    """[q | k | v], every row on one rank: each gathers the key/value head that its query heads read."""
    from rl_parallel_plans.styles import BlockSharedRows
    from rl_parallel_plans.styles.local_parameters import Run

    sizes = [heads * size, key_heads * size, key_heads * size]

    def head(tp: int, rank: int) -> slice:
        first = rank * key_heads // tp * size
        return slice(first, first + size)

    def runs(tp: int, rank: int) -> list[Run]:
        return [Run(size=sizes[0] // tp), Run(size=2 * sizes[1] // tp, needed=head(tp, rank), parts=2)]

    def reads(tp: int, rank: int) -> list[slice]:
        own, one = slice(rank * sizes[0] // tp, (rank + 1) * sizes[0] // tp), head(tp, rank)
        starts = (sizes[0], sizes[0] + sizes[1])
        return [own, *(slice(start + one.start, start + one.stop) for start in starts)]

    def fits(tp: int) -> str | None:
        if sizes[1] % tp == 0:
            return None
        return f"has {sizes[1]} rows of {key_heads} key heads, which tp={tp} does not divide: choose one that does"

    return BlockSharedRows(sizes, parameters=1, row_order=segments_in_order(sizes), reads=reads, runs=runs, fits=fits)


def _interleaved(module: nn.Module, config: Any) -> "Styles":
    from rl_parallel_plans.styles import BlockColwise

    fused, heads = linear(module, "query_key_value"), getattr(config, "num_attention_heads", 0)
    assert fused is not None
    if not heads or fused.out_features % (3 * heads):
        raise NotRecognizedError(
            f"query_key_value has {fused.out_features} rows, which are not q, k and v of {heads} heads"
        )
    styles: Styles = {"query_key_value": BlockColwise(units=heads, what="heads")}
    for name in (*QUERY_NORMS, *KEY_NORMS):
        if name in parts(module):
            styles |= _head_norm(module, name, size=fused.out_features // (3 * heads), rows=-1, heads=-1)
    return styles


def _latent(module: nn.Module, config: Any) -> "Styles":
    from rl_parallel_plans.styles import BlockColwise

    heads = getattr(module, "num_heads", None) or getattr(config, "num_attention_heads", None)
    query = first_linear(module, ("q_b_proj", "q_gate_proj", "q_proj"))
    if not isinstance(heads, int) or query is None:
        raise NotRecognizedError("its latent attention has neither q_b_proj nor q_proj, or no num_heads")
    styles: Styles = {
        query[0]: BlockColwise(units=heads, what="query heads"),
        "kv_b_proj": BlockColwise(units=heads, what="key/value heads"),
    }
    for name in (
        "q_a_proj",
        "q_a_layernorm",
        "q_a_norm",
        "kv_a_proj_with_mqa",
        "kv_a_layernorm",
        "kv_a_norm",
        "indexer",
    ):
        if name in parts(module):
            styles |= replicated_inside(module, name)
    return styles


def _output_sizes(module: nn.Module) -> list[str]:
    """Before transformers 5, attention read how many features its heads have together; later code infers it."""
    found = first_linear(module, OUTPUTS)
    return [] if found is None else [n for n in OUTPUT_SIZES if module.__dict__.get(n) == found[1].in_features]


def _output(module: nn.Module, projections: Projections) -> "Styles":
    from rl_parallel_plans.styles import BlockGatheredColwise, BlockRowwise

    found = first_linear(module, OUTPUTS)
    if found is None:
        raise NotRecognizedError(f"its attention ({type(module).__name__}) has no output projection among {OUTPUTS}")
    name, projection = found
    if projections == "colwise":
        return {name: BlockGatheredColwise(units=projection.out_features)}
    return {name: BlockRowwise()}
