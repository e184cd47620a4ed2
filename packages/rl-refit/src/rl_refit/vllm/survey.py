"""What one worker's engine needs of a source, proved by tracing `load_weights` on a model without memory.

Runs in a worker. A second instance of the engine's model class is made on the meta device from a copy of its
configuration; its `load_weights` is given the source's tensors, on meta as well, and every write is noted. The engine
itself is only looked at. What the answer, plain data, says of the engine's tensors, by the names they have in vLLM:

    complete    every element is written, from source tensors
    padded      so, but for elements that the loader fills itself: a vocabulary that is padded
    partial     some elements are written by nobody: how many, of how many
    derived     the engine makes it itself: buffers that no checkpoint holds, and what a layer of attention writes when
                it processes its weights after loading
    never       nothing of a source is written there
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rl_refit.errors import RefitError
from rl_refit.layout import Layout, Region
from rl_refit.manifest import Manifest, TensorMeta
from rl_refit.tracing import WriteCoverage, trace_writes
from rl_refit.vllm.copies import Copies, Place, Write, box_within, storage_of, strides_by_dim

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["Landing", "Survey", "named_tensors", "survey"]


@dataclass(frozen=True, slots=True)
class Landing:
    """Where a box of a source tensor goes, unchanged but for a cast, in a tensor of the engine as it is made."""

    box: Region
    """Of the source tensor."""

    name: str
    """The engine's name of its tensor."""

    shape: tuple[int, ...]
    """Of the engine's tensor."""

    offset: int
    """Of the box within the engine's tensor, in elements from its first."""

    strides: tuple[int, ...]
    """In the engine's tensor, in the order of the dims of the source tensor."""

    same_dtype: bool
    """Whether the bytes stay the same."""


@dataclass(frozen=True, slots=True)
class Survey:
    """The answer, and what stays in the worker."""

    answer: dict[str, Any]

    landings: dict[str, tuple[Landing, ...]]
    """By source tensor, where all of its uses by this worker are plain copies."""

    users: dict[str, tuple[str, ...]]
    """The engine's tensors, each memory once, that are made from a source tensor; by source tensor."""

    changed: frozenset[str]
    """The engine's tensors that are not just copied and filled up."""


def survey(config: VllmConfig, rows: Sequence[Sequence[Any]]) -> Survey:
    """Trace what an engine of `config` does with source tensors, given as rows of name, dtype and shape."""
    import vllm

    sources = {
        name: TensorMeta(name=name, dtype=dtype, shape=tuple(shape), layout=Layout.whole())
        for name, dtype, shape in rows
    }
    config = _copy_of(config)
    model = _on_meta(config)
    tensors = named_tensors(model)
    copies = Copies()
    answer = {"vllm": vllm.__version__, "architecture": type(model).__name__, "ties": _ties(tensors)}
    loaded = _load(model, config, copies=copies, sources=sources)
    if isinstance(loaded, list):
        return Survey({**answer, "refused": loaded}, {}, {}, frozenset())
    answer |= {
        "refused": None,
        "unused": list(loaded.unused),
        "clashes": [clash for name, tensor in tensors.items() for clash in _clashes(name, tensor, copies)],
        "casts": _casts(sources, tensors, copies),
        **_sorted_out(loaded, model, config, copies=copies),
    }
    roots = {name: tensor for name, tensor in tensors.items() if name not in answer["ties"]}
    return Survey(answer, *_landings(sources, roots, copies))


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer of `model` by each of its names."""
    parameters, buffers = model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    return {name: tensor.detach() for name, tensor in itertools.chain(parameters, buffers)}


# -- The model that is traced ----------------------------------------------------------------------------------------


def _copy_of(config: VllmConfig) -> VllmConfig:
    """The configuration, with registers of its own for the layers that a model's construction enters by name."""
    traced, compilation = copy.copy(config), copy.copy(config.compilation_config)
    compilation.static_forward_context, compilation.static_all_moe_layers = {}, []
    traced.compilation_config = compilation
    return traced


