"""One tensor-parallel plan for the Llama family, recognised by its parts and not by its class.

The family (Llama, Qwen2, Qwen3, Mistral and whatever else has exactly these parameters; `[x]` is optional):

    embed_tokens
    layers.*    input_layernorm           self_attn.{q,k,v,o}_proj [q_norm, k_norm over one head]
                post_attention_layernorm  mlp.{gate,up,down}_proj
    norm
    [lm_head]   on the model itself, tied to embed_tokens or not

A model with one parameter more, one less, or another kind of module in a place is refused with the reason: a plan that
is nearly right is wrong. The lm_head ends as a DTensor Shard(-1): full logits never exist on one rank.

A layer costs two all-reduces forward and two backward, since the norms hand their output on as DTensor(Replicate).
Megatron-LM (arXiv:1909.08053) is where the cut comes from.
"""

from typing import TYPE_CHECKING

from torch import nn

from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.structure import (
    collapsed,
    decoder_layers,
    direct_parameters,
    head_size,
    joined,
    matching_modules,
    output_head,
)

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

COLWISE = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWWISE = ("self_attn.o_proj", "mlp.down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")


class NotRecognizedError(PlanError):
    """The model is not of the family; the message says where it differs."""


def llama_family_plan(model: nn.Module) -> "dict[str, ParallelStyle]":
    """The plan; NotRecognizedError where the model is not of the family."""
    stack = decoder_layers(model)
    if stack is None:
        raise NotRecognizedError("it holds no nn.ModuleList of decoder layers")
    backbone = stack[0].rpartition(".")[0]
    styles = _styles(model, backbone=backbone, layer=f"{stack[0]}.*")
    _check_parts(model, styles, num_layers=len(stack[1]), layers=stack[0])
    _check_heads(model, stack[1])
    return styles


def _styles(model: nn.Module, *, backbone: str, layer: str) -> "dict[str, ParallelStyle]":
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    from rl_parallel_plans.styles import ReplicatedParallel

    styles: dict[str, ParallelStyle] = {
        joined(backbone, "embed_tokens"): RowwiseParallel(input_layouts=Replicate()),
        **{f"{layer}.{name}": ReplicatedParallel(dtensor_output=True) for name in NORMS},
        **{f"{layer}.{name}": ColwiseParallel() for name in COLWISE},
        **{f"{layer}.{name}": RowwiseParallel() for name in ROWWISE},
        joined(backbone, "norm"): ReplicatedParallel(),
    }
    for name in HEAD_NORMS:
        if matching_modules(model, f"{layer}.{name}"):
            styles[f"{layer}.{name}"] = ReplicatedParallel(partial_gradient=True)
    if (head := output_head(model)) is not None:
        styles[head] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    return styles


def _check_parts(model: nn.Module, styles: "dict[str, ParallelStyle]", *, num_layers: int, layers: str) -> None:
    """Every pattern in every layer, each a module of its kind, and no parameter anywhere else."""
    from rl_parallel_plans.styles import ReplicatedParallel

    covered = set()
    for pattern, style in styles.items():
        matches = matching_modules(model, pattern)
        expected = num_layers if pattern.startswith(f"{layers}.*") else 1
        if len(matches) != expected:
            raise NotRecognizedError(f"{pattern} is there {len(matches)} times, and {expected} were expected")
        kind: type[nn.Module] = nn.Embedding if pattern.endswith("embed_tokens") else nn.Linear
        for name, module in matches:
            covered.add(name)
            if not isinstance(style, ReplicatedParallel) and not isinstance(module, kind):
                raise NotRecognizedError(f"{pattern} is a {type(module).__name__} and not an nn.{kind.__name__}")
            if not all(p.is_floating_point() for p in module.parameters()):
                raise NotRecognizedError(f"{pattern} is quantized: its parameters are not floating-point")
    for path, name, _ in direct_parameters(model):
        if path not in covered:
            raise NotRecognizedError(f"it has a parameter {collapsed(joined(path, name))}, which the family has not")


def _check_heads(model: nn.Module, layers: nn.ModuleList) -> None:
    """Heads of a known size; a norm over all of them at once (OLMo 2) needs another plan than one over each."""
    for layer in layers:
        attention = layer.get_submodule("self_attn")
        size = head_size(attention, getattr(model, "config", None))
        if size is None:
            raise NotRecognizedError("neither self_attn.head_dim nor the model's config says how large a head is")
        for name in ("q_norm", "k_norm"):
            for parameter in getattr(attention, name, nn.Module()).parameters():
                if parameter.shape != (size,):
                    raise NotRecognizedError(
                        f"self_attn.{name} spans {tuple(parameter.shape)} features and one head has {size}: it is not "
                        "a norm over each head"
                    )
