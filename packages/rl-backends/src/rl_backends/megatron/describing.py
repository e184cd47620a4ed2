"""A backend in words: its layout, what this rank holds, its optimizer."""

from collections.abc import Mapping

from rl_backends.megatron.model import MegatronModel
from rl_backends.megatron.optimizer import MegatronOptimizers

__all__ = ["describe"]

ACCELERATIONS = (
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "apply_rope_fusion",
    "moe_permute_fusion",
    "moe_router_fusion",
    "gradient_accumulation_fusion",
    "overlap_grad_reduce",
    "overlap_param_gather",
)


def describe(model: MegatronModel, *, origin: str, optimizers: MegatronOptimizers | None) -> str:
    """Several lines; the optimizer's are there once training has begun."""
    config, architecture = model.config, model.architecture
    numbers = sum(parameter.numel() for parameter in model.gpt.parameters())
    layers = [layer.layer_number - 1 for layer in model.gpt.decoder.layers]
    head = ", and the head" if model.groups.last_stage else ""
    lines = [
        f"Megatron backend on {config.device}: {_ranks(model.groups.sizes)}",
        f"weights in {config.precision}, gradients and optimizer in float32",
        f"{architecture.model_type} of {architecture.num_layers} layers, {_implementation(model)}",
        f"this rank holds {numbers:,} elements, layers {layers[0]} to {layers[-1]}{head}",
        f"weights from {origin}",
        *([] if model.adapters is None else [model.adapters.explain()]),
        f"microbatches of at most {config.micro_batch_size} rows"
        + ("" if config.micro_batch_tokens is None else f" and {config.micro_batch_tokens} tokens")
        + (", packed" if config.sequence_packing else ", padded to their longest")
        + (f", {config.recompute_granularity} recomputation in backward" if config.recompute_granularity else ""),
    ]
    return "\n".join([*lines, *([] if optimizers is None else [optimizers.explain()])])


def _implementation(model: MegatronModel) -> str:
    """Which attention and which MLP compute, from the modules that are there."""
    config, layer = model.config, model.gpt.decoder.layers[0]
    attention, mlp = type(layer.self_attention.core_attention).__name__, layer.mlp
    kind = type(mlp.experts).__name__ if hasattr(mlp, "experts") else type(mlp).__name__
    kernels = {
        "TorchAttention": "torch's scaled_dot_product_attention",
        "TEDotProductAttention": "Transformer Engine's attention",
        "SequentialMLP": "experts one after the other",
        "TEGroupedMLP": "Transformer Engine's grouped GEMM for experts",
    }
    fused = [name for name in ACCELERATIONS if getattr(config, name)]
    return f"attention {kernels.get(attention, attention)}, MLP {kernels.get(kind, kind)}" + (
        f", with {', '.join(fused)}" if fused else ", no fusions and no overlap"
    )


def _ranks(sizes: Mapping[str, int]) -> str:
    """How they are cut, by axes of more than one; experts lie across those, and are no further cut."""
    axes = [f"{size} {axis}" for axis, size in sizes.items() if axis != "ep" and size > 1]
    if not axes:
        return "one rank"
    text = f"{' x '.join(axes)} ranks"
    return text if sizes["ep"] == 1 else f"{text}, experts shared out over {sizes['ep']}"
