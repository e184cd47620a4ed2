"""Make the configuration of any architecture small enough to verify a plan on a CPU in seconds.

The rules read field names and no architecture. Layers: at least two, and one of each kind, where kinds are read from
whatever differs between layers. Sizes: by the name of the field, so that heads keep their relation to key/value heads,
state-space heads times their size remain the inner width, and the parts of a rotary embedding add up to the head. Ties,
biases, norms, activations, scalings and soft-caps stay as they are.
"""

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rl_parallel_plans.errors import PlanError

Section = dict[str, Any]
"""A configuration, or a part of it that describes one network, as a dict."""

VOCABULARY = 128
RANDOM = re.compile(r"\w*(?:dropout\w*|pdrop|layerdrop|dropout_p|drop_path_rate|jitter_noise|label_smoothing)")
TOKEN = re.compile(r"\w*(?:token_id|token_index|token_ids|_start_id|_end_id|newline_id|sep_token_id|bos_token|pad_id)")
DROPPED = (
    "quantization_config",
    "transformers_version",
    "_name_or_path",
    "id2label",
    "label2id",
    "torch_dtype",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
)
NEED_A_GPU = ("use_mamba_kernels", "use_mem_eff_path")
ROTARY = ("rope_parameters", "rope_scaling", "rotary_emb_config")


def shrunk(
    config: Any,
    *,
    tp: int = 2,
    vocabulary: int = VOCABULARY,
    of_each: int = 1,
    extra_layers: int = 0,
    tied: bool | None = None,
) -> Any:
    """A new configuration of the same class: two layers or one of each kind, hidden size 64, four heads, four experts.

    tp: more than two ranks need more heads. vocabulary: number of tokens.
    of_each: layers of each kind. extra_layers: further layers of the commonest kind.
    tied: whether embedding and lm_head are one parameter; None leaves it as in `config`.

    Raises PlanError if the class refuses the sizes.
    """
    full = copy.deepcopy(config.to_dict())
    _use_lists_and_float32(full)
    _name_rotary_sections(config, full)
    sections = list(_sections(full))
    hiddens = tuple(dict.fromkeys(filter(None, map(_hidden_size, sections))))
    tokens: dict[int, int] = {}
    for section in sections:
        own = _hidden_size(section) or _hidden_size(full)
        sizes = sizes_of(
            section, tuple(dict.fromkeys((own, *hiddens))) if own else hiddens, tp=tp, vocabulary=vocabulary
        )
        for key in DROPPED:
            section.pop(key, None)
        if (kept := choose_layers(section, of_each=of_each, extra=extra_layers)) is not None:
            _keep_layers(section, kept)
        _shrink(section, sizes, tokens)
        if tied is not None and "tie_word_embeddings" in section:
            section["tie_word_embeddings"] = tied
    full["use_cache"] = False
    try:
        return type(config).from_dict(full)
    except Exception as error:
        raise PlanError(
            f"{type(config).__name__} cannot be made small: with the sizes that its field names suggest it says "
            f"{type(error).__name__}: {' '.join(str(error).split())[:400]}; pass a small configuration of your own and "
            "shrink=False (--no-shrink)"
        ) from error


def _use_lists_and_float32(section: Section) -> None:
    """Replace tuples by lists and every dtype by float32, in place."""
    for key, value in section.items():
        if key in {"dtype", "torch_dtype"}:
            section[key] = "float32"
        elif isinstance(value, tuple):
            section[key] = list(value)
        elif isinstance(value, dict):
            _use_lists_and_float32(value)


def _name_rotary_sections(config: Any, section: Section) -> None:
    """Add `mrope_section` where a class leaves it to a default in its code, so that it shrinks with the head."""
    rope = section.get("rope_parameters")
    if isinstance(rope, dict) and "mrope_section" in (getattr(config, "ignore_keys_at_rope_validation", None) or ()):
        for part in [value for value in rope.values() if isinstance(value, dict)] or [rope]:
            part.setdefault("mrope_section", [1, 1, 1])
    for key, value in section.items():
        if isinstance(value, dict) and hasattr(getattr(config, key, None), "to_dict"):
            _name_rotary_sections(getattr(config, key), value)


