"""Every tensor of a few published models, from the numbers of their configurations.

Knows names, shapes and what tensor parallelism does to each; loads nothing and needs no transformers. Names are those
of the checkpoints on the Hub, where each expert has its own matrices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from typing import Literal

__all__ = ["MODELS", "ModelTensor", "Role", "SimulatedModel"]

Role = Literal["replicated", "column", "row", "kv"]
"""What tensor parallelism does: nothing, cut the rows of the output (dim 0) or of the input (dim 1), or cut dim 0 by
heads of keys and values, which several ranks hold where there are fewer heads than ranks."""

_FP8_BLOCK = 128
"""Rows and columns that share one scale in DeepSeek-V3's FP8 checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTensor:
    """One tensor of a checkpoint."""

    name: str
    """As in the checkpoint."""

    shape: tuple[int, ...]
    """Global shape."""

    role: Role = "replicated"
    """What tensor parallelism does to it."""

    layer: int | None = None
    """Its layer; None before the first, `num_layers` after the last."""

    expert: int | None = None
    """Which routed expert it belongs to, where it does."""

    dtype: str = "bfloat16"
    """As torch writes it."""

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class SimulatedModel:
    """The configuration of a model, and the tensors that follow from it."""

    name: str
    """What `--model` calls it."""

    published_parameters: float
    """Total parameters as its authors publish them."""

    source: str
    """Where configuration and total are published."""

    hidden: int
    num_layers: int
    vocabulary: int
    heads: int
    intermediate: int
    """Of a dense MLP."""

    kv_heads: int = 0
    """Heads of keys and values; 0 with multi-head latent attention."""

    head_dim: int = 128
    tied: bool = False
    """Whether the head shares the memory of the embedding."""

    experts: int = 0
    expert_intermediate: int = 0
    dense_layers: int = 0
    """Layers before the first with experts."""

    shared_experts: int = 0
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    rope_head_dim: int = 0

    @cached_property
    def tensors(self) -> tuple[ModelTensor, ...]:
        """All tensors in the order of the layers, in bfloat16, as a trainer holds them."""
        layers = (tensor for layer in range(self.num_layers) for tensor in self._layer(layer))
        ends = [ModelTensor(name="model.norm.weight", shape=(self.hidden,), layer=self.num_layers)]
        if not self.tied:
            head = (self.vocabulary, self.hidden)
            ends.append(ModelTensor(name="lm_head.weight", shape=head, role="column", layer=self.num_layers))
        embedding = (self.vocabulary, self.hidden)
        return (ModelTensor(name="model.embed_tokens.weight", shape=embedding, role="column"), *layers, *ends)

    @cached_property
    def parameters(self) -> int:
        """Elements of all tensors, tied ones once."""
        return sum(tensor.numel for tensor in self.tensors)

    def tensors_as(self, wire: str) -> tuple[ModelTensor, ...]:
        """The tensors as they cross the wire.

        Args:
            wire: "bfloat16", or "float8" for projections in one byte and a float32 scale for each block of 128 × 128,
                as in DeepSeek-V3's checkpoints; norms, embeddings, head and router stay in bfloat16.
        """
        if wire == "bfloat16":
            return self.tensors
        return tuple(part for tensor in self.tensors for part in _quantised(tensor))

    def _layer(self, layer: int) -> Iterator[ModelTensor]:
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield ModelTensor(name=f"{prefix}.{norm}.weight", shape=(self.hidden,), layer=layer)
        yield from self._latent_attention(layer) if self.kv_lora_rank else self._grouped_attention(layer)
        if self.experts and layer >= self.dense_layers:
            yield from self._experts(layer)
        else:
            yield from self._mlp(f"{prefix}.mlp", layer, self.intermediate)

    def _grouped_attention(self, layer: int) -> Iterator[ModelTensor]:
        rows, kv_rows = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: tuple[tuple[str, tuple[int, ...], Role], ...] = (
            ("q_proj", (rows, self.hidden), "column"),
            ("k_proj", (kv_rows, self.hidden), "kv"),
            ("v_proj", (kv_rows, self.hidden), "kv"),
            ("o_proj", (self.hidden, rows), "row"),
            ("q_norm", (self.head_dim,), "replicated"),
            ("k_norm", (self.head_dim,), "replicated"),
        )
        for part, shape, role in shapes:
            yield ModelTensor(name=f"model.layers.{layer}.self_attn.{part}.weight", shape=shape, role=role, layer=layer)

    def _latent_attention(self, layer: int) -> Iterator[ModelTensor]:
        """Multi-head latent attention: low-rank queries, keys and values (DeepSeek-V2, arXiv 2405.04434)."""
        query_dim = self.head_dim + self.rope_head_dim
        shapes: tuple[tuple[str, tuple[int, ...], Role], ...] = (
            ("q_a_proj", (self.q_lora_rank, self.hidden), "replicated"),
            ("q_a_layernorm", (self.q_lora_rank,), "replicated"),
            ("q_b_proj", (self.heads * query_dim, self.q_lora_rank), "column"),
            ("kv_a_proj_with_mqa", (self.kv_lora_rank + self.rope_head_dim, self.hidden), "replicated"),
            ("kv_a_layernorm", (self.kv_lora_rank,), "replicated"),
            ("kv_b_proj", (self.heads * 2 * self.head_dim, self.kv_lora_rank), "column"),
            ("o_proj", (self.hidden, self.heads * self.head_dim), "row"),
        )
        for part, shape, role in shapes:
            yield ModelTensor(name=f"model.layers.{layer}.self_attn.{part}.weight", shape=shape, role=role, layer=layer)

    def _experts(self, layer: int) -> Iterator[ModelTensor]:
        prefix = f"model.layers.{layer}.mlp"
        yield ModelTensor(name=f"{prefix}.gate.weight", shape=(self.experts, self.hidden), layer=layer)
        if self.kv_lora_rank:  # DeepSeek-V3's router balances its experts by a bias, kept in float32
            bias = f"{prefix}.gate.e_score_correction_bias"
            yield ModelTensor(name=bias, shape=(self.experts,), layer=layer, dtype="float32")
        for expert in range(self.experts):
            yield from self._mlp(f"{prefix}.experts.{expert}", layer, self.expert_intermediate, expert=expert)
        if self.shared_experts:
            size = self.shared_experts * self.expert_intermediate
            yield from self._mlp(f"{prefix}.shared_experts", layer, size)

    def _mlp(self, prefix: str, layer: int, size: int, *, expert: int | None = None) -> Iterator[ModelTensor]:
        wide, tall = (size, self.hidden), (self.hidden, size)
        for part in ("gate_proj", "up_proj"):
            yield ModelTensor(name=f"{prefix}.{part}.weight", shape=wide, role="column", layer=layer, expert=expert)
        yield ModelTensor(name=f"{prefix}.down_proj.weight", shape=tall, role="row", layer=layer, expert=expert)


