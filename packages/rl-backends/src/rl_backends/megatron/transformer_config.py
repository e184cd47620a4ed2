"""Megatron's `TransformerConfig` for an architecture and a layout.

What could be fused into one kernel is left apart unless it is asked for: the order of roundings is then the Hugging
Face model's. Dropout is 0.
"""

import re
import warnings
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_backends.errors import ModelError
from rl_backends.megatron.architecture import Architecture
from rl_backends.megatron.config import MegatronConfig

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def transformer_config(
    architecture: Architecture, config: MegatronConfig, *, transformer_engine: bool = False
) -> "TransformerConfig":
    """The configuration of every layer."""
    from megatron.core.transformer import TransformerConfig

    require_layout(architecture, config)
    with warnings.catch_warnings():
        # said of any recomputed attention, also of ours, which keeps no scores
        warnings.filterwarnings("ignore", message=".*the core_attn is from transformer_engine", category=UserWarning)
        return TransformerConfig(
            **_sizes(architecture),
            **_layout(config),
            **_recompute(config),
            **(_mixture(architecture, config, grouped=transformer_engine) if architecture.num_experts else {}),
            **(_windows(architecture) if transformer_engine else {}),
            transformer_impl="transformer_engine" if transformer_engine else "local",
            cuda_graph_scope=[],  # the default is deprecated, and says so
        )


def require_layout(architecture: Architecture, config: MegatronConfig) -> None:
    """Refuse what cannot be sharded, with every reason at once, where Megatron asserts one at a time."""
    tensor = config.tensor_model_parallel_size
    experts, expert_ranks = architecture.num_experts, config.expert_model_parallel_size
    multiples = [
        ("num_key_value_heads", architecture.num_query_groups, "tensor_model_parallel_size", tensor),
        ("num_experts", experts, "expert_model_parallel_size", expert_ranks if experts else 1),
        # Experts are not cut.
        ("intermediate_size", 0 if experts else architecture.ffn_hidden_size, "tensor_model_parallel_size", tensor),
    ]
    problems = [
        f"{name}={size} of the model is no multiple of {parts}={ranks}; lower it to a divisor"
        for name, size, parts, ranks in multiples
        if size % ranks
    ]
    try:
        layers_of_stages(architecture.num_layers, config)
    except ValueError as problem:
        problems.append(str(problem))
    if expert_ranks > 1 and not experts:
        problems.append(f"expert_model_parallel_size={expert_ranks}, and the model has no experts; set it to 1")
    if config.freeze_moe_router and not experts:
        problems.append("freeze_moe_router=True, and the model has no experts; leave it out")
    if experts and tensor > 1 and not config.sequence_parallel:
        problems.append(
            f"tensor_model_parallel_size={tensor} of a mixture of experts needs sequence_parallel=True, or its ranks "
            f"would each send the same tokens to the experts"
        )
    if experts and tensor > 1 and expert_ranks == 1:
        # Megatron sums the gradients of experts over data-parallel ranks alone then, and not over tensor-parallel ones.
        problems.append(
            f"tensor_model_parallel_size={tensor} of a mixture of experts needs expert_model_parallel_size > 1: each "
            f"tensor-parallel rank would train all experts on its own tokens; set it to {tensor}"
        )
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise ModelError(f"a {architecture.model_type} of this size cannot be laid out as asked:\n{listed}")


