"""What a Hugging Face configuration says about a decoder, in the terms that Megatron is built from.

Llama, Mistral, Mixtral, Qwen2, Qwen3 and Qwen3-MoE, with tied or untied embeddings. Every field that would change what
such a model computes is either in `Architecture` or refused: a model that is nearly the one asked for is never built.
Dropout is not among them: policies are evaluated and trained without it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rl_backends.errors import ModelError
from rl_backends.megatron.rope import Rope, read_rope, rope_problems

MODEL_TYPES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""The `model_type` of configurations that can be read."""

MIXTURES = {"mixtral": "num_local_experts", "qwen3_moe": "num_experts"}
"""Families with experts, and the field that counts them."""

ELSEWHERE = "train it with policy.dtensor_cfg.enabled=true, which runs the Hugging Face model itself"

WHY_NOT: Mapping[str, str] = {
    "gemma3_text": "Gemma-3 norms what a block returns as well as what it takes, scales its embeddings and turns "
    "local and global layers by different rotary bases; Megatron's layer has no place for any of the three",
    "gemma2": "Gemma-2 norms what a block returns as well as what it takes and caps its logits, for which Megatron's "
    "layer has no place",
}
WHY_NOT = {**WHY_NOT, "gemma3": WHY_NOT["gemma3_text"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder of rotary positions, RMS norms and gated SiLU blocks; see `read_architecture`. Sizes are the model's.

    They are whole, never one rank's.
    """

    model_type: str
    """Hugging Face's name of the family."""
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    """Width of the gated block of a dense layer."""
    num_attention_heads: int
    """Heads of queries."""
    num_query_groups: int
    """Heads of keys and values."""
    head_dim: int
    vocab_size: int
    """Rows of the embeddings as they lie in a checkpoint; Megatron's are padded to a multiple of tensor ranks."""
    tied: bool
    """The output layer is the embedding."""
    num_labels: int
    """Numbers that a value or reward head (`score`) says of a token; 0 of a language model."""
    qkv_bias: bool
    """Queries, keys and values have biases (Qwen2); nothing else has."""
    qk_norm: bool
    """Queries and keys are normed head by head (Qwen3)."""
    norm_eps: float
    num_experts: int
    """Of every layer; 0 in a dense model."""
    experts_per_token: int
    expert_ffn_hidden_size: int
    normalise_router: bool
    """The weights of the chosen experts add up to 1 (`norm_topk_prob`)."""
    sliding_windows: tuple[int | None, ...]
    """For each layer how many tokens a token sees, itself among them; None sees all before it."""
    max_positions: int
    rope: Rope

    @property
    def softmax_scale(self) -> float:
        """What attention scores are multiplied by: 1 / sqrt(head_dim), and the square of `rope.attention_scaling`.

        That factor belongs on cosines and sines, and so comes twice, once with queries and once with keys.
        """
        return float(self.head_dim**-0.5 * self.rope.attention_scaling**2)


def read_architecture(hf_config: Any, *, scores: bool = False) -> Architecture:
    """Read the configuration of a causal language model, or of one with a value or reward head."""
    family, module = str(getattr(hf_config, "model_type", None)), type(hf_config).__module__
    if family not in MODEL_TYPES:
        reason = f": {WHY_NOT[family]}" if family in WHY_NOT else ""
        raise ModelError(
            f"model_type={family!r} is not built on Megatron{reason}; what is: {', '.join(MODEL_TYPES)}. {ELSEWHERE}"
        )
    if not module.startswith("transformers.models."):
        raise ModelError(
            f"{type(hf_config).__qualname__} of {module} calls itself model_type={family!r} and is not the "
            f"configuration that transformers has under this name; {ELSEWHERE}"
        )
    if problems := [*_problems(hf_config), *rope_problems(hf_config)]:
        raise ModelError(
            f"model_type={hf_config.model_type!r} is built on Megatron, but not with these fields of its "
            f"configuration:\n" + "\n".join(f"  {problem}" for problem in problems) + f"\nOtherwise {ELSEWHERE}"
        )
    experts = _experts(hf_config)
    # A Mixtral has no dense layers, and so only one width.
    expert_width = "intermediate_size" if family == "mixtral" else "moe_intermediate_size"
    window = _window(hf_config)
    kinds = _layer_types(hf_config) or ("sliding_attention",) * hf_config.num_hidden_layers
    return Architecture(
        model_type=family,
        num_layers=hf_config.num_hidden_layers,
        hidden_size=hf_config.hidden_size,
        ffn_hidden_size=hf_config.intermediate_size,
        num_attention_heads=hf_config.num_attention_heads,
        num_query_groups=_groups(hf_config),
        head_dim=_head_dim(hf_config),
        vocab_size=hf_config.vocab_size,
        tied=bool(hf_config.tie_word_embeddings) and not scores,
        num_labels=hf_config.num_labels if scores else 0,
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "qwen3_moe"),
        norm_eps=float(hf_config.rms_norm_eps),
        num_experts=experts,
        experts_per_token=hf_config.num_experts_per_tok if experts else 0,
        expert_ffn_hidden_size=int(getattr(hf_config, expert_width)) if experts else 0,
        normalise_router=bool(experts and _normalises_router(hf_config)),
        sliding_windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        max_positions=hf_config.max_position_embeddings,
        rope=read_rope(hf_config, head_dim=_head_dim(hf_config)),
    )


def _problems(hf_config: Any) -> Iterator[str]:
    """Everything but rotary positions that is not built here, each with its field and value."""
    heads, groups, head_dim = hf_config.num_attention_heads, _groups(hf_config), _head_dim(hf_config)
    if groups < 1 or heads % groups:
        yield f"num_attention_heads={heads} is no multiple of num_key_value_heads={groups}; both must be positive"
    if head_dim % 2:
        yield f"head_dim={head_dim} is odd, and rotary positions turn pairs"
    if hf_config.hidden_act not in ("silu", "swish"):
        yield f"hidden_act={hf_config.hidden_act!r}: gated blocks are built with 'silu' alone"
    if getattr(hf_config, "attention_bias", False):
        yield (
            "attention_bias=True: it gives the output projection of attention a bias, which Megatron has only together "
            "with biases in the gated block"
        )
    if getattr(hf_config, "mlp_bias", False):
        yield "mlp_bias=True: gated blocks are built without biases"
    if getattr(hf_config, "quantization_config", None) is not None:
        yield "quantization_config: weights are trained as they are; use a checkpoint that is not quantized"
    if (window := _window(hf_config)) is not None and window < 1:
        yield f"sliding_window={window}: a token sees at least itself; use None for no window"
    if (kinds := _layer_types(hf_config)) is not None:
        if unknown := sorted(set(kinds) - {"full_attention", "sliding_attention"}):
            yield f"layer_types has {unknown}: attention is full_attention or sliding_attention here"
        if len(kinds) != hf_config.num_hidden_layers:
            yield f"layer_types names {len(kinds)} layers of num_hidden_layers={hf_config.num_hidden_layers}"
        if window is None and "sliding_attention" in kinds:
            yield "layer_types has 'sliding_attention', and there is no sliding_window; set use_sliding_window"
    if hf_config.model_type not in MIXTURES:
        return
    experts, chosen, name = _experts(hf_config), hf_config.num_experts_per_tok, MIXTURES[hf_config.model_type]
    if experts < 1:
        yield f"{name}={experts}: a mixture has experts; without them it is a dense model"
    elif not 1 <= chosen <= experts:
        yield f"num_experts_per_tok={chosen} must be from 1 to {name}={experts}"
    if chosen == 1 and _normalises_router(hf_config):
        yield "num_experts_per_tok=1 with weights that add up to 1: every weight is 1, and no router learns"
    if hf_config.model_type != "mixtral":
        if hf_config.decoder_sparse_step != 1:
            yield f"decoder_sparse_step={hf_config.decoder_sparse_step}: every layer is a mixture here, or none"
        if hf_config.mlp_only_layers:
            yield f"mlp_only_layers={hf_config.mlp_only_layers}: every layer is a mixture here, or none"


def _groups(hf_config: Any) -> int:
    groups = getattr(hf_config, "num_key_value_heads", None)
    return int(hf_config.num_attention_heads if groups is None else groups)


def _head_dim(hf_config: Any) -> int:
    return int(getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads)


def _experts(hf_config: Any) -> int:
    return int(getattr(hf_config, MIXTURES.get(hf_config.model_type, ""), 0))


def _normalises_router(hf_config: Any) -> bool:
    return hf_config.model_type == "mixtral" or bool(hf_config.norm_topk_prob)


def _window(hf_config: Any) -> int | None:
    window: int | None = getattr(hf_config, "sliding_window", None) if hf_config.model_type != "llama" else None
    return window


def _layer_types(hf_config: Any) -> tuple[str, ...] | None:
    """Only these two ask it; Mistral and Qwen3-MoE have one window for all layers, or none."""
    kinds = getattr(hf_config, "layer_types", None)
    return tuple(kinds) if hf_config.model_type in ("qwen2", "qwen3") and kinds is not None else None
