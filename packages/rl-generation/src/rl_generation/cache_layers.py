"""What a model keeps of each token, layer by layer, read from its config. Builds no model and counts no blocks.

A layer of attention keeps `2 · kv_heads · head_dim · bytes` for each token, and under tensor parallelism a rank has
`max(1, kv_heads / ranks)` of the heads. Multi-head latent attention (DeepSeek) keeps one vector of
`kv_lora_rank + qk_rope_head_dim` a token, whole on every rank. Names of layers and of config fields are transformers'.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from rl_generation.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["CacheLayer", "cache_layers", "key_value_heads", "layer_kinds"]

_FULL = frozenset({"full_attention", "attention"})
_WINDOW = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayer:
    """What one layer keeps of a token, on one rank."""

    token_bytes: int
    """Of one token."""

    window: int | None
    """Tokens that it looks back on; None keeps all."""


def key_value_heads(text: "PretrainedConfig") -> int:
    """How many heads keys and values have.

    Raises:
        ModelError: The config does not say.
    """
    for name in ("num_key_value_heads", "num_kv_heads", "num_attention_heads"):
        found = getattr(text, name, None)
        if found:
            return int(found)
    raise ModelError(f"the config of {text.model_type!r} does not say how many attention heads the model has")


def layer_kinds(text: "PretrainedConfig") -> tuple[str, ...]:
    """What each layer keeps, in transformers' words; a layer that keeps nothing, or shares another's, is left out."""
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    if kinds is None:
        window = getattr(text, "sliding_window", None)
        kinds = ["full_attention" if window is None else "sliding_attention"] * int(text.num_hidden_layers)
    shared = int(getattr(text, "num_kv_shared_layers", 0) or 0)
    return tuple(kind for kind in kinds[: len(kinds) - shared] if kind not in {"mlp", "moe"})


def cache_layers(text: "PretrainedConfig", *, item_bytes: int, ranks: int) -> tuple[CacheLayer, ...]:
    """Find the layers that keep keys and values, and what one rank keeps of a token in each.

    Args:
        text: Config of the language model.
        item_bytes: Of one number in the cache.
        ranks: Over which every layer is cut.
    """
    latent = getattr(text, "kv_lora_rank", None)
    if latent:
        token_bytes = (int(latent) + int(text.qk_rope_head_dim)) * item_bytes
    else:
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        token_bytes = 2 * max(1, key_value_heads(text) // ranks) * int(head_dim) * item_bytes
    return tuple(
        CacheLayer(token_bytes=token_bytes, window=None if kind in _FULL else int(getattr(text, _WINDOW[kind])))
        for kind in layer_kinds(text)
        if kind in _FULL or kind in _WINDOW
    )