def _sections(section: Section) -> Iterator[Section]:
    """The dicts that describe a network, the outermost first."""
    yield section
    for key, value in section.items():
        if key in {*ROTARY, *DROPPED} or not isinstance(value, dict):
            continue
        if key.endswith("_config") or "model_type" in value:
            yield from _sections(value)


def _shrink(section: Section, sizes: "Sizes", tokens: dict[int, int]) -> None:
    """Shrink every field of a section in place; `tokens` maps special tokens to those that replace them."""

    def small_token(value: Any) -> Any:
        """Replace an id beyond the small vocabulary by one of the last ids in it."""
        if isinstance(value, list):
            return [small_token(entry) for entry in value]
        if not _is_int(value) or value < sizes.vocabulary - 32:
            return value
        return tokens.setdefault(value, max(1, sizes.vocabulary - 2 - len(tokens)))

    section.update(_unset_sizes(section, sizes))
    for key, value in list(section.items()):
        if key in ROTARY and isinstance(value, dict):
            continue
        if RANDOM.fullmatch(key) and isinstance(value, float):
            section[key] = 0.0
        elif key in NEED_A_GPU:
            section[key] = False
        elif TOKEN.fullmatch(key):
            section[key] = small_token(value)
        elif isinstance(value, dict) and all(isinstance(entry, dict) for entry in value.values()):
            section[key] = {k: {n: resized(n, v, sizes) for n, v in entry.items()} for k, entry in value.items()}
        elif isinstance(value, dict) and not key.endswith("_config") and "model_type" not in value:
            section[key] = {name: resized(key, entry, sizes) for name, entry in value.items()}
        else:
            section[key] = resized(key, value, sizes)
    groups = section.get("n_group") or section.get("num_expert_group")
    if isinstance(groups, int) and groups > 1 and section.get("topk_group") is not None:
        section["topk_group"] = min(section["topk_group"], groups)
    _shrink_rotary(section)
    patch, image = section.get("patch_size"), section.get("image_size")
    if isinstance(patch, int) and isinstance(image, int):
        section["image_size"] = min(image, 4 * patch)  # an image of four by four patches
    if isinstance(section.get("mm_tokens_per_image"), int):
        section["mm_tokens_per_image"] = 4


