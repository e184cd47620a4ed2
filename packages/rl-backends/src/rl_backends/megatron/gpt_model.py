"""Builds Megatron's model for an architecture, on this rank. Its weights are 0 until they are loaded.

Layers are Megatron's own linear layers with our norm and attention, or Transformer Engine's, whose linear layers hold
the norm before them (`linear_qkv.layer_norm_weight` for `input_layernorm.weight`). Imports Megatron only when used.
"""

import copy
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_backends.errors import ModelError
from rl_backends.megatron.architecture import Architecture
from rl_backends.megatron.attention import TorchAttention
from rl_backends.megatron.config import MegatronConfig
from rl_backends.megatron.cpu_compat import cpu_compat
from rl_backends.megatron.installed import require_megatron
from rl_backends.megatron.transformer_config import padded_vocab_size, transformer_config

if TYPE_CHECKING:
    from megatron.core.transformer import ModuleSpec, TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from rl_backends.megatron.decoder import Decoder
    from rl_backends.megatron.groups import ParallelGroups


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim (arXiv:1910.07467)."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        """A norm of `hidden_size` features, ones for weights."""
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] to the same, in the dtype of `x` times that of the weight."""
        if x.dtype == self.weight.dtype == torch.float32:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        exact = x.float()
        exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * exact.to(x.dtype)

    def extra_repr(self) -> str:
        """Features and eps."""
        return f"{self.weight.numel()}, eps={self.eps}"


def transformer_engine_available() -> bool:
    """Whether layers can be Transformer Engine's: it is installed, and there is a GPU."""
    require_megatron()
    from megatron.core.extensions.transformer_engine import HAVE_TE

    return bool(HAVE_TE) and torch.cuda.is_available()


def block_spec(
    architecture: Architecture,
    transformer_config: "TransformerConfig",
    *,
    pipeline_rank: int,
    chunk: int | None,
    transformer_engine: bool,
) -> "TransformerBlockSubmodules":
    """The layers of one pipeline stage, or of one chunk of it, each with its window, and the last norm."""
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    last_norm: type = RMSNorm
    if transformer_engine:
        from megatron.core.extensions.transformer_engine import TENorm

        last_norm = TENorm
    count = get_num_layers_to_build(transformer_config, vp_stage=chunk, pp_rank=pipeline_rank)
    first = get_transformer_layer_offset(transformer_config, vp_stage=chunk, pp_rank=pipeline_rank)
    windows = architecture.sliding_windows[first : first + count]
    return TransformerBlockSubmodules(
        layer_specs=[
            layer_spec(transformer_config, sliding_window=window, transformer_engine=transformer_engine)
            for window in windows
        ],
        layer_norm=last_norm,
    )


def layer_spec(
    transformer_config: "TransformerConfig", *, sliding_window: int | None, transformer_engine: bool
) -> "ModuleSpec":
    """One layer."""
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
    if not asked["num_experts"]:
        from rl_backends.megatron.decoder import DenseLayer

        spec.module = DenseLayer
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = ModuleSpec(module=TorchAttention, params={"sliding_window": sliding_window})
    if transformer_config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec


def build_gpt_model(
    architecture: Architecture,
    config: MegatronConfig,
    *,
    groups: "ParallelGroups",
    chunk: int | None = None,
) -> "Decoder":
    """This rank's part of the model: its pipeline stage's layers, its tensor-parallel share of each.

    With virtual stages it is one chunk of that, the layers of number `chunk`, from 0; else None.

    Matrices are 0 and norms 1, nothing is drawn at random: whoever loads replaces all but the padding of embeddings.
    """
    require_megatron()
    from megatron.core.transformer.mlp import MLP

    from rl_backends.megatron.decoder import Decoder, GatedMLP

    engine = uses_transformer_engine(config)
    layers = transformer_config(architecture, config, transformer_engine=engine)
    with cpu_compat(), warnings.catch_warnings():
        # Said of experts, which are not cut.
        warnings.filterwarnings("ignore", message="`sequence_parallel` is set to `True`", category=UserWarning)
        model = Decoder(
            architecture.rope,
            config=layers,
            transformer_layer_spec=block_spec(
                architecture, layers, pipeline_rank=groups.pp.rank(), chunk=chunk, transformer_engine=engine
            ),
            vocab_size=padded_vocab_size(architecture, config),
            max_sequence_length=architecture.max_positions,
            pre_process=groups.pp.rank() == 0 and not chunk,
            post_process=groups.last_stage
            and (chunk is None or chunk == layers.virtual_pipeline_model_parallel_size - 1),
            vp_stage=chunk,
            parallel_output=True,
            share_embeddings_and_output_weights=architecture.tied,
        )
    for module in model.modules():
        if not engine and type(module) is MLP:  # a spec with another class would not be given its process group
            module.__class__ = GatedMLP
    if architecture.num_labels and model.post_process:
        # A value or reward head in the place of the output layer; the same on every tensor-parallel rank, each of
        # which reads whole hidden states and so has the whole gradient of it.
        del model.output_layer
        model.score = torch.nn.Linear(
            architecture.hidden_size, architecture.num_labels, bias=False, dtype=layers.params_dtype
        )
        torch.nn.init.zeros_(model.score.weight)
    return model if config.device == "cpu" else model.to(torch.device("cuda", torch.cuda.current_device()))


def uses_transformer_engine(config: MegatronConfig) -> bool:
    """Whether layers are Transformer Engine's. They are on a GPU, unless `transformer_impl` says otherwise."""
    if config.device == "cpu" or config.transformer_impl == "local":
        return False
    if not transformer_engine_available():
        raise ModelError(
            "device='cuda' builds Transformer Engine's layers, and transformer_engine is not installed for this GPU: "
            "install it, or set transformer_impl='local' for plain torch (scaled_dot_product_attention, and experts "
            "one after the other, which is slower)"
        )
    return True
