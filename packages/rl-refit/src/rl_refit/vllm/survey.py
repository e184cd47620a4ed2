"""What one worker's engine needs of a source, proved by tracing `load_weights` on a model without memory.

Runs in a worker. A second instance of the engine's model class is made on the meta device from a copy of its
configuration; its `load_weights` is given the source's tensors, on meta as well, and every write is noted. The engine
itself is only looked at. What the answer, plain data, says of the engine's tensors, by the names they have in vLLM:

    complete    every element is copied or made from a source tensor
    padded      so, but for elements that the loader fills itself: a vocabulary that is padded
    partial     some elements are written by nobody: how many, of how many
    derived     the engine makes it itself: buffers that no checkpoint holds, and what a layer of attention writes when
                it processes its weights after loading
    never       written by nobody
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rl_refit.layout import Region
from rl_refit.vllm.writes import Place, Write, WriteLog, box_within, storage_of, without

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["Home", "Survey", "named_tensors", "survey"]

Writes = Mapping[int, Sequence[Write]]
"""Storage → what was written to it, in order."""


@dataclass(frozen=True, slots=True)
class Home:
    """Where a whole source tensor lies, unchanged, in a tensor of the engine as its class makes it."""

    name: str
    """The engine's name of its tensor."""

    shape: tuple[int, ...]
    """Of the engine's tensor."""

    place: Place
    """Of the source tensor, within the engine's: the offset counts from that tensor's first element."""


@dataclass(frozen=True, slots=True)
class Survey:
    """The answer, and what stays in the worker."""

    answer: dict[str, Any]
    homes: dict[str, Home]
    """By source tensor; those that are cut, changed or cast on the way have none."""


def survey(config: VllmConfig, rows: Sequence[Sequence[Any]]) -> Survey:
    """Trace what an engine of `config` does with source tensors, given as rows of name, dtype and shape."""
    import vllm

    config = _copy_of(config)
    model = _on_meta(config)
    tensors = named_tensors(model)
    sources = {name: _source_tensor(tuple(shape), getattr(torch, dtype)) for name, dtype, shape in rows}
    log = WriteLog()
    refused = _load(model, config, log, sources)
    used, writes = log.used, {storage: tuple(made) for storage, made in log.writes.items()}
    answer = {
        "vllm": vllm.__version__,
        "architecture": type(model).__name__,
        "refused": refused,
        "unused": [name for name in sources if name not in used],
        "clashes": [clash for name, tensor in tensors.items() for clash in _clashes(name, tensor, writes)],
        "casts": _casts(sources, writes),
        "ties": _ties(tensors),
        **_judge_all(model, config, tensors, writes),
    }
    return Survey(answer, _homes(sources, tensors, writes))


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
    with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype), _own_rope_cache():
        with torch.device("meta"):
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


