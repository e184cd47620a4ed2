"""Tiny models of the shapes of Llama and Qwen3-MoE, and the ways in which trainers and engines lay them out.

Modules without a forward: names, shapes, dtypes and ties are all that a refit sees.
"""

import functools
import math
import zlib

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
ROW = ("o_proj", "down_proj")


def llama():
    """Two layers, grouped heads, a tied head, odd rows in the vocabulary."""
    shapes = {"model.embed_tokens.weight": (67, 16), "model.norm.weight": (16,)}
    for layer in range(2):
        shapes |= _attention(layer)
        for name, shape in (("gate_proj", (44, 16)), ("up_proj", (44, 16)), ("down_proj", (16, 44))):
            shapes[f"model.layers.{layer}.mlp.{name}.weight"] = shape
    return shapes, "model.embed_tokens.weight"


def qwen3_moe():
    """Two layers with norms of queries and keys, three experts each, a router in float32, an untied head."""
    shapes = {"model.embed_tokens.weight": (40, 16), "model.norm.weight": (16,), "lm_head.weight": (40, 16)}
    for layer in range(2):
        shapes |= _attention(layer)
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.self_attn.q_norm.weight": (4,), f"{prefix}.self_attn.k_norm.weight": (4,)}
        shapes[f"{prefix}.mlp.gate.weight"] = (3, 16)
        for expert in range(3):
            for name, shape in (("gate_proj", (6, 16)), ("up_proj", (6, 16)), ("down_proj", (16, 6))):
                shapes[f"{prefix}.mlp.experts.{expert}.{name}.weight"] = shape
    return shapes, None


MODELS = {"llama": llama, "qwen3_moe": qwen3_moe}


def _attention(layer):
    prefix = f"model.layers.{layer}"
    return {
        f"{prefix}.input_layernorm.weight": (16,),
        f"{prefix}.self_attn.q_proj.weight": (16, 16),
        f"{prefix}.self_attn.k_proj.weight": (8, 16),
        f"{prefix}.self_attn.v_proj.weight": (8, 16),
        f"{prefix}.self_attn.o_proj.weight": (16, 16),
        f"{prefix}.post_attention_layernorm.weight": (16,),
    }


def value(name, shape, version):
    """The same in every process."""
    seed = torch.Generator().manual_seed(zlib.crc32(f"{name} {version}".encode()))
    dtype = torch.float32 if name.endswith("mlp.gate.weight") else torch.bfloat16
    return torch.randn(math.prod(shape), generator=seed).view(shape).to(dtype)


def build(model, version):
    """A module with the state of `version`."""
    shapes, tied_to = MODELS[model]()
    root = nn.Module()
    for name, shape in shapes.items():
        _put(root, name, nn.Parameter(value(name, shape, version)))
    if tied_to is not None:
        _put(root, "lm_head.weight", root.get_parameter(tied_to))
    return root


def laid_out(model, version, layout, ranks):
    """A module with the state of `version`, sharded over `ranks` as "whole", "fsdp", "tp" or "fsdp_tp"."""
    module = build(model, version)
    if layout == "whole":
        return module
    mesh = _mesh(layout, ranks)
    if "tp" in layout:
        for name, parameter in tuple(module.named_parameters()):
            placed = nn.Parameter(distribute_tensor(parameter.data, mesh["tp"], [_placement(name)]))
            for other, same in tuple(module.named_parameters(remove_duplicate=False)):
                if same is parameter:
                    _put(module, other, placed)
    if "fsdp" in layout:
        for layer in module.model.layers.children():
            fully_shard(layer, mesh=mesh["fsdp"])
        fully_shard(module, mesh=mesh["fsdp"])
    return module


@functools.cache
def _mesh(layout, ranks):
    shape, names = ((ranks // 2, 2), ("fsdp", "tp")) if layout == "fsdp_tp" else ((ranks,), (layout,))
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def advance(module, *fresh):
    """What an optimizer step does: new values in the module's own memory."""
    with torch.no_grad():
        for ours, theirs in zip(module.parameters(), laid_out(*fresh).parameters(), strict=True):
            _local(ours).copy_(_local(theirs))


def wrong_tensors(module, *fresh):
    """Names of the tensors of which this rank's part is not, bit for bit, that of a fresh module."""
    expected = dict(laid_out(*fresh).named_parameters())
    return [name for name, ours in module.named_parameters() if not torch.equal(_local(ours), _local(expected[name]))]


def _local(parameter):
    return parameter.data.to_local() if isinstance(parameter.data, DTensor) else parameter.data


def _placement(name):
    kind = name.split(".")[-2]
    return Shard(0) if kind in COLUMN else Shard(1) if kind in ROW else Replicate()


def _put(root, name, parameter):
    *path, last = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root._modules[part]
    root.register_parameter(last, parameter)
