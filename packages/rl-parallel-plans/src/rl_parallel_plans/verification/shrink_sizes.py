"""How large each number of a configuration becomes, by the name of its field and never by the architecture.

One table of names, first match wins; a name that is not in it is taken for a width where it sounds like one, and then
keeps its relation to the hidden size (equal, a multiple, a fraction). Proportions that code relies on are kept: heads
to key/value heads, heads times head size to hidden size, expand times hidden size to state-space heads, the parts of a
rotary embedding to the head, groups of experts to experts.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

HEAD = 16
MAMBA_HEAD = 16
EXPERTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of one section before and after, from which the others follow."""

    tp: int
    hidden: tuple[int, ...]
    """Hidden sizes of the full configuration, this section's first."""
    heads: int
    """Query heads of the full section; 1 where it names none."""
    kv_heads: int
    """Key/value heads of the full section."""
    head: int
    """Features of a head of the full section."""
    rope_head: int
    """Rotary features of an MLA head; 0 elsewhere."""
    key_heads: int
    """Key heads of linear attention."""
    value_heads: int
    """Value heads of linear attention."""
    expand: int
    """Inner over hidden size of state-space layers."""
    state_space: bool
    """Whether the section's heads are those of state-space layers and of nothing else."""
    vision: bool
    """Whether the section takes images apart into patches, in whose geometry sizes mean something else."""
    vocabulary: int
    """Words that the small model shall have."""

    @property
    def new_heads(self) -> int:
        """Query heads of the small section: enough that half of them still divide over tp."""
        return max(4, 2 * self.tp)

    @property
    def new_hidden(self) -> int:
        """Hidden size of the small section."""
        return HEAD * self.new_heads

    @property
    def new_kv_heads(self) -> int:
        """As many as query heads, one, or half of them: MHA, MQA and GQA stay what they are; so does fewer than tp."""
        if self.kv_heads < self.tp and self.tp % self.kv_heads == 0:
            return self.kv_heads
        if self.kv_heads == self.heads:
            return self.new_heads
        return 1 if self.kv_heads == 1 else self.new_heads // 2

    @property
    def new_mamba_heads(self) -> int:
        """Heads of state-space layers: their features are expand times hidden."""
        return max(1, self.expand * self.new_hidden // MAMBA_HEAD)


Rule = Callable[[int, Sizes], int]


def _head(value: int, sizes: Sizes) -> int:
    if sizes.rope_head and value == sizes.rope_head:
        return HEAD // 2
    return max(2, HEAD * value // sizes.head) if value and sizes.head else HEAD


def _width(value: int, sizes: Sizes) -> int:
    if value == 0:
        return 0
    for factor in (1, 2, 3, 4, 6, 8):  # equal to any of them before a multiple of another
        if any(known and value == factor * known for known in (*sizes.hidden, sizes.heads * sizes.head)):
            return factor * sizes.new_hidden
    for factor in (2, 4, 8):
        if sizes.hidden and value * factor == sizes.hidden[0]:
            return sizes.new_hidden // factor
    return min(value, 32)


RULES: tuple[tuple[str, Rule], ...] = (
    (r"vocab_size|\w*_vocab_size|vocab_size_\w+|\w*_group_vocab", lambda v, s: min(v, s.vocabulary)),
    (
        r"patch_size|temporal_\w+|\w*merge_size|image_size|crop_size|\w*kernel_size|in_chan\w*|num_channels",
        lambda v, _: v,
    ),
    # Mixture of experts.
    (r"\w*n_routed_experts|num_experts|\w*num_local_experts|moe_num_experts", lambda v, s: min(v, max(EXPERTS, s.tp))),
    (r"num_experts_per_tok(?:en)?|moe_top_?k|moe_k|top_k_experts|num_selected_experts", lambda v, _: min(v, 2)),
    (r"n_group|num_expert_group|zero_expert_num|\w*num_shared_experts|n_shared_experts", lambda v, _: min(v, 2)),
    (r"topk_group", lambda v, _: min(v, 1)),
    (r"\w*(?:moe|expert)\w*intermediate_size\w*|expert_ffn_hidden_size|share_expert_dim", lambda v, _: min(v, 32)),
    # State-space and linear attention.
    (r"mamba_n_heads|mamba_num_heads|n_mamba_heads", lambda v, s: v if v <= 2 else s.new_mamba_heads),
    (r"mamba_d_head|mamba_head_?dim", lambda *_: MAMBA_HEAD),
    (r"mamba_d_ssm", lambda _, s: s.new_mamba_heads * MAMBA_HEAD),
    (r"n_groups|mamba_n_?groups", lambda v, s: min(v, max(2, s.tp))),
    (r"state_size|ssm_state_size|mamba_d_state", lambda v, _: min(v, 16)),
    (r"time_step_rank|mamba_dt_rank", lambda v, _: min(v, 8)),
    (r"linear_num_value_heads|linear_num_heads", lambda _, s: s.new_heads),
    (r"linear_num_key_heads", lambda _, s: s.new_heads if s.key_heads == s.value_heads else s.new_heads // 2),
    (r"linear_\w*head_dim", lambda *_: HEAD),
    (r"(?:mamba_)?chunk_size|block_size|max_inference_chunksize", lambda v, _: min(v, 8)),
    # Multi-head latent attention, sparse attention.
    (r"qk_rope_head_dim|qk_nope_head_dim", lambda v, _: min(v, HEAD // 2)),
    (r"qk_head_dim|v_head_dim|index_head_dim|linear_head_dim", lambda *_: HEAD),
    (r"kv_lora_rank", lambda v, _: min(v, 16)),
    (r"\w+_lora_rank", lambda v, _: min(v, 24)),
    (r"index_topk|index_block_size|compress\w*", lambda v, _: min(v, 8)),
    (r"index_kpool", lambda v, _: min(v, 4)),
    (r"index_topk_blocks|o_groups", lambda v, _: min(v, 2)),
    (r"index_n_heads", lambda *_: 4),
    # Attention.
    (r"\w*(?:num_key_value_heads|num_kv_heads|kv_n_heads|num_query_groups|n_head_kv)\w*", lambda _, s: s.new_kv_heads),
    (r"num_heads", lambda _, s: s.new_mamba_heads if s.state_space else s.new_heads),
    (r"(?:\w*_)?(?:attention_heads|n_heads?|num_heads|attention_heads_per_layer)", lambda _, s: s.new_heads),
    (r"attention_hidden_size", lambda v, s: s.new_hidden * max(1, v // s.hidden[0]) if s.hidden else v),
    (r"\w*head_dim\w*|d_head|d_kv|dim_head|kv_channels|attention_head_size", _head),
    (r"out_hidden_size", lambda _, s: s.new_hidden),
    (r"rotary_dim|query_pre_attn_scalar", lambda v, s: max(4, v * HEAD // s.head) if s.head else v),
    (
        (
            r"sliding_window|sliding_window_size|attention_window_size|local_attention|attention_chunk_size|window_size"
            r"|\w*attn_chunk_length|keep_window_size"
        ),
        lambda v, s: v if s.vision else min(v, 8),
    ),
    (r"original_max_position_embeddings", lambda v, _: min(v, 64)),
    (
        (
            r"\w*max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length|seq_len|context_length"
            r"|max_\w+_positions|model_max_length"
        ),
        lambda v, _: min(v, 128),
    ),
    # Widths.
    (r"ple_embed_dim|ngram_vocab_size_base|split_ngram_parts", lambda v, _: min(v, 64)),
    (
        r"\w*intermediate_size\w*|\w*ffn_dim|ffn_hidden_size|n_inner|d_ff|dff|mlp_dim|dim_ff|feed_forward_size|d_inner",
        lambda v, _: min(v, 96),
    ),
    (
        (
            r"\w*hidden_size\w*|n_embd|d_model|dim|embed_dim|emb_dim|embedding_dim|embedding_size|out_hidden_size|projection_dim"
            r"|word_embed_proj_dim|projector_(?:in|out)put_dim|lru_width"
        ),
        _width,
    ),
    (r"(?:\w*_)?(?:size|dim|dims|rank|width|hidden|inner|features|d_\w+)", lambda v, s: _width(v, s) if v > 64 else v),
)
_COMPILED = tuple((re.compile(pattern), rule) for pattern, rule in RULES)


def sizes_of(section: Mapping[str, Any], hidden: tuple[int, ...], *, tp: int, vocabulary: int) -> Sizes:
    """The sizes that `section` names; `hidden` are those of all sections, this one's first."""

    def first(*names: str) -> int:
        for name in names:
            value = section.get(name)
            value = value[0] if isinstance(value, list) and value else value
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        return 0

    heads = first("num_attention_heads", "num_heads", "n_heads", "n_head", "attention_heads", "decoder_attention_heads")
    heads = heads or first("encoder_attention_heads", "num_decoder_attention_heads")
    own = hidden[0] if hidden else 0
    return Sizes(
        tp=tp,
        hidden=hidden,
        heads=heads or 1,
        kv_heads=first("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads", "num_query_groups")
        or heads
        or 1,
        head=first("head_dim", "attention_head_dim", "kv_channels", "d_head", "d_kv") or own // (heads or 1),
        rope_head=first("qk_rope_head_dim"),
        key_heads=first("linear_num_key_heads"),
        value_heads=first("linear_num_value_heads"),
        expand=first("expand", "mamba_expand") or 2,
        state_space=bool(first("state_size", "ssm_state_size")) and "num_attention_heads" not in section,
        vision="patch_size" in section,
        vocabulary=vocabulary,
    )


def resized(key: str, value: Any, sizes: Sizes) -> Any:
    """`value` of the field `key` as it is in the small section; what names no size is left as it is."""
    if isinstance(value, list) and value and all(isinstance(v, int) and not isinstance(v, bool) for v in value):
        return [resized(key, entry, sizes) for entry in value]
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        return value
    for pattern, rule in _COMPILED:
        if pattern.fullmatch(key):
            return rule(value, sizes)
    return value


HIDDEN = ("hidden_size", "n_embd", "d_model", "dim", "embed_dim", "emb_dim", "embedding_dim", "model_dim")


def hidden_of(section: Mapping[str, Any]) -> int:
    """The hidden size that `section` names; 0 where it names none."""
    found = (section.get(name) for name in HIDDEN)
    return next((value for value in found if isinstance(value, int) and value > 0), 0)


def left_open(section: Mapping[str, Any], sizes: Sizes) -> dict[str, int]:
    """Sizes that a default configuration leaves to be None, and that its own code may need: what None stands for."""
    found = {}
    if section.get("head_dim", 0) is None and sizes.heads > 1 and not sizes.rope_head:
        found["head_dim"] = HEAD
    if section.get("num_key_value_heads", 0) is None and sizes.heads > 1:
        found["num_key_value_heads"] = sizes.new_heads
    if section.get("n_routed_experts", 0) is None and section.get("moe_intermediate_size"):
        found["n_routed_experts"] = EXPERTS
        found |= {"n_shared_experts": 1} if section.get("n_shared_experts", 0) is None else {}
    if section.get("num_experts_per_tok", 0) is None and ({**section, **found}).get("n_routed_experts"):
        found["num_experts_per_tok"] = 2
    return found
