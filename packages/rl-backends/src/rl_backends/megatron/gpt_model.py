"""Megatron's model for an architecture and a layout, on this rank. Its weights are 0 until they are loaded.

Layers are Megatron's own linear layers with our norm and attention, or Transformer Engine's, whose linear layers hold
the norm before them (`linear_qkv.layer_norm_weight` for `input_layernorm.weight`). Imports Megatron only when used.
"""

import copy
import re
import warnings
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_backends.errors import ModelError
from rl_backends.kernels.cpu import rms_norm, runs_here
from rl_backends.megatron.architecture import Architecture
from rl_backends.megatron.attention import TorchAttention
from rl_backends.megatron.config import MegatronConfig
from rl_backends.megatron.cpu_compat import cpu_compat
from rl_backends.megatron.installed import require_megatron

if TYPE_CHECKING:
    from megatron.core.transformer import ModuleSpec, TransformerConfig

    from rl_backends.megatron.decoder import Decoder
    from rl_backends.megatron.groups import ParallelGroups

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SAME_NAMES = (
    "tensor_model_parallel_size",
    "sequence_parallel",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "pipeline_model_parallel_layout",
    "context_parallel_size",
    "expert_model_parallel_size",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "apply_rope_fusion",
    "gradient_accumulation_fusion",
)
"""Fields of `MegatronConfig` that Megatron's `TransformerConfig` has too, with the same meaning."""


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