def _shrink_rotary(section: Section) -> None:
    """Make the parts of the rotary embedding add up to the small head, in place."""
    partial_names = ("partial_rotary_factor", "rotary_pct")

    def partial(*owners: Section) -> float:
        factors = (owner[name] for owner in owners for name in partial_names if isinstance(owner.get(name), float))
        return float(next(factors, 1.0))

    def pairs(*owners: Section) -> int:
        head = section.get("qk_rope_head_dim") or section.get("head_dim") or HEAD
        return max(1, int((head if isinstance(head, int) else HEAD) * partial(*owners)) // 2)

    def split(total: int, sections: list[int]) -> list[int]:
        return [total // len(sections) + (i < total % len(sections)) for i in range(len(sections))]

    for rope in [section[name] for name in ROTARY if isinstance(section.get(name), dict)]:
        for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
            if "mrope_section" in part and partial(part, section) < 0.5:
                for owner in (section, part):
                    if "partial_rotary_factor" in owner:
                        owner["partial_rotary_factor"] = 0.5
            for key in ("long_factor", "short_factor"):
                if isinstance(part.get(key), list):
                    part[key] = (part[key] * pairs(part, section))[: pairs(part, section)]
            if isinstance(part.get("mrope_section"), list):
                part["mrope_section"] = split(pairs(part, section), part["mrope_section"])
            if isinstance(part.get("original_max_position_embeddings"), int):
                part["original_max_position_embeddings"] = min(part["original_max_position_embeddings"], 64)
    for key in ("mrope_section", "rope_section"):
        if isinstance(section.get(key), list):
            section[key] = split(pairs(section), section[key])


# -- Layers --------------------------------------------------------------------------------------

LAYER_COUNT = re.compile(
    r"(?:\w*_)?(?:num_hidden_layers|n_layers?|num_layers|encoder_layers|decoder_layers|num_encoder_layers"
    r"|num_decoder_layers|resampler_depth|num_layers_per_stack|num_global_layers|num_blocks)|depth|layers"
)
LAYER_NUMBERS = re.compile(r"\w*(?:layers|indices|indexes|idxs|layer_ids)")
FIRST_LAYERS = re.compile(
    r"first_k_dense\w*|\w*num_dense_layers|n_dense_layers|max_window_layers|moe_layer_start_index"
)
LAST_LAYERS = re.compile(r"num_kv_shared_layers")
PERIOD = re.compile(
    r"\w*(?:layer_period|attention_interval|layer_interval|layers_interval|sliding_window_pattern|every_n_layers"
    r"|sparse_step|moe_layer_step|attention_frequency|layer_freq|moe_every_n_layers)"
)
OFFSET = re.compile(r"\w*layer_offset")
MOST_LAYERS = 8


def choose_layers(section: Mapping[str, Any], *, of_each: int = 1, extra: int = 0) -> tuple[int, ...] | None:
    """Numbers of the layers to keep: `of_each` kind, two at least, and `extra` more of the commonest kind.

    Returns None if the section has no layers.
    """
    total = _layer_count(section)
    if total is None:
        return None
    for names_only in (False, True):  # where numbers differ from layer to layer, names alone make the kinds
        kinds = _layer_kinds(section, total, names_only=names_only)
        kept = [n for n, kind in enumerate(kinds) if kinds[:n].count(kind) < of_each]
        if len(kept) <= MOST_LAYERS:
            break
    kept = kept[:MOST_LAYERS]
    if len(kept) == 1 and total > 1:
        kept.append(total - 1)
    commonest = max(kinds, key=kinds.count)
    further = [n for n, kind in enumerate(kinds) if kind == commonest and n not in kept]
    return tuple(sorted((*kept, *further[:extra])))


def _layer_count(section: Mapping[str, Any]) -> int | None:
    counts = [value for key, value in section.items() if _is_layer_count(key, value)]
    if counts:
        return int(section.get("num_hidden_layers") or counts[0])
    lists = [value for key, value in section.items() if key in {"layers_block_type", "layer_types"} and value]
    return len(lists[0]) if lists else None


def _layer_kinds(section: Mapping[str, Any], total: int, *, names_only: bool) -> list[tuple[Any, ...]]:
    """What the section says about each layer; layers of one kind have equal entries."""
    columns: list[list[Any]] = []
    for key, value in section.items():
        if _is_layer_count(key, value):
            continue
        if _is_per_layer(value, total) and (
            not names_only or all(isinstance(entry, str | bool | None) for entry in value)
        ):
            columns.append([repr(entry) for entry in value])
        elif _is_layer_numbers(key, value, total):
            columns.append([n in value for n in range(total)])
        elif _is_by_layer_number(value):
            by_number = {int(number): repr(entry) for number, entry in value.items()}
            columns.append([by_number.get(n) for n in range(total)])
        elif isinstance(value, int) and FIRST_LAYERS.fullmatch(key):
            columns.append([n < value for n in range(total)])
        elif isinstance(value, int) and LAST_LAYERS.fullmatch(key):
            columns.append([n >= total - value for n in range(total)])
    return list(zip(*columns, strict=True)) if columns else [()] * total


def _keep_layers(section: Section, kept: tuple[int, ...]) -> None:
    """Keep only the layers `kept` in every field of the section that is about layers, in place."""
    total = _layer_count(section)
    assert total is not None
    if section.get("attention_types") and _is_per_layer(section.get("attention_layers"), total):
        section["attention_types"] = [[[section["attention_layers"][n] for n in kept], 1]]  # GPT-Neo
    for key, value in list(section.items()):
        if _is_layer_count(key, value):
            section[key] = len(kept)
        elif _is_per_layer(value, total):
            picked = [value[n] for n in kept]
            section[key] = "".join(picked) if isinstance(value, str) else picked
        elif _is_layer_numbers(key, value, total):
            section[key] = [place for place, n in enumerate(kept) if n in value]
        elif _is_by_layer_number(value):
            by_number = {int(number): (len(number), entry) for number, entry in value.items()}
            section[key] = {
                str(place).zfill(by_number[n][0]): by_number[n][1] for place, n in enumerate(kept) if n in by_number
            }
        elif not _is_int(value):
            continue
        elif FIRST_LAYERS.fullmatch(key):
            section[key] = sum(n < value for n in kept)
        elif LAST_LAYERS.fullmatch(key):
            section[key] = sum(n >= total - value for n in kept)
        elif key == "moe_layer_end_index":
            section[key] = len(kept) - 1 if value >= 0 else value
        elif PERIOD.fullmatch(key):
            section[key] = min(value, 2)
        elif OFFSET.fullmatch(key):
            section[key] = min(value, 1)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_layer_count(key: str, value: Any) -> bool:
    return _is_int(value) and value > 0 and bool(LAYER_COUNT.fullmatch(key))


def _is_per_layer(value: object, total: int) -> bool:
    """True for a list with one entry a layer, or a pattern string with one letter a layer."""
    if isinstance(value, str):
        return len(value) == total > 2 and len(set(value)) < len(value) and not value.isalnum()
    return isinstance(value, list) and len(value) == total and total > 1


def _is_layer_numbers(key: str, value: object, total: int) -> bool:
    if not isinstance(value, list) or not value or not LAYER_NUMBERS.fullmatch(key):
        return False
    return all(_is_int(entry) and 0 <= entry < total for entry in value)


def _is_by_layer_number(value: object) -> bool:
    return isinstance(value, dict) and bool(value) and all(isinstance(k, str) and k.isdigit() for k in value)


# -- Sizes ---------------------------------------------------------------------------------------

HEAD = 16
MAMBA_HEAD = 16
EXPERTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a section before it is made small, and those that follow from them."""

    tp: int
    hidden: tuple[int, ...]  # hidden sizes of all sections, this one's first
    heads: int  # query heads; 1 if the section names none
    kv_heads: int
    head: int  # features of a head
    rope_head: int  # rotary features of a head of latent attention (MLA); 0 elsewhere
    key_heads: int  # of linear attention
    value_heads: int  # of linear attention
    expand: int  # inner over hidden size of state-space layers
    state_space: bool  # whether the section's heads are those of state-space layers and of nothing else
    vision: bool  # whether the section has patches, in whose geometry sizes mean something else
    vocabulary: int  # tokens of the small model

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
        """As many as query heads, one, or half of them: MHA, MQA and GQA stay so, and so do fewer than tp."""
        if self.kv_heads < self.tp and self.tp % self.kv_heads == 0:
            return self.kv_heads
        if self.kv_heads == self.heads:
            return self.new_heads
        return 1 if self.kv_heads == 1 else self.new_heads // 2

    @property
    def new_mamba_heads(self) -> int:
        """Heads of state-space layers, whose features are `expand` times the hidden size."""
        return max(1, self.expand * self.new_hidden // MAMBA_HEAD)


def _head_features(value: int, sizes: Sizes) -> int:
    if sizes.rope_head and value == sizes.rope_head:
        return HEAD // 2
    return max(2, HEAD * value // sizes.head) if value and sizes.head else HEAD


def _width(value: int, sizes: Sizes) -> int:
    """A width that keeps its relation to the hidden size: equal, a multiple or a fraction; else at most 32."""
    if value == 0:
        return 0
    for factor in (1, 2, 3, 4, 6, 8):  # equal to any of them before a multiple of another
        if any(known and value == factor * known for known in (*sizes.hidden, sizes.heads * sizes.head)):
            return factor * sizes.new_hidden
    for factor in (2, 4, 8):
        if sizes.hidden and value * factor == sizes.hidden[0]:
            return sizes.new_hidden // factor
    return min(value, 32)


def _at_most(limit: int) -> Callable[[int, Sizes], int]:
    return lambda value, _: min(value, limit)


RULES: tuple[tuple[str, Callable[[int, Sizes], int]], ...] = (  # the first name that matches decides
    (r"vocab_size|\w*_vocab_size|vocab_size_\w+|\w*_group_vocab", lambda v, s: min(v, s.vocabulary)),
    (
        r"patch_size|temporal_\w+|\w*merge_size|image_size|crop_size|\w*kernel_size|in_chan\w*|num_channels",
        lambda v, _: v,
    ),
    # Mixture of experts.
    (r"\w*n_routed_experts|num_experts|\w*num_local_experts|moe_num_experts", lambda v, s: min(v, max(EXPERTS, s.tp))),
    (r"num_experts_per_tok(?:en)?|moe_top_?k|moe_k|top_k_experts|num_selected_experts", _at_most(2)),
    (r"n_group|num_expert_group|zero_expert_num|\w*num_shared_experts|n_shared_experts", _at_most(2)),
    (r"topk_group", _at_most(1)),
    (r"\w*(?:moe|expert)\w*intermediate_size\w*|expert_ffn_hidden_size|share_expert_dim", _at_most(32)),
    # State-space and linear attention.
    (r"mamba_n_heads|mamba_num_heads|n_mamba_heads", lambda v, s: v if v <= 2 else s.new_mamba_heads),
    (r"mamba_d_head|mamba_head_?dim", lambda *_: MAMBA_HEAD),
    (r"mamba_d_ssm", lambda _, s: s.new_mamba_heads * MAMBA_HEAD),
    (r"n_groups|mamba_n_?groups", lambda v, s: min(v, max(2, s.tp))),
    (r"state_size|ssm_state_size|mamba_d_state", _at_most(16)),
    (r"time_step_rank|mamba_dt_rank", _at_most(8)),
    (r"linear_num_value_heads|linear_num_heads", lambda _, s: s.new_heads),
    (r"linear_num_key_heads", lambda _, s: s.new_heads if s.key_heads == s.value_heads else s.new_heads // 2),
    (r"linear_\w*head_dim", lambda *_: HEAD),
    (r"(?:mamba_)?chunk_size|block_size|max_inference_chunksize", _at_most(8)),
    # Multi-head latent attention, sparse attention.
    (r"qk_rope_head_dim|qk_nope_head_dim", _at_most(HEAD // 2)),
    (r"qk_head_dim|v_head_dim|index_head_dim|linear_head_dim", lambda *_: HEAD),
    (r"kv_lora_rank", _at_most(16)),
    (r"\w+_lora_rank", _at_most(24)),
    (r"index_topk|index_block_size|compress\w*", _at_most(8)),
    (r"index_kpool", _at_most(4)),
    (r"index_topk_blocks|o_groups", _at_most(2)),
    (r"index_n_heads", lambda *_: 4),
    # Attention.
    (r"\w*(?:num_key_value_heads|num_kv_heads|kv_n_heads|num_query_groups|n_head_kv)\w*", lambda _, s: s.new_kv_heads),
    (r"num_heads", lambda _, s: s.new_mamba_heads if s.state_space else s.new_heads),
    (r"(?:\w*_)?(?:attention_heads|n_heads?|num_heads|attention_heads_per_layer)", lambda _, s: s.new_heads),
    (r"attention_hidden_size", lambda v, s: s.new_hidden * max(1, v // s.hidden[0]) if s.hidden else v),
    (r"\w*head_dim\w*|d_head|d_kv|dim_head|kv_channels|attention_head_size", _head_features),
    (r"out_hidden_size", lambda _, s: s.new_hidden),
    (r"rotary_dim|query_pre_attn_scalar", lambda v, s: max(4, v * HEAD // s.head) if s.head else v),
    (
        (
            r"sliding_window|sliding_window_size|attention_window_size|local_attention|attention_chunk_size|window_size"
            r"|\w*attn_chunk_length|keep_window_size"
        ),
        lambda v, s: v if s.vision else min(v, 8),
    ),
    (r"original_max_position_embeddings", _at_most(64)),
    (
        (
            r"\w*max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length|seq_len|context_length"
            r"|max_\w+_positions|model_max_length"
        ),
        _at_most(128),
    ),
    # Widths.
    (r"ple_embed_dim|ngram_vocab_size_base|split_ngram_parts", _at_most(64)),
    (
        r"\w*intermediate_size\w*|\w*ffn_dim|ffn_hidden_size|n_inner|d_ff|dff|mlp_dim|dim_ff|feed_forward_size|d_inner",
        _at_most(96),
    ),
    (
        (
            r"\w*hidden_size\w*|n_embd|d_model|dim|embed_dim|emb_dim|embedding_dim|embedding_size|projection_dim"
            r"|word_embed_proj_dim|projector_(?:in|out)put_dim|lru_width"
        ),
        _width,
    ),
    (r"(?:\w*_)?(?:size|dim|dims|rank|width|hidden|inner|features|d_\w+)", lambda v, s: _width(v, s) if v > 64 else v),
)
_COMPILED = tuple((re.compile(pattern), rule) for pattern, rule in RULES)


def resized(key: str, value: Any, sizes: Sizes) -> Any:
    """The value of the field `key` in the small section; a field that names no size keeps its value."""
    if isinstance(value, list) and value and all(map(_is_int, value)):
        return [resized(key, entry, sizes) for entry in value]
    if not _is_int(value) or value <= 0:
        return value
    rule = next((rule for pattern, rule in _COMPILED if pattern.fullmatch(key)), None)
    return value if rule is None else rule(value, sizes)


def sizes_of(section: Mapping[str, Any], hidden: tuple[int, ...], *, tp: int, vocabulary: int) -> Sizes:
    """The sizes that `section` names; `hidden` are the hidden sizes of all sections, this one's first."""

    def first(*names: str) -> int:
        for name in names:
            value = section.get(name)
            value = value[0] if isinstance(value, list) and value else value
            if _is_int(value) and value > 0:  # type: ignore[operator]
                return int(value)  # type: ignore[arg-type]
        return 0

    heads = first(
        "num_attention_heads", "num_heads", "n_heads", "n_head", "attention_heads", "decoder_attention_heads",
        "encoder_attention_heads", "num_decoder_attention_heads",
    ) or 1  # fmt: skip
    return Sizes(
        tp=tp,
        hidden=hidden,
        heads=heads,
        kv_heads=first("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads", "num_query_groups") or heads,
        head=first("head_dim", "attention_head_dim", "kv_channels", "d_head", "d_kv")
        or (hidden[0] if hidden else 0) // heads,
        rope_head=first("qk_rope_head_dim"),
        key_heads=first("linear_num_key_heads"),
        value_heads=first("linear_num_value_heads"),
        expand=first("expand", "mamba_expand") or 2,
        state_space=bool(first("state_size", "ssm_state_size")) and "num_attention_heads" not in section,
        vision="patch_size" in section,
        vocabulary=vocabulary,
    )


def _hidden_size(section: Mapping[str, Any]) -> int:
    """The hidden size that `section` names; 0 if it names none."""
    names = ("hidden_size", "n_embd", "d_model", "dim", "embed_dim", "emb_dim", "embedding_dim", "model_dim")
    return next((value for name in names if isinstance(value := section.get(name), int) and value > 0), 0)


def _unset_sizes(section: Mapping[str, Any], sizes: Sizes) -> dict[str, int]:
    """Values for sizes that a default configuration leaves None but that its own code needs."""
    values = {}
    if section.get("head_dim", 0) is None and sizes.heads > 1 and not sizes.rope_head:
        values["head_dim"] = HEAD
    if section.get("num_key_value_heads", 0) is None and sizes.heads > 1:
        values["num_key_value_heads"] = sizes.new_heads
    if section.get("n_routed_experts", 0) is None and section.get("moe_intermediate_size"):
        values["n_routed_experts"] = EXPERTS
        if section.get("n_shared_experts", 0) is None:
            values["n_shared_experts"] = 1
    if section.get("num_experts_per_tok", 0) is None and ({**section, **values}).get("n_routed_experts"):
        values["num_experts_per_tok"] = 2
    return values
