"""From `fsdp=4,tp=2` to the layout of every tensor: what FSDP2, tensor, pipeline and expert parallelism usually do.

Knows names of Hugging Face checkpoints, no modules: a rule goes by the end of a name. A guess for planning ahead; the
manifests of real sides are the truth, and take its place as saved JSON.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rl_refit.explain.checkpoint import Checkpoint, CheckpointTensor, read_checkpoint
from rl_refit.layout import Layout
from rl_refit.manifest import Manifest, TensorMeta

__all__ = ["AXES", "Axes", "count_usually_fused", "manifest_of_side", "parse_axes", "read_side", "rules_in_words"]

AXES = {
    "dp": "replicas",
    "fsdp": "FSDP2, cuts dim 0, after tp",
    "tp": "tensor parallelism, by the names below",
    "pp": "pipeline stages: layers in equal runs, embeddings on the first, norm and head on the last",
    "ep": "experts in equal runs; all else is replicated over it",
}

_COLUMNWISE = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3", "q_b_proj", "kv_b_proj")
_ROWWISE = ("o_proj", "down_proj", "w2")
_VOCABULARY = ("embed_tokens", "lm_head")
_KEY_VALUE = ("k_proj", "v_proj")
_USUALLY_FUSED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3")

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Axes:
    """The axes of one side's mesh, outermost first, by name."""

    sizes: tuple[tuple[str, int], ...]

    @property
    def num_ranks(self) -> int:
        """Ranks of the mesh."""
        return math.prod(size for _, size in self.sizes)

    def size(self, name: str) -> int:
        """Size of an axis; 1 where there is none of that name."""
        return dict(self.sizes).get(name, 1)

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in self.sizes)


