"""An engine with the storage of real ones, small enough to check element by element; and a checkpoint for it.

Fused QKV with replicated KV heads, in vLLM's or in Megatron's order; fused gate and up in either order; stacked experts
with tensor or expert parallelism, w2 transposed; a padded vocabulary, a tied head, and a buffer that no loader writes.
Its `load_weights` is written with copies, as engines write theirs, and knows nothing of bindings.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from rl_refit import Layout, Manifest, TensorMeta


@dataclass(frozen=True, kw_only=True)
class Shape:
    hidden: int = 8
    head_dim: int = 2
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 12
    vocabulary: int = 11
    padding: int = 4
    experts: int = 4
    expert_intermediate: int = 4
    layers: int = 1
    megatron: bool = False
    """QKV interleaved by group."""
    up_first: bool = False
    transposed: bool = True
    """w13 and w2 are kept as [expert, in, out]."""
    dtype: torch.dtype = torch.bfloat16


def checkpoint_shapes(shape):
    hidden, inner, moe = shape.hidden, shape.intermediate, shape.expert_intermediate
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    shapes = {"model.embed_tokens.weight": (shape.vocabulary, hidden), "model.norm.weight": (hidden,)}
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        for letter, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{prefix}self_attn.{letter}_proj.weight"] = (rows, hidden)
            shapes[f"{prefix}self_attn.{letter}_proj.bias"] = (rows,)
        shapes[f"{prefix}self_attn.o_proj.weight"] = (hidden, q)
        shapes[f"{prefix}mlp.gate_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, inner)
        for expert in range(shape.experts):
            shapes[f"{prefix}experts.{expert}.gate_proj.weight"] = (moe, hidden)
            shapes[f"{prefix}experts.{expert}.up_proj.weight"] = (moe, hidden)
            shapes[f"{prefix}experts.{expert}.down_proj.weight"] = (hidden, moe)
    return shapes


def manifest(shape):
    dtype = str(shape.dtype).removeprefix("torch.")
    return Manifest(
        tuple(
            TensorMeta(name=name, shape=size, dtype=dtype, layout=Layout.whole())
            for name, size in checkpoint_shapes(shape).items()
        )
    )


def checkpoint(shape, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(size, generator=generator).to(shape.dtype) for name, size in checkpoint_shapes(shape).items()
    }


class HuggingFace(nn.Module):
    """A module whose parameters have the names and values of a checkpoint."""

    def __init__(self, tensors):
        super().__init__()
        for name, tensor in tensors.items():
            *path, last = name.split(".")
            module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module._modules[part]
            module.register_parameter(last, nn.Parameter(tensor.clone()))


class Attention(nn.Module):
    def __init__(self, shape, tp, rank):
        super().__init__()
        self.shape, self.tp, self.rank = shape, tp, rank
        self.local_heads, self.local_kv_heads = shape.heads // tp, max(1, shape.kv_heads // tp)
        rows = (self.local_heads + 2 * self.local_kv_heads) * shape.head_dim
        self.qkv_proj = nn.Linear(shape.hidden, rows, dtype=shape.dtype)
        self.o_proj = nn.Linear(self.local_heads * shape.head_dim, shape.hidden, bias=False, dtype=shape.dtype)

    def load(self, name, weight):
        if name == "o_proj.weight":
            columns = self.o_proj.in_features
            self.o_proj.weight.data.copy_(weight.narrow(1, self.rank * columns, columns))
            return
        letter, kind = name[0], name.split(".")[1]
        target, head_dim = getattr(self.qkv_proj, kind).data, self.shape.head_dim
        if letter == "q":
            mine = weight.narrow(0, self.rank * self.local_heads * head_dim, self.local_heads * head_dim)
        else:
            first = self.rank * self.shape.kv_heads // self.tp
            mine = weight.narrow(0, first * head_dim, self.local_kv_heads * head_dim)
        for part, place in zip(mine.split(head_dim), self.places(letter), strict=True):
            target[place * head_dim : (place + 1) * head_dim] = part

    def places(self, letter):
        """In which block of head_dim rows each head of q, k or v lies."""
        q, kv = self.local_heads, self.local_kv_heads
        if not self.shape.megatron:
            start = {"q": 0, "k": q, "v": q + kv}[letter]
            return range(start, start + (q if letter == "q" else kv))
        per_group = q // kv
        if letter == "q":
            return [head // per_group * (per_group + 2) + head % per_group for head in range(q)]
        return [group * (per_group + 2) + per_group + (letter == "v") for group in range(kv)]


class GatedMLP(nn.Module):
    def __init__(self, shape, tp, rank):
        super().__init__()
        self.shape, self.rank, self.inner = shape, rank, shape.intermediate // tp
        self.gate_up_proj = nn.Linear(shape.hidden, 2 * self.inner, bias=False, dtype=shape.dtype)
        self.down_proj = nn.Linear(self.inner, shape.hidden, bias=False, dtype=shape.dtype)

    def load(self, name, weight):
        if name == "down_proj.weight":
            self.down_proj.weight.data.copy_(weight[:, self.rank * self.inner : (self.rank + 1) * self.inner])
            return
        second = name.startswith("gate") if self.shape.up_first else name.startswith("up")
        half = self.gate_up_proj.weight.data.narrow(0, self.inner * second, self.inner)
        half.copy_(weight.narrow(0, self.rank * self.inner, self.inner))


class Experts(nn.Module):
    def __init__(self, shape, tp, rank, *, ep):
        super().__init__()
        self.shape, self.rank, self.ep = shape, rank, ep
        self.local_experts = shape.experts // tp if ep else shape.experts
        self.inner = shape.expert_intermediate if ep else shape.expert_intermediate // tp
        w13 = torch.empty(self.local_experts, 2 * self.inner, shape.hidden, dtype=shape.dtype)
        w2 = torch.empty(self.local_experts, shape.hidden, self.inner, dtype=shape.dtype)
        if shape.transposed:
            w13, w2 = w13.mT.contiguous(), w2.mT.contiguous()
        self.w13_weight, self.w2_weight = nn.Parameter(w13), nn.Parameter(w2)

    def load(self, name, weight):
        expert, kind = int(name.split(".")[0]), name.split(".")[1]
        first = 0 if self.ep else self.rank * self.inner
        if self.ep:
            expert -= self.rank * self.local_experts
            if not 0 <= expert < self.local_experts:
                return
        if kind == "down_proj":
            mine, target = weight.narrow(1, first, self.inner), self.w2_weight.data[expert]
            target.copy_(mine.t() if self.shape.transposed else mine)
            return
        second = kind == "gate_proj" if self.shape.up_first else kind == "up_proj"
        target = self.w13_weight.data[expert]
        target = target.t() if self.shape.transposed else target
        target[self.inner * second : self.inner * (1 + second)] = weight.narrow(0, first, self.inner)


class Layer(nn.Module):
    def __init__(self, shape, tp, rank, *, ep):
        super().__init__()
        self.self_attn = Attention(shape, tp, rank)
        self.mlp = GatedMLP(shape, tp, rank)
        self.experts = Experts(shape, tp, rank, ep=ep)


class ToyEngine(nn.Module):
    """One rank of `tp`; experts are spread over the same ranks with `ep`."""

    def __init__(self, shape, *, tp=1, rank=0, ep=False):
        super().__init__()
        self.shape, self.rank = shape, rank
        multiple = shape.padding * tp
        self.rows = -(-shape.vocabulary // multiple) * multiple // tp
        self.embed = nn.Embedding(self.rows, shape.hidden, dtype=shape.dtype)
        self.lm_head = nn.Linear(shape.hidden, self.rows, bias=False, dtype=shape.dtype)
        self.lm_head.weight = self.embed.weight
        self.norm = nn.LayerNorm(shape.hidden, bias=False, dtype=shape.dtype)
        self.layers = nn.ModuleList(Layer(shape, tp, rank, ep=ep) for _ in range(shape.layers))
        self.register_buffer("normalizer", torch.tensor(shape.hidden**0.5), persistent=False)
        for parameter in self.parameters():
            parameter.data.fill_(-7.0)

    def load_weights(self, weights):
        for name, weight in weights:
            path = name.removeprefix("model.").split(".")
            if path[0] == "embed_tokens":
                start, stop = (min(number * self.rows, len(weight)) for number in (self.rank, self.rank + 1))
                self.embed.weight.data[: stop - start].copy_(weight[start:stop])
            elif path[0] == "norm":
                self.norm.weight.data.copy_(weight)
            else:
                part = getattr(self.layers[int(path[1])], path[2])
                part.load(".".join(path[3:]), weight)