def transformer_config(
    architecture: Architecture, config: MegatronConfig, *, transformer_engine: bool = False
) -> "TransformerConfig":
    """The configuration of every layer.

    What could be fused into one kernel is left apart unless it is asked for: the order of roundings is then the Hugging
    Face model's. Dropout is 0.
    """
    from megatron.core.transformer import TransformerConfig

    require_layout(architecture, config)
    on_cpu, stages = config.device == "cpu", config.pipeline_model_parallel_size
    dtype = DTYPES[config.precision]
    options: dict[str, Any] = {
        **{name: getattr(config, name) for name in SAME_NAMES},
        "moe_token_dispatcher_type": "alltoall",  # asked of dense models too, where lengths vary
    }
    if config.recompute_granularity == "selective":
        options |= {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    elif config.recompute_granularity == "full":
        options |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if architecture.num_experts:
        options |= {
            "num_moe_experts": architecture.num_experts,
            "moe_router_topk": architecture.experts_per_token,
            "moe_ffn_hidden_size": architecture.expert_ffn_hidden_size,
            # Of all experts before the choice, the weights are their probabilities; of the chosen alone, they add up
            # to 1.
            "moe_router_pre_softmax": not architecture.normalise_router,
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "none",
            "moe_grouped_gemm": transformer_engine,
            "moe_permute_fusion": config.moe_permute_fusion,
            "moe_router_fusion": config.moe_router_fusion,
        }
    sizes = {window for window in architecture.sliding_windows if window is not None}
    if transformer_engine and sizes:
        (window,) = sizes
        options |= {
            # The tokens to the left of a token; plain torch's attention gets its window with its layer's spec.
            "window_size": (window - 1, 0),
            "window_attn_skip_freq": [int(window is not None) for window in architecture.sliding_windows],
            "cp_comm_type": "all_gather",  # over context-parallel ranks; its default, a ring, knows no windows
        }
    with warnings.catch_warnings():
        # said of any recomputed attention, also of ours, which keeps no scores
        warnings.filterwarnings("ignore", message=".*the core_attn is from transformer_engine", category=UserWarning)
        return TransformerConfig(
            num_layers=architecture.num_layers,
            hidden_size=architecture.hidden_size,
            ffn_hidden_size=architecture.ffn_hidden_size,
            num_attention_heads=architecture.num_attention_heads,
            num_query_groups=architecture.num_query_groups,
            kv_channels=architecture.head_dim,
            softmax_scale=architecture.softmax_scale,
            normalization="RMSNorm",
            layernorm_epsilon=architecture.norm_eps,
            qk_layernorm=architecture.qk_norm,
            gated_linear_unit=True,
            activation_func=F.silu,
            add_bias_linear=False,
            add_qkv_bias=architecture.qkv_bias,
            attention_softmax_in_fp32=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            init_method=_zeros,
            output_layer_init_method=_zeros,
            embedding_init_method=_zeros,
            expert_tensor_parallel_size=1,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            use_cpu_initialization=on_cpu,
            calculate_per_token_loss=True,  # gradients are sums, and nobody divides them
            variable_seq_lengths=stages > 1,  # each microbatch is as long as its longest row
            # It waits for a GPU after each message; and over two stages it mixes up what virtual ones send.
            batch_p2p_comm=not on_cpu and config.virtual_pipeline_model_parallel_size is None,
            deallocate_pipeline_outputs=stages > 1,
            transformer_impl="transformer_engine" if transformer_engine else "local",
            cuda_graph_scope=[],  # the default is deprecated, and says so
            **options,
        )


def _zeros(weight: Tensor) -> Tensor:
    """In place of random first values, which take longer to draw than a checkpoint to read, and are replaced by it.

    `perform_initialization=False` would leave memory as it is found, and, worse, the marks of tensor parallelism out,
    which Megatron puts on parameters as it initialises them: gradient norms are counted by them.
    """
    return torch.nn.init.zeros_(weight)


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
        if runs_here(x, self.weight):  # to the bit what the next line computes
            return rms_norm(x, self.weight, self.eps)
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


def layer_spec(layers: "TransformerConfig", *, sliding_window: int | None, engine: bool) -> "ModuleSpec":
    """One layer."""
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.transformer import ModuleSpec

    asked = {
        "num_experts": layers.num_moe_experts,
        "moe_grouped_gemm": layers.moe_grouped_gemm,
        "qk_layernorm": layers.qk_layernorm,
    }
    if engine:
        spec = copy.deepcopy(get_gpt_layer_with_transformer_engine_spec(**asked))
    else:
        spec = copy.deepcopy(get_gpt_layer_local_spec(**asked, normalization="RMSNorm"))
    parts = spec.submodules
    if not asked["num_experts"]:
        parts.mlp.params["ffn_hidden_size"] = layers.ffn_hidden_size  # which Megatron warns about otherwise
    if engine:
        return spec
    if not asked["num_experts"]:
        from rl_backends.megatron.decoder import DenseLayer

        spec.module = DenseLayer
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = ModuleSpec(module=TorchAttention, params={"sliding_window": sliding_window})
    if layers.qk_layernorm:
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
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    from rl_backends.megatron.decoder import (
        Decoder,
        DenseLayer,
        GatedMLP,
        WholeColumns,
        WholeEmbedding,
        WholeGateAndUp,
        WholeRows,
        residual_in_place,
    )

    engine = uses_transformer_engine(config)
    layers = transformer_config(architecture, config, transformer_engine=engine)
    last_norm: type = RMSNorm
    if engine:
        from megatron.core.extensions.transformer_engine import TENorm

        last_norm = TENorm
    place = {"vp_stage": chunk, "pp_rank": groups.pp.rank()}
    first = get_transformer_layer_offset(layers, **place)
    windows = architecture.sliding_windows[first : first + get_num_layers_to_build(layers, **place)]
    specs = [layer_spec(layers, sliding_window=window, engine=engine) for window in windows]
    with cpu_compat(), warnings.catch_warnings():
        # Said of experts, which are not cut.
        warnings.filterwarnings("ignore", message="`sequence_parallel` is set to `True`", category=UserWarning)
        model = Decoder(
            architecture.rope,
            config=layers,
            transformer_layer_spec=TransformerBlockSubmodules(layer_specs=specs, layer_norm=last_norm),
            vocab_size=padded_vocab_size(architecture, config),
            max_sequence_length=architecture.max_positions,
            pre_process=groups.pp.rank() == 0 and not chunk,
            post_process=groups.last_stage
            and (chunk is None or chunk == layers.virtual_pipeline_model_parallel_size - 1),
            vp_stage=chunk,
            parallel_output=True,
            share_embeddings_and_output_weights=architecture.tied,
        )
    # In place of what was built, as a spec with another class than Megatron's would not be given its process group.
    replaced: dict[type, type] = {} if engine else {MLP: GatedMLP}
    apart = False
    if not engine and groups.tp.size() == 1 and not layers.gradient_accumulation_fusion:
        replaced |= {ColumnParallelLinear: WholeColumns, RowParallelLinear: WholeRows}
        if config.device == "cpu" and not config.overlap_grad_reduce:  # which waits for the gradient of each parameter
            replaced[VocabParallelEmbedding] = WholeEmbedding
        apart = config.device == "cpu" and not (architecture.num_experts or layers.bias_activation_fusion)
    for module in model.modules():
        module.__class__ = replaced.get(type(module), type(module))
        if apart and type(module) is GatedMLP:
            module.linear_fc1.__class__ = WholeGateAndUp
        if apart and type(module) is DenseLayer and not layers.bias_dropout_fusion:
            module.self_attn_bda = module.mlp_bda = residual_in_place
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