def _on_meta(config: VllmConfig) -> nn.Module:
    """The model as the engine's loader makes it before it loads, without memory."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import get_model_architecture
    from vllm.utils.torch_utils import set_default_torch_dtype

    model_class, _ = get_model_architecture(config.model_config)
    dtype = set_default_torch_dtype(config.model_config.dtype)
    with set_current_vllm_config(config), dtype, _own_rope_cache(), torch.device("meta"):
        model: nn.Module = model_class(vllm_config=config, prefix="")
    return model


@contextmanager
def _own_rope_cache() -> Iterator[None]:
    """Keep the rotary embeddings that all models of a process share apart from those on meta."""
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT

    kept = dict(_ROPE_DICT)
    _ROPE_DICT.clear()
    try:
        yield
    finally:
        _ROPE_DICT.clear()
        _ROPE_DICT.update(kept)


def _load(
    model: Any, config: VllmConfig, *, copies: Copies, sources: Mapping[str, TensorMeta]
) -> WriteCoverage | list[str]:
    """Trace the loader; the source tensor at which it raised, and what, where it did."""
    from vllm.config import set_current_vllm_config

    offered = ""

    def offer(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        nonlocal offered
        for name, tensor in copies.watch(weights):
            offered = name
            yield name, tensor

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        with copies:
            model.load_weights(offer(weights))

    try:
        with set_current_vllm_config(config):
            return trace_writes(load, model, Manifest(tuple(sources.values())))
    except Exception as error:  # noqa: BLE001  (whatever a model's loader raises is the answer)
        return [offered, f"{type(error).__name__}: {error}"]


# -- What the writes come to -----------------------------------------------------------------------------------------


def _sorted_out(coverage: WriteCoverage, model: nn.Module, config: VllmConfig, *, copies: Copies) -> dict[str, Any]:
    kinds: dict[str, list[str]] = {kind: [] for kind in ("complete", "padded", "derived", "never")}
    tensors, written = named_tensors(model), {*coverage.complete, *coverage.partial}
    for name, tensor in tensors.items():
        writes = copies.to(tensor)
        if name not in written or not any(write.names for write in writes):
            kinds["derived" if _makes_itself(model, config, name) else "never"].append(name)
        elif name in coverage.complete:
            kinds["complete" if all(write.names for write in writes) else "padded"].append(name)
    partial = {name: [n, tensors[name].numel()] for name, n in coverage.partial.items() if name not in kinds["never"]}
    return {**kinds, "partial": partial}


def _makes_itself(model: nn.Module, config: VllmConfig, name: str) -> bool:
    """Whether no checkpoint holds the tensor, or its layer overwrites it in what every reload ends with."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    owner_name, _, own_name = name.rpartition(".")
    owner: Any = model.get_submodule(owner_name)
    if own_name in owner._non_persistent_buffers_set:  # noqa: SLF001  (torch has no other word for it)
        return True
    if not is_deferred_attention_layer(owner):
        return False
    try:
        with set_current_vllm_config(config):
            made = trace_writes(
                lambda _: owner.process_weights_after_loading(config.model_config.dtype), owner, Manifest(())
            )
    except (RefitError, RuntimeError, AttributeError):  # it needs values, so nothing is proved
        return False
    return own_name in made.complete


def _clashes(name: str, tensor: Tensor, copies: Copies) -> list[str]:
    """Pairs of source tensors that are written to the same elements, where only one can survive."""
    copied = [(write.names[0], write.target) for write in copies.to(tensor) if write.origin is not None]
    boxes = [(source, box_within(place, Place.of(tensor))) for source, place in dict.fromkeys(copied)]
    placed = [(source, box) for source, box in boxes if box is not None]
    if sum(box.numel for _, box in placed) <= tensor.numel():
        return []
    pairs = itertools.combinations(placed, 2)
    clashing = {(one, two) for (one, box), (two, other) in pairs if one != two and box.intersect(other)}
    return [f"{one} and {two} are both written to {name}" for one, two in sorted(clashing)]


def _casts(sources: Mapping[str, TensorMeta], tensors: Mapping[str, Tensor], copies: Copies) -> dict[str, str]:
    """Source tensors that the engine keeps in another dtype."""
    writes = [write for tensor in tensors.values() for write in copies.to(tensor) if len(write.names) == 1]
    kept = {write.names[0]: write.target.dtype for write in writes}
    return {
        name: str(dtype).removeprefix("torch.") for name, dtype in kept.items() if dtype != sources[name].torch_dtype
    }


def _ties(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The engine's tensors that are another one's memory."""
    roots: dict[int, str] = {}
    ties = {name: roots.setdefault(storage_of(tensor), name) for name, tensor in tensors.items()}
    return {name: root for name, root in ties.items() if name != root}


def _landings(
    sources: Mapping[str, TensorMeta], tensors: Mapping[str, Tensor], copies: Copies
) -> tuple[dict[str, tuple[Landing, ...]], dict[str, tuple[str, ...]], frozenset[str]]:
    landings: dict[str, list[Landing]] = {}
    users: dict[str, dict[str, None]] = {}
    computed: set[str] = set()
    changed: set[str] = set()
    for name, tensor in tensors.items():
        copied: list[Region] = []
        for write in copies.to(tensor):
            for source in write.names:
                users.setdefault(source, {})[name] = None
            if write.names and (landing := _landing(write, sources, name=name, tensor=tensor)) is not None:
                landings.setdefault(write.names[0], []).append(landing)
                into = box_within(write.target, Place.of(tensor))
                copied += [into] if into is not None else []
            elif write.names:
                computed.update(write.names)
                changed.add(name)
            elif not _leaves(write, copied, tensor):
                changed.add(name)
    plain = {source: tuple(dict.fromkeys(each)) for source, each in landings.items() if source not in computed}
    return plain, {source: tuple(names) for source, names in users.items()}, frozenset(changed)


def _landing(write: Write, sources: Mapping[str, TensorMeta], *, name: str, tensor: Tensor) -> Landing | None:
    """Where a write puts a box of one source tensor, if it is a plain copy of a box."""
    if write.origin is None:
        return None
    source = write.names[0]
    shape = sources[source].shape
    row_major = Place(0, shape, torch.empty(shape, device="meta").stride(), write.origin.dtype)
    box = box_within(write.origin, row_major)
    if box is None:
        return None
    return Landing(
        box=Region(source, box.offsets, box.shape),
        name=name,
        shape=tuple(tensor.shape),
        offset=write.target.offset - int(tensor.storage_offset()),
        strides=strides_by_dim(write.origin, row_major, write.target),
        same_dtype=write.origin.dtype == write.target.dtype,
    )


def _leaves(write: Write, copied: Sequence[Region], tensor: Tensor) -> bool:
    """Whether a write that reads no source leaves alone what was copied before: padding."""
    into = box_within(write.target, Place.of(tensor))
    if not copied:
        return write.fills
    return write.fills and into is not None and all(into.intersect(box) is None for box in copied)