def _quantised(tensor: ModelTensor) -> Iterator[ModelTensor]:
    if "_proj" not in tensor.name:
        yield tensor
        return
    yield replace(tensor, dtype="float8_e4m3fn")
    blocks = tuple(-(-size // _FP8_BLOCK) for size in tensor.shape)
    yield replace(tensor, name=f"{tensor.name}_scale_inv", shape=blocks, dtype="float32")


_qwen3 = partial(SimulatedModel, vocabulary=151_936)
_latent = partial(
    SimulatedModel,
    hidden=7168,
    num_layers=61,
    intermediate=18_432,
    expert_intermediate=2048,
    shared_experts=1,
    q_lora_rank=1536,
    kv_lora_rank=512,
    rope_head_dim=64,
)

MODELS = {
    model.name: model
    for model in (
        _qwen3(
            name="qwen3-4b",
            published_parameters=4.0e9,
            source="Qwen/Qwen3-4B: config.json, model card",
            hidden=2560,
            num_layers=36,
            intermediate=9728,
            tied=True,
            heads=32,
            kv_heads=8,
        ),
        _qwen3(
            name="qwen3-8b",
            published_parameters=8.2e9,
            source="Qwen/Qwen3-8B: config.json, model card",
            hidden=4096,
            num_layers=36,
            intermediate=12_288,
            heads=32,
            kv_heads=8,
        ),
        _qwen3(
            name="qwen3-30b-a3b",
            published_parameters=30.5e9,
            source="Qwen/Qwen3-30B-A3B: config.json, model card",
            hidden=2048,
            num_layers=48,
            intermediate=6144,
            experts=128,
            expert_intermediate=768,
            heads=32,
            kv_heads=4,
        ),
        _qwen3(
            name="qwen3-235b-a22b",
            published_parameters=235e9,
            source="Qwen/Qwen3-235B-A22B: config.json, model card",
            hidden=4096,
            num_layers=94,
            intermediate=12_288,
            experts=128,
            expert_intermediate=1536,
            heads=64,
            kv_heads=4,
        ),
        _latent(
            name="deepseek-v3",
            published_parameters=671e9,
            source="deepseek-ai/DeepSeek-V3: config.json, README (main model, without multi-token prediction)",
            vocabulary=129_280,
            heads=128,
            experts=256,
            dense_layers=3,
        ),
        _latent(
            name="kimi-k2",
            published_parameters=1026.5e9,
            source="moonshotai/Kimi-K2-Instruct: config.json, parameters of the checkpoint as the Hub counts them",
            vocabulary=163_840,
            heads=64,
            experts=384,
            dense_layers=1,
        ),
    )
}
"""The presets by name."""
