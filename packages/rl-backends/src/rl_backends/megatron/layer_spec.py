"""What Megatron builds its layers from: its own linear layers with our norm and attention, or Transformer Engine's.

Names of parameters differ: Transformer Engine's linear layers hold the norm before them
(`linear_qkv.layer_norm_weight` for `input_layernorm.weight`). Imports Megatron only when it is used.
"""

import copy
from typing import TYPE_CHECKING

import torch

from rl_backends.megatron.attention import TorchAttention
from rl_backends.megatron.installed import require_megatron
from rl_backends.megatron.norm import RMSNorm

if TYPE_CHECKING:
    from megatron.core.transformer import ModuleSpec, TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from rl_backends.megatron.architecture import Architecture

__all__ = ["block_spec", "layer_spec", "transformer_engine_available"]


def transformer_engine_available() -> bool:
    """Whether layers can be Transformer Engine's: it is installed, and there is a GPU.

    Raises:
        MissingDependencyError: megatron-core is absent, or another release.
    """
    require_megatron()
    from megatron.core.extensions.transformer_engine import HAVE_TE

    return bool(HAVE_TE) and torch.cuda.is_available()


def block_spec(
    architecture: "Architecture",
    transformer_config: "TransformerConfig",
    *,
    pipeline_rank: int,
    transformer_engine: bool,
) -> "TransformerBlockSubmodules":
    """The layers of one pipeline stage, each with the window that it has in the whole model, and the last norm.

    Args:
        architecture: whose `sliding_windows` are read.
        transformer_config: of `transformer_config`.
        pipeline_rank: of the stage.
        transformer_engine: whose layers.
    """
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    count = get_num_layers_to_build(transformer_config, pp_rank=pipeline_rank)
    first = get_transformer_layer_offset(transformer_config, pp_rank=pipeline_rank)
    windows = architecture.sliding_windows[first : first + count]
    return TransformerBlockSubmodules(
        layer_specs=[
            layer_spec(transformer_config, sliding_window=window, transformer_engine=transformer_engine)
            for window in windows
        ],
        layer_norm=_last_norm(transformer_engine=transformer_engine),
    )


def layer_spec(
    transformer_config: "TransformerConfig", *, sliding_window: int | None, transformer_engine: bool
) -> "ModuleSpec":
    """One layer.

    Args:
        transformer_config: of `transformer_config`.
        sliding_window: tokens that a token sees; None sees all before it. Transformer Engine's attention reads it in
            the configuration instead.
        transformer_engine: whose layers.
    """
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.transformer import ModuleSpec

    asked = {
        "num_experts": transformer_config.num_moe_experts,
        "moe_grouped_gemm": transformer_config.moe_grouped_gemm,
        "qk_layernorm": transformer_config.qk_layernorm,
    }
    if transformer_engine:
        spec = copy.deepcopy(get_gpt_layer_with_transformer_engine_spec(**asked))
    else:
        spec = copy.deepcopy(get_gpt_layer_local_spec(**asked, normalization="RMSNorm"))
    parts = spec.submodules
    if not asked["num_experts"]:
        parts.mlp.params["ffn_hidden_size"] = transformer_config.ffn_hidden_size  # which Megatron warns about otherwise
    if transformer_engine:
        return spec
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = ModuleSpec(module=TorchAttention, params={"sliding_window": sliding_window})
    if transformer_config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec


def _last_norm(*, transformer_engine: bool) -> type:
    if not transformer_engine:
        return RMSNorm
    from megatron.core.extensions.transformer_engine import TENorm

    norm: type = TENorm
    return norm