def parse_axes(text: str) -> Axes:
    """Read `fsdp=4,tp=2`, outermost axis first.

    Raises:
        ValueError: An axis is unknown, given twice, or has no size.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if name not in AXES:
            raise ValueError(f"no axis {name!r} in {text!r}; there are {', '.join(AXES)}, as in fsdp=4,tp=2")
        if name in sizes:
            raise ValueError(f"axis {name!r} comes twice in {text!r}; an axis has one size")
        if not size.isdecimal() or int(size) < 1:
            raise ValueError(f"axis {name!r} in {text!r} needs a number of ranks, such as {name}=2")
        sizes[name] = int(size)
    return Axes(tuple(sizes.items()))


def rules_in_words() -> list[str]:
    """What tensor parallelism is taken to cut."""
    return [
        f"tp cuts dim 0 of {', '.join(_COLUMNWISE)}; dim 1 of {', '.join(_ROWWISE)};",
        f"   the vocabulary of {', '.join(_VOCABULARY)}; it replicates the rest. In the sink, key and value heads are",
        "   replicated where there are fewer than tp. `--source` and `--sink` also take saved manifests.",
    ]


def count_usually_fused(manifest: Manifest) -> int:
    """How many tensors are named like those that engines keep in one with others: q, k, v; gate, up."""
    return sum(_module(meta.name) in _USUALLY_FUSED for meta in manifest.tensors if meta.travels)


def manifest_of_side(checkpoint: Checkpoint, axes: Axes, *, replicate_kv_heads: bool = False) -> Manifest:
    """What each rank of a mesh holds of the checkpoint.

    Args:
        checkpoint: Names, shapes and dtypes.
        axes: The mesh.
        replicate_kv_heads: Whether tensor parallelism over more ranks than key and value heads replicates each, as
            engines do.

    Raises:
        ValueError: Tensor, pipeline or expert parallelism does not divide what it cuts; names both numbers.
    """
    side = _Side(checkpoint, axes, replicate_kv_heads=replicate_kv_heads)
    return Manifest(
        tuple(
            TensorMeta(
                name=tensor.name,
                shape=tensor.shape,
                dtype=tensor.dtype,
                layout=side.layout(tensor),
                tied_to=tensor.tied_to,
            )
            for tensor in checkpoint.tensors
        )
    )


class _Side:
    """Layouts of one mesh, each made once."""

    def __init__(self, checkpoint: Checkpoint, axes: Axes, *, replicate_kv_heads: bool) -> None:
        self.axes = axes
        names = [tensor.name for tensor in checkpoint.tensors]
        self.num_layers = _count(_LAYER, names)
        self.num_experts = _count(_EXPERT, names)
        self.kv_heads = checkpoint.num_kv_heads if replicate_kv_heads else None
        for axis, number, what in (("pp", self.num_layers, "layers"), ("ep", self.num_experts, "experts")):
            size = axes.size(axis)
            if size > 1 and number < 1:
                raise ValueError(f"{axis}={size} needs a model with {what}; no name of the checkpoint numbers any")
            if number % size:
                raise ValueError(f"{axis}={size} does not divide {number} {what}; choose a size that does")
        self.made: dict[tuple[object, ...], Layout] = {}

    def layout(self, tensor: CheckpointTensor) -> Layout:
        picked = {
            axis: place for axis, place in (("pp", self._stage(tensor)), ("ep", self._owner(tensor))) if place >= 0
        }
        tp_dim = self._tp_dim(tensor)
        split_kv = self._kv_split(tensor) if tp_dim == 0 else 1
        key = (tuple(picked.items()), tp_dim, split_kv, bool(tensor.shape))
        if key not in self.made:
            fsdp_dim = 0 if tensor.shape else None
            self.made[key] = _layout(self.axes, picked, {"tp": tp_dim, "fsdp": fsdp_dim}, split_kv=split_kv)
        return self.made[key]

    def _stage(self, tensor: CheckpointTensor) -> int:
        """The pipeline stage that holds a tensor; -1 without stages."""
        stages = self.axes.size("pp")
        if stages == 1:
            return -1
        layer = _LAYER.search(tensor.name)
        if layer:
            return int(layer[1]) * stages // self.num_layers
        return 0 if "embed" in tensor.name else stages - 1

    def _owner(self, tensor: CheckpointTensor) -> int:
        """The place on the expert axis that holds an expert; -1 for what every place holds."""
        expert = _EXPERT.search(tensor.name)
        return int(expert[1]) * self.axes.size("ep") // self.num_experts if expert and self.axes.size("ep") > 1 else -1

    def _tp_dim(self, tensor: CheckpointTensor) -> int | None:
        module = _module(tensor.name)
        dim = 0 if module in (*_COLUMNWISE, *_VOCABULARY) else 1 if module in _ROWWISE else None
        if dim is None or dim >= len(tensor.shape):
            return None
        tp, size = self.axes.size("tp"), tensor.shape[dim]
        if module not in _VOCABULARY and size % tp:
            raise ValueError(
                f"tp={tp} does not divide dim {dim} of {tensor.name}, {list(tensor.shape)}; choose a tp that does"
            )
        return dim

    def _kv_split(self, tensor: CheckpointTensor) -> int:
        """On how many ranks of the tensor-parallel axis each key and value head lies."""
        tp, heads = self.axes.size("tp"), self.kv_heads
        if heads is None or _module(tensor.name) not in _KEY_VALUE or heads >= tp:
            return 1
        if tp % heads:
            raise ValueError(f"tp={tp} is no multiple of the {heads} key and value heads; choose one that is")
        return tp // heads


def _layout(axes: Axes, picked: dict[str, int], dims: dict[str, int | None], *, split_kv: int) -> Layout:
    """A mesh without the axes on which one place was picked, and its tensor-parallel axis split in two."""
    names: list[str] = []
    mesh_shape: list[int] = []
    sharded: list[int | None] = []
    for name, size in axes.sizes:
        if name in picked:
            continue
        parts = [(size // split_kv, dims.get(name)), (split_kv, None)] if name == "tp" and split_kv > 1 else []
        for part_size, dim in parts or [(size, dims.get(name))]:
            names.append(name)
            mesh_shape.append(part_size)
            sharded.append(dim)
    strided = tuple(axis for axis, name in enumerate(names) if name == "fsdp" and sharded[axis] in sharded[axis + 1 :])
    return Layout(
        mesh_shape=tuple(mesh_shape),
        sharded_dims=tuple(sharded),
        strided_axes=strided if dims["fsdp"] is not None else (),
        ranks=tuple(_ranks_at(axes, picked)),
    )


def _ranks_at(axes: Axes, picked: dict[str, int]) -> Iterator[int]:
    """Ranks of the mesh, row by row, at the picked places."""
    for rank in range(axes.num_ranks):
        rest, place = rank, {}
        for name, size in reversed(axes.sizes):
            rest, place[name] = divmod(rest, size)
        if all(place[name] == at for name, at in picked.items()):
            yield rank


def _module(name: str) -> str:
    """`up_proj` of `model.layers.0.mlp.up_proj.weight`."""
    return name.rpartition(".")[0].rpartition(".")[2]


def _count(pattern: re.Pattern[str], names: list[str]) -> int:
    return max((int(found[1]) for found in map(pattern.search, names) if found), default=-1) + 1


def read_side(text: str, checkpoint: Checkpoint, *, replicate_kv_heads: bool = False) -> tuple[Manifest, str]:
    """One side as the command line gives it, axes or the path of a saved manifest; and what to call it.

    Raises:
        ValueError: The axes do not fit the checkpoint, or the file is no manifest.
        FileNotFoundError: It is neither.
    """
    if "=" in text:
        axes = parse_axes(text)
        return manifest_of_side(checkpoint, axes, replicate_kv_heads=replicate_kv_heads), str(axes)
    path = Path(text)
    if not path.is_file():
        raise FileNotFoundError(f"{text!r} is neither axes, such as fsdp=4,tp=2, nor a file with a saved manifest")
    read = read_checkpoint(path).manifest
    assert read is not None
    return read, f"the manifest {path.name}"
