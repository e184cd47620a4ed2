"""What one worker's engine needs of a source, proved by tracing `load_weights` on a model without memory.

Runs in a worker. A second instance of the engine's model class is made on the meta device from a copy of its
configuration; its `load_weights` is given the source's tensors, on meta as well, and every write is noted. The engine
itself is only looked at. What the answer, plain data, says of the engine's tensors, by the names they have in vLLM:

    never       nothing of a source is written there, and the engine does not make it itself: buffers that no checkpoint
                holds, and what a layer of attention writes when it processes its weights after loading
    partial     some elements are written by nobody: how many, of how many
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
from rl_refit.tracing.memory import Place, read_memory
from rl_refit.tracing.writes import Recorder, Write, record_writes, trace_writes

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["Landing", "Survey", "survey", "surveyed"]


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
    from vllm.config import set_current_vllm_config

    sources = Manifest(
        tuple(
            TensorMeta(name=name, dtype=dtype, shape=tuple(shape), layout=Layout.whole()) for name, dtype, shape in rows
        )
    )
    config = _copy_of(config)
    model: Any = _on_meta(config)
    answer: dict[str, Any] = {"architecture": type(model).__name__, "ties": read_memory(model).tied}
    offered = ""

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        def offer() -> Iterator[tuple[str, Tensor]]:
            nonlocal offered
            for name, tensor in weights:
                offered = name
                yield name, tensor

        model.load_weights(offer())

    try:
        with set_current_vllm_config(config):
            recorder = record_writes(load, model, sources)
    except Exception as error:  # noqa: BLE001  (whatever a model's loader raises is the answer)
        return Survey({**answer, "refused": [offered, f"{type(error).__name__}: {error}"]}, {}, {}, frozenset())
    answer |= {"refused": None, **_sorted_out(recorder, model, config)}
    return surveyed(answer, recorder, read_memory(model).tensors)


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


# -- What the writes come to -----------------------------------------------------------------------------------------


def _sorted_out(recorder: Recorder, model: nn.Module, config: VllmConfig) -> dict[str, Any]:
    coverage = recorder.coverage()
    memory, written = read_memory(model), {*coverage.complete, *coverage.partial}
    tensors = memory.tensors | {name: memory.tensors[root] for name, root in memory.tied.items()}
    never = [
        name
        for name, tensor in tensors.items()
        if name not in written or not any(write.names for write in recorder.writes_to(tensor))
        if not _makes_itself(model, config, name)
    ]
    partial = {name: [n, tensors[name].numel()] for name, n in coverage.partial.items() if name not in never}
    return {"never": never, "partial": partial, "unused": list(coverage.unused)}


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


def surveyed(answer: dict[str, Any], recorder: Recorder, tensors: Mapping[str, Tensor]) -> Survey:
    """The survey of what was written to `tensors`, the engine's own; adds clashes and casts to `answer`."""
    landings: dict[str, list[Landing]] = {}
    users: dict[str, dict[str, None]] = {}
    kept: dict[str, torch.dtype] = {}
    computed: set[str] = set()
    changed: set[str] = set()
    clashes: list[str] = []
    for name, tensor in tensors.items():
        copied: dict[tuple[str, Region], None] = {}
        for write in recorder.writes_to(tensor):
            for source in write.names:
                users.setdefault(source, {})[name] = None
                kept |= {source: write.target.dtype} if len(write.names) == 1 else {}
            into = write.target.box_in(Place.of(tensor))
            if write.source is not None and into is not None:
                copied[write.source, into] = None
            if (landing := _landing(write, recorder.sources, name=name, tensor=tensor)) is not None:
                landings.setdefault(landing.box.name, []).append(landing)
            elif write.names:
                computed |= write.names
                changed.add(name)
            # Padding reads no source, and leaves alone what was copied before.
            elif not write.fills or (copied and (into is None or any(into.intersect(box) for _, box in copied))):
                changed.add(name)
        if sum(box.numel for _, box in copied) > tensor.numel():  # only one of two can survive at the same elements
            pairs = itertools.combinations(copied, 2)
            clashing = {(one, two) for (one, box), (two, other) in pairs if one != two and box.intersect(other)}
            clashes += [f"{one} and {two} are both written to {name}" for one, two in sorted(clashing)]
    casts = {
        name: str(dtype).removeprefix("torch.") for name, dtype in kept.items() if dtype != recorder.sources[name].dtype
    }
    return Survey(
        {**answer, "clashes": clashes, "casts": casts},
        {source: tuple(dict.fromkeys(each)) for source, each in landings.items() if source not in computed},
        {source: tuple(names) for source, names in users.items()},
        frozenset(changed),
    )


def _landing(write: Write, sources: Mapping[str, Tensor], *, name: str, tensor: Tensor) -> Landing | None:
    """Where a write puts a box of one source tensor, if it is a plain copy of a box."""
    if write.origin is None or write.source is None:
        return None
    whole = Place.of(sources[write.source])
    box, dims = write.origin.box_in(whole, write.source), write.origin.dims_in(whole)
    if box is None or dims is None:
        return None
    strides = [0] * len(whole.shape)
    for dim, stride in zip(dims, write.target.strides, strict=True):
        if dim is not None:
            strides[dim] = stride
    return Landing(
        box=box,
        name=name,
        shape=tuple(tensor.shape),
        offset=write.target.offset - int(tensor.storage_offset()),
        strides=tuple(strides),
        same_dtype=write.origin.dtype == write.target.dtype,
    )
