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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rl_refit.errors import RefitError
from rl_refit.layout import Layout
from rl_refit.manifest import Manifest, TensorMeta
from rl_refit.tracing.layouts import Landings, find_landings
from rl_refit.tracing.memory import read_memory
from rl_refit.tracing.writes import Recorder, record_writes, trace_writes

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["Survey", "survey"]


@dataclass(frozen=True, slots=True)
class Survey:
    """The answer, and what stays in the worker."""

    answer: dict[str, Any]
    found: Landings | None
    """None where the loader refused a tensor."""


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
        return Survey({**answer, "refused": [offered, f"{type(error).__name__}: {error}"]}, None)
    found = find_landings(recorder, read_memory(model).tensors)
    answer |= {"refused": None, "clashes": found.clashes, "casts": found.casts}
    return Survey(answer | _sorted_out(recorder, model, config), found)


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