def layers_of_stages(num_layers: int, config: MegatronConfig) -> list[list[int]]:
    """The numbers of the layers that each pipeline stage holds, from 0, as Megatron shares them out.

    With virtual stages it is the first chunk of each stage, then the second of each, and so on.
    """
    stages, chunks = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size or 1
    if config.pipeline_model_parallel_layout is not None:
        counts = _counts_of_layout(config.pipeline_model_parallel_layout, num_layers, parts_wanted=stages * chunks)
    else:
        first, last = config.num_layers_in_first_pipeline_stage, config.num_layers_in_last_pipeline_stage
        given = sum(each is not None for each in (first, last))
        left, between = num_layers - (first or 0) - (last or 0), stages - given
        if left < 0 or (left % between if between else left) or (given and between and left == 0):
            asked = "" if not given else f" less {first or 0} of the first stage and {last or 0} of the last"
            raise ValueError(
                f"num_hidden_layers={num_layers} of the model{asked} cannot be shared out evenly to {between} stages "
                f"(pipeline_model_parallel_size={stages}); set num_layers_in_first_pipeline_stage and "
                f"num_layers_in_last_pipeline_stage, or pipeline_model_parallel_layout"
            )
        share = left // between if between else 0
        counts = [share if first is None else first, *[share] * (stages - 2), share if last is None else last]
        counts = counts[-stages:]
        if uncut := [count for count in counts if count % chunks]:
            raise ValueError(
                f"num_hidden_layers={num_layers} of the model gives a stage {uncut[0]} layers, which is no multiple of "
                f"virtual_pipeline_model_parallel_size={chunks}; lower it to a divisor, or set "
                f"pipeline_model_parallel_layout"
            )
        counts = [count // chunks for count in counts] * chunks
    ends = list(accumulate(counts))
    parts = [list(range(end - count, end)) for end, count in zip(ends, counts, strict=True)]
    return [list(chain(*parts[stage::stages])) for stage in range(stages)]


def _counts_of_layout(layout: str, num_layers: int, *, parts_wanted: int) -> list[int]:
    """How many layers each stage, or each chunk of one, has in Megatron's letters."""
    spelled = re.sub(r"(\w)\*(\d+)", lambda found: found[1] * int(found[2]), layout.replace(",", ""))
    parts = spelled.split("|")
    if not re.fullmatch(r"Et*(\|t*)*L", spelled) or len(parts) != parts_wanted or spelled.count("t") != num_layers:
        raise ValueError(
            f"pipeline_model_parallel_layout={layout!r} must have {parts_wanted} stages with | between them, E first, "
            f"L last, and {num_layers} layers t in all; it has {len(parts)} stages and {spelled.count('t')} layers"
        )
    if empty := [number for number, part in enumerate(parts) if "t" not in part]:
        raise ValueError(f"pipeline_model_parallel_layout={layout!r} gives stage {empty[0]} no layer; each needs one")
    return [part.count("t") for part in parts]


def padded_vocab_size(architecture: Architecture, config: MegatronConfig) -> int:
    """Rows of Megatron's embeddings over all tensor-parallel ranks, which hold as many each.

    Rows past the vocabulary are 0 and stand for no word: whoever reads logits leaves them out.
    """
    ranks = config.tensor_model_parallel_size
    return -(-architecture.vocab_size // ranks) * ranks


def _zeros(weight: Tensor) -> Tensor:
    """In place of random first values, which take longer to draw than a checkpoint to read, and are replaced by it.

    `perform_initialization=False` would leave memory as it is found, and, worse, the marks of tensor parallelism out,
    which Megatron puts on parameters as it initialises them: gradient norms are counted by them.
    """
    return torch.nn.init.zeros_(weight)


def _sizes(architecture: Architecture) -> dict[str, Any]:
    return {
        "num_layers": architecture.num_layers,
        "hidden_size": architecture.hidden_size,
        "ffn_hidden_size": architecture.ffn_hidden_size,
        "num_attention_heads": architecture.num_attention_heads,
        "num_query_groups": architecture.num_query_groups,
        "kv_channels": architecture.head_dim,
        "softmax_scale": architecture.softmax_scale,
        "normalization": "RMSNorm",
        "layernorm_epsilon": architecture.norm_eps,
        "qk_layernorm": architecture.qk_norm,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": architecture.qkv_bias,
        "attention_softmax_in_fp32": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method": _zeros,
        "output_layer_init_method": _zeros,
        "embedding_init_method": _zeros,
    }


def _layout(config: MegatronConfig) -> dict[str, Any]:
    on_cpu, stages = config.device == "cpu", config.pipeline_model_parallel_size
    virtual = config.virtual_pipeline_model_parallel_size
    dtype = DTYPES[config.precision]
    return {
        "tensor_model_parallel_size": config.tensor_model_parallel_size,
        "sequence_parallel": config.sequence_parallel,
        "pipeline_model_parallel_size": stages,
        "virtual_pipeline_model_parallel_size": virtual,
        "context_parallel_size": config.context_parallel_size,
        "expert_model_parallel_size": config.expert_model_parallel_size,
        "expert_tensor_parallel_size": 1,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bias_activation_fusion": config.bias_activation_fusion,
        "bias_dropout_fusion": config.bias_dropout_fusion,
        "apply_rope_fusion": config.apply_rope_fusion,
        "gradient_accumulation_fusion": config.gradient_accumulation_fusion,
        "num_layers_in_first_pipeline_stage": config.num_layers_in_first_pipeline_stage,
        "num_layers_in_last_pipeline_stage": config.num_layers_in_last_pipeline_stage,
        "pipeline_model_parallel_layout": config.pipeline_model_parallel_layout,
        "bf16": dtype == torch.bfloat16,
        "use_cpu_initialization": on_cpu,
        "calculate_per_token_loss": True,  # gradients are sums, and nobody divides them
        "variable_seq_lengths": stages > 1,  # each microbatch is as long as its longest row
        # It waits for a GPU after each message; and over two stages it mixes up what virtual ones send.
        "batch_p2p_comm": not on_cpu and virtual is None,
        "deallocate_pipeline_outputs": stages > 1,
        "moe_token_dispatcher_type": "alltoall",  # asked of dense models too, where lengths vary
    }


def _recompute(config: MegatronConfig) -> dict[str, Any]:
    if config.recompute_granularity is None:
        return {}
    if config.recompute_granularity == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _mixture(architecture: Architecture, config: MegatronConfig, *, grouped: bool) -> dict[str, Any]:
    return {
        "num_moe_experts": architecture.num_experts,
        "moe_router_topk": architecture.experts_per_token,
        "moe_ffn_hidden_size": architecture.expert_ffn_hidden_size,
        # Of all experts before the choice, the weights are their probabilities; of the chosen alone, they add up to 1.
        "moe_router_pre_softmax": not architecture.normalise_router,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": grouped,
        "moe_permute_fusion": config.moe_permute_fusion,
        "moe_router_fusion": config.moe_router_fusion,
    }


def _windows(architecture: Architecture) -> dict[str, Any]:
    """Transformer Engine counts the tokens to the left of a token; ours gets its window with its layer's spec."""
    sizes = {window for window in architecture.sliding_windows if window is not None}
    if not sizes:
        return {}
    (window,) = sizes
    return {
        "window_size": (window - 1, 0),
        "window_attn_skip_freq": [int(window is not None) for window in architecture.sliding_windows],
        "cp_comm_type": "all_gather",  # over context-parallel ranks; its default, a ring, knows no windows
    }