def _source_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A single element gets memory, since loaders read it with `item()`."""
    return torch.zeros(shape, dtype=dtype, device="cpu" if len(shape) == 0 or shape == (1,) else "meta")


def _load(model: nn.Module, config: VllmConfig, log: WriteLog, sources: Mapping[str, Tensor]) -> list[str] | None:
    """Run the loader; returns the source tensor at which it raised, and what."""
    from vllm.config import set_current_vllm_config

    offered = ""

    def offer() -> Iterator[tuple[str, Tensor]]:
        nonlocal offered
        for offered, tensor in log.watch(sources):
            yield offered, tensor

    try:
        with set_current_vllm_config(config), torch.no_grad(), log:
            model.load_weights(offer())
    except Exception as error:  # noqa: BLE001  (whatever a model's loader raises is the answer)
        return [offered, f"{type(error).__name__}: {error}"]
    return None


# -- What the writes come to -----------------------------------------------------------------------------------------


def _judge_all(
    model: nn.Module, config: VllmConfig, tensors: Mapping[str, Tensor], writes: Writes
) -> dict[str, list[str] | dict[str, list[int]]]:
    kinds: dict[str, list[str]] = {kind: [] for kind in ("complete", "padded", "derived", "never")}
    partial: dict[str, list[int]] = {}
    for name, tensor in tensors.items():
        done = writes.get(storage_of(tensor), ())
        if not any(write.names for write in done):
            kinds["derived" if _makes_itself(model, config, name) else "never"].append(name)
            continue
        unread = _unwritten(tensor, [write for write in done if write.names])
        missing = _unwritten(tensor, done)
        if missing:
            partial[name] = [missing, tensor.numel()]
        else:
            kinds["padded" if unread else "complete"].append(name)
    return {**kinds, "partial": partial}


def _unwritten(tensor: Tensor, writes: Sequence[Write]) -> int:
    boxes = [box_within(write.target, Place.of(tensor)) for write in writes]
    return sum(part.numel for part in without(tuple(tensor.shape), [box for box in boxes if box is not None]))


def _makes_itself(model: nn.Module, config: VllmConfig, name: str) -> bool:
    """Whether no checkpoint holds the tensor, or its layer overwrites it in what every reload ends with."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    owner_name, _, own_name = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    if own_name in owner._non_persistent_buffers_set:
        return True
    if not is_deferred_attention_layer(owner):
        return False
    log, before = WriteLog(), storage_of(getattr(owner, own_name))
    try:
        with set_current_vllm_config(config), torch.no_grad(), log:
            owner.process_weights_after_loading(config.model_config.dtype)
    except (NotImplementedError, RuntimeError, AttributeError):  # it needs values, so nothing is proved
        return False
    return _unwritten(getattr(owner, own_name), log.writes.get(before, [])) == 0


def _clashes(name: str, tensor: Tensor, writes: Writes) -> list[str]:
    """Pairs of source tensors that are written to the same elements, where only one can survive."""
    copied = [write for write in writes.get(storage_of(tensor), ()) if write.origin is not None]
    placed = {(write.names[0], write.target): box_within(write.target, Place.of(tensor)) for write in copied}
    boxes = [(source, box) for (source, _), box in placed.items() if box is not None]
    if sum(box.numel for _, box in boxes) <= tensor.numel() - _unwritten(tensor, copied):
        return []
    pairs = itertools.combinations(boxes, 2)
    clashing = {(one, two) for (one, box), (two, other) in pairs if one != two and box.intersect(other)}
    return [f"{one} and {two} are both written to {name}" for one, two in sorted(clashing)]


def _casts(sources: Mapping[str, Tensor], writes: Writes) -> dict[str, str]:
    """Source tensors that the engine keeps in another dtype."""
    made = [write for each in writes.values() for write in each if len(write.names) == 1]
    kept = {write.names[0]: write.target.dtype for write in made}
    return {name: _plain(dtype) for name, dtype in kept.items() if dtype != sources[name].dtype}


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _ties(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The engine's tensors that are another one's memory."""
    roots: dict[int, str] = {}
    ties = {name: roots.setdefault(storage_of(tensor), name) for name, tensor in tensors.items()}
    return {name: root for name, root in ties.items() if name != root}


def _homes(sources: Mapping[str, Tensor], tensors: Mapping[str, Tensor], writes: Writes) -> dict[str, Home]:
    homes: dict[str, Home] = {}
    for name, tensor in tensors.items():
        for write in writes.get(storage_of(tensor), ()):
            if write.origin is None or write.origin.dtype != write.target.dtype:
                continue
            source = sources[write.names[0]]
            box = box_within(write.origin, Place.of(source))
            if box == Region("", (0,) * source.dim(), tuple(source.shape)) and write.target.shape == source.shape:
                relative = write.target.offset - tensor.storage_offset()
                place = Place(relative, write.target.shape, write.target.strides, write.target.dtype)
                homes.setdefault(write.names[0], Home(name, tuple(tensor.shape), place))
    return homes
