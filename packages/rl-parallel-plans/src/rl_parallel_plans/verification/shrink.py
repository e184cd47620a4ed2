"""A configuration made small enough to prove a plan on a CPU in seconds, whatever architecture it is of.

Knows field names, and neither classes nor architectures: layers are chosen by what differs between them, sizes by their
names, rotary embeddings by the head, special tokens by the vocabulary. What comes out keeps every kind of layer, the
relation of heads to key/value heads, ties, biases, norms, activations, scalings and soft-caps.
"""

import copy
import re
from collections.abc import Iterator
from typing import Any

from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.verification.shrink_layers import apply as keep_layers
from rl_parallel_plans.verification.shrink_layers import choose
from rl_parallel_plans.verification.shrink_sizes import HEAD, Sizes, hidden_of, left_open, resized, sizes_of

Section = dict[str, Any]

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
FAST_ONLY_ON_GPU = ("use_mamba_kernels", "use_mem_eff_path")
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

    tp: more than two ranks need more heads. vocabulary: number of words.
    of_each: layers of each kind. extra_layers: more of the commonest kind.
    tied: whether embedding and lm_head are one parameter; None as in `config`.

    Raises PlanError where the class refuses what the rules made of its fields.
    """
    full = copy.deepcopy(config.to_dict())
    _plain_numbers(full)
    _name_parts_of_rotary(config, full)
    sections = list(_sections(full))
    hiddens = tuple(dict.fromkeys(filter(None, (hidden_of(section) for section in sections))))
    tokens: dict[int, int] = {}
    for section in sections:
        own = hidden_of(section) or hidden_of(full)
        hidden = tuple(dict.fromkeys((own, *hiddens))) if own else hiddens
        sizes = sizes_of(section, hidden, tp=tp, vocabulary=vocabulary)
        for key in DROPPED:
            section.pop(key, None)
        if (layers := choose(section, of_each=of_each, extra=extra_layers)) is not None:
            keep_layers(section, layers)
        _shrink(section, sizes, tokens)
    full["use_cache"] = False
    if tied is not None:
        _tie(full, tied=tied)
    return _rebuilt(config, full)


def _sections(section: Section) -> Iterator[Section]:
    """The dicts that describe a network, the outermost first."""
    yield section
    for key, value in section.items():
        if key in ROTARY or key in DROPPED or not isinstance(value, dict):
            continue
        if key.endswith("_config") or "model_type" in value:
            yield from _sections(value)


def _shrink(section: Section, sizes: Sizes, tokens: dict[int, int]) -> None:
    section.update(left_open(section, sizes))
    for key, value in list(section.items()):
        if key in ROTARY and isinstance(value, dict):
            continue
        if RANDOM.fullmatch(key) and isinstance(value, float):
            section[key] = 0.0
        elif key in FAST_ONLY_ON_GPU:
            section[key] = False
        elif TOKEN.fullmatch(key):
            section[key] = _token(value, sizes.vocabulary, tokens)
        elif isinstance(value, dict) and all(isinstance(entry, dict) for entry in value.values()):
            section[key] = {k: {n: resized(n, v, sizes) for n, v in entry.items()} for k, entry in value.items()}
        elif isinstance(value, dict) and not key.endswith("_config") and "model_type" not in value:
            section[key] = {name: resized(key, entry, sizes) for name, entry in value.items()}
        else:
            section[key] = resized(key, value, sizes)
    _experts(section)
    _rotary(section)
    _images(section)


def _images(section: Section) -> None:
    """Images of four by four patches."""
    patch, size = section.get("patch_size"), section.get("image_size")
    if isinstance(patch, int) and isinstance(size, int) and size > 4 * patch:
        section["image_size"] = 4 * patch
    if isinstance(section.get("mm_tokens_per_image"), int):
        section["mm_tokens_per_image"] = 4


def _token(value: Any, vocabulary: int, tokens: dict[int, int]) -> Any:
    """Ids beyond the small vocabulary, each given one of its last."""
    if isinstance(value, list):
        return [_token(entry, vocabulary, tokens) for entry in value]
    if not isinstance(value, int) or isinstance(value, bool) or value < vocabulary - 32:
        return value
    return tokens.setdefault(value, max(1, vocabulary - 2 - len(tokens)))


def _experts(section: Section) -> None:
    """No more groups chosen than there are, no more experts chosen than those groups hold."""
    groups = section.get("n_group") or section.get("num_expert_group")
    if isinstance(groups, int) and groups > 1 and section.get("topk_group") is not None:
        section["topk_group"] = min(section["topk_group"], groups)


def _rotary(section: Section) -> None:
    """Parts of the rotary embedding that add up to the small head."""
    for name in ROTARY:
        rope = section.get(name)
        if not isinstance(rope, dict):
            continue
        for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
            _rotary_part(section, part)
    for key in ("mrope_section", "rope_section"):
        if isinstance(section.get(key), list):
            section[key] = _split(_rotary_pairs(section, section), len(section[key]))


def _rotary_part(section: Section, rope: Section) -> None:
    if "mrope_section" in rope and _partial(section, rope) < 0.5:
        for owner in (section, rope):
            if "partial_rotary_factor" in owner:
                owner["partial_rotary_factor"] = 0.5
    pairs = _rotary_pairs(section, rope)
    for key in ("long_factor", "short_factor"):
        if isinstance(rope.get(key), list):
            rope[key] = (rope[key] * pairs)[:pairs]
    if isinstance(rope.get("mrope_section"), list):
        rope["mrope_section"] = _split(pairs, len(rope["mrope_section"]))
    if isinstance(rope.get("original_max_position_embeddings"), int):
        rope["original_max_position_embeddings"] = min(rope["original_max_position_embeddings"], 64)


def _partial(section: Section, rope: Section) -> float:
    for owner in (rope, section):
        for name in ("partial_rotary_factor", "rotary_pct"):
            if isinstance(owner.get(name), float):
                return float(owner[name])
    return 1.0


def _rotary_pairs(section: Section, rope: Section) -> int:
    head = section.get("qk_rope_head_dim") or section.get("head_dim") or HEAD
    head = head if isinstance(head, int) else HEAD
    return max(1, int(head * _partial(section, rope)) // 2)


def _split(total: int, parts: int) -> list[int]:
    return [total // parts + (part < total % parts) for part in range(parts)]


def _tie(full: Section, *, tied: bool) -> None:
    for section in _sections(full):
        if "tie_word_embeddings" in section:
            section["tie_word_embeddings"] = tied


def _name_parts_of_rotary(config: Any, section: Section) -> None:
    """Where a class leaves the parts of its rotary embedding to a default in its code, say that there are some."""
    rope = section.get("rope_parameters")
    if isinstance(rope, dict) and "mrope_section" in (getattr(config, "ignore_keys_at_rope_validation", None) or ()):
        for part in [value for value in rope.values() if isinstance(value, dict)] or [rope]:
            part.setdefault("mrope_section", [1, 1, 1])
    for key, value in section.items():
        if isinstance(value, dict) and hasattr(getattr(config, key, None), "to_dict"):
            _name_parts_of_rotary(getattr(config, key), value)


def _plain_numbers(section: Section) -> None:
    """Tuples as lists and float32 everywhere, in place."""
    for key, value in section.items():
        if key in {"dtype", "torch_dtype"}:
            section[key] = "float32"
        elif isinstance(value, tuple):
            section[key] = list(value)
        elif isinstance(value, dict):
            _plain_numbers(value)


def _rebuilt(config: Any, full: Section) -> Any:
    try:
        return type(config).from_dict(full)
    except Exception as error:
        raise PlanError(
            f"{type(config).__name__} cannot be made small: with the sizes that its field names suggest it says "
            f"{type(error).__name__}: {' '.join(str(error).split())[:400]}; pass a small configuration of your own and "
            "shrink=False (--no-shrink)"
        ) from error
