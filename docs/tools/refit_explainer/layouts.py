"""From `fsdp=4,tp=2` to the layout of every tensor: what FSDP2, tensor, pipeline and expert parallelism usually do.

Knows names of Hugging Face checkpoints, no modules: a rule goes by the end of a name. A guess for planning ahead; the
manifests of real sides are the truth, and take its place as saved JSON.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

from refit_explainer.checkpoint import Checkpoint, read_checkpoint
from rl_refit.layout import Layout
from rl_refit.manifest import Manifest, TensorMeta

__all__ = ["AXES", "RULES", "manifest_of_side", "parse_axes", "read_side"]

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
_NUMBERED = {
    "pp": ("layers", re.compile(r"(?:^|\.)layers\.(\d+)\.")),
    "ep": ("experts", re.compile(r"\.experts\.(\d+)\.")),
}

RULES = [
    f"tp cuts dim 0 of {', '.join(_COLUMNWISE)}; dim 1 of {', '.join(_ROWWISE)};",
    f"   the vocabulary of {', '.join(_VOCABULARY)}; it replicates the rest. In the sink, key and value heads are",
    "   replicated where there are fewer than tp. `--source` and `--sink` also take saved manifests.",
]
"""What tensor parallelism is taken to cut, for people."""


def parse_axes(text: str) -> dict[str, int]:
    """Read `fsdp=4,tp=2`, outermost axis of the mesh first, as name → size.

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
    return sizes


def manifest_of_side(checkpoint: Checkpoint, axes: dict[str, int], *, replicate_kv_heads: bool = False) -> Manifest:
    """What each rank of a mesh holds of the checkpoint.

    Args:
        checkpoint: Names, shapes and dtypes.
        axes: Of the mesh, as of `parse_axes`.
        replicate_kv_heads: Whether tensor parallelism over more ranks than key and value heads replicates each, as
            engines do.

    Raises:
        ValueError: Tensor, pipeline or expert parallelism does not divide what it cuts; names both numbers.
    """
    metas, tp = checkpoint.manifest.tensors, axes.get("tp", 1)
    counts: dict[str, int] = {}
    for axis, (what, pattern) in _NUMBERED.items():
        numbers = [int(found[1]) for meta in metas if (found := pattern.search(meta.name))]
        size, counts[axis] = axes.get(axis, 1), max(numbers, default=-1) + 1
        if size > 1 and not numbers:
            raise ValueError(f"{axis}={size} needs a model with {what}; no name of the checkpoint numbers any")
        if counts[axis] % size:
            raise ValueError(f"{axis}={size} does not divide {counts[axis]} {what}; choose a size that does")

    def place_on(axis: str, name: str) -> int | None:
        """The one place of an axis that holds a tensor; None where every place does."""
        size, found = axes.get(axis, 1), _NUMBERED[axis][1].search(name)
        if size == 1 or (axis == "ep" and not found):
            return None
        if found:
            return int(found[1]) * size // counts[axis]
        return 0 if "embed" in name else size - 1

    def layout(meta: TensorMeta) -> Layout:
        module = meta.name.rpartition(".")[0].rpartition(".")[2]  # up_proj of model.layers.0.mlp.up_proj.weight
        tp_dim = 0 if module in (*_COLUMNWISE, *_VOCABULARY) else 1 if module in _ROWWISE else None
        if tp_dim is not None and tp_dim >= len(meta.shape):
            tp_dim = None
        if tp_dim is not None and module not in _VOCABULARY and meta.shape[tp_dim] % tp:
            shape = list(meta.shape)
            raise ValueError(f"tp={tp} does not divide dim {tp_dim} of {meta.name}, {shape}; choose a tp that does")
        copies, heads = 1, checkpoint.num_kv_heads if replicate_kv_heads and module in _KEY_VALUE else None
        if heads is not None and tp_dim == 0 and heads < tp:
            if tp % heads:
                raise ValueError(f"tp={tp} is no multiple of the {heads} key and value heads; choose one that is")
            copies = tp // heads
        places = {axis: place for axis in _NUMBERED if (place := place_on(axis, meta.name)) is not None}
        dims = (("tp", tp_dim), ("fsdp", 0 if meta.shape else None))
        return _layout(tuple(axes.items()), tuple(places.items()), dims, kv_copies=copies)

    return Manifest(tuple(replace(meta, layout=layout(meta), feeding="fed") for meta in metas))


@cache
def _layout(
    axes: tuple[tuple[str, int], ...],
    places: tuple[tuple[str, int], ...],
    dims: tuple[tuple[str, int | None], ...],
    *,
    kv_copies: int,
) -> Layout:
    """A mesh without the axes of which one place was picked; the tensor-parallel one is split in two for copies."""
    picked, cut = dict(places), dict(dims)
    mesh: list[tuple[str, int, int | None]] = []
    for name, size in axes:
        if name == "tp" and kv_copies > 1:
            mesh += [(name, size // kv_copies, cut[name]), (name, kv_copies, None)]
        elif name not in picked:
            mesh.append((name, size, cut.get(name)))
    sharded = tuple(dim for _, _, dim in mesh)
    coordinates = itertools.product(*(range(size) for _, size in axes))  # of the ranks, row by row
    names = [name for name, _ in axes]
    return Layout(
        mesh_shape=tuple(size for _, size, _ in mesh),
        sharded_dims=sharded,
        strided_axes=tuple(
            axis
            for axis, (name, _, dim) in enumerate(mesh)
            if name == "fsdp" and dim is not None and dim in sharded[axis + 1 :]
        ),
        ranks=tuple(
            rank
            for rank, coordinate in enumerate(coordinates)
            if picked.items() <= dict(zip(names, coordinate, strict=True)).items()
        ),
    )


def read_side(text: str, checkpoint: Checkpoint, *, replicate_kv_heads: bool = False) -> tuple[Manifest, str]:
    """One side as the command line gives it, axes or the path of a saved manifest; and what to call it.

    Raises:
        ValueError: The axes do not fit the checkpoint, or the file is no manifest.
        FileNotFoundError: It is neither.
    """
    if "=" in text:
        axes = parse_axes(text)
        title = ", ".join(f"{name}={size}" for name, size in axes.items())
        return manifest_of_side(checkpoint, axes, replicate_kv_heads=replicate_kv_heads), title
    path = Path(text)
    if not path.is_file():
        raise FileNotFoundError(f"{text!r} is neither axes, such as fsdp=4,tp=2, nor a file with a saved manifest")
    return read_checkpoint(path).manifest, f"the manifest {path.name}"
