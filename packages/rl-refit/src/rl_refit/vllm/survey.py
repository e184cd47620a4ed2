"""What an engine needs of a source, proved by tracing `load_weights` on a model without memory.

A worker makes a second instance of the engine's model class on the meta device, from a copy of its configuration; its
`load_weights` is given the source's tensors, on meta as well, and every write is noted. The engine itself is only
looked at. Each worker proves it for itself; that every tensor of the source has a place at some worker is the plan's to
prove.
"""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rl_refit.errors import CoverageError, RefitError
from rl_refit.layout import Layout, Region
from rl_refit.manifest import Manifest, TensorMeta
from rl_refit.tracing.layouts import Landings, find_landings
from rl_refit.tracing.memory import read_memory
from rl_refit.tracing.writes import record_writes, trace_writes

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["DERIVED", "NeedsConfig", "Survey", "find_needs", "offered", "prove_needs", "sink_manifest"]

DERIVED = ("*inv_freq", "*embed_scale")
"""Buffers of Hugging Face models that no checkpoint holds: an engine computes its own from the configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedsConfig:
    """What the user declares; patterns are those of `fnmatch`."""

    derived: tuple[str, ...] = DERIVED
    """Source tensors that the engine computes itself: they are not sent."""

    constant: tuple[str, ...] = ()
    """Engine tensors that never change, or whose unwritten elements do not matter."""

    cast: bool = False
    """Whether the engine may keep a tensor in another dtype than the source's."""


def offered(source: Manifest, config: NeedsConfig, *, ties: bool) -> Manifest:
    """What a loader is given, whole: all that is not derived; what is tied to another only with `ties`."""
    return Manifest(
        tuple(
            replace(meta, layout=Layout.whole(), tied_to=None)
            for meta in source.tensors
            if (ties or meta.tied_to is None) and not _matches(meta.name, config.derived)
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What a worker's engine does with the tensors that it was given. Tensors have the names that they have in vLLM."""

    architecture: str

    landings: Landings

    unused: tuple[str, ...] = ()
    """Source tensors of which nothing reaches the engine's memory."""

    never: tuple[str, ...] = ()
    """Where nothing of a source is written, and which the engine does not make itself, as it does buffers that no
    checkpoint holds, and what a layer of attention writes when it processes its weights after loading."""

    partial: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Where some elements are written by nobody: how many, of how many."""

    ties: Mapping[str, str] = field(default_factory=dict)
    """Names of memory that has another, with that."""


def find_needs(
    engine: VllmConfig,
    source: Manifest,
    config: NeedsConfig,
    *,
    live_ties: Mapping[str, str],
    ties: Sequence[bool] = (False, True),
) -> Survey:
    """What an engine does with the tensors of `source` that it needs.

    First without tied tensors; with them, as `ties` says, where that leaves something of the engine unwritten.

    Raises:
        CoverageError: As for `prove_needs`; or the loader refuses a tensor.
    """
    tied = any(meta.tied_to for meta in source.tensors)
    for given in ties:
        found = survey(engine, offered(source, config, ties=given))
        if not (tied and (found.never or found.partial)):
            break
    parallel = engine.parallel_config
    has_all = parallel.pipeline_parallel_size == 1 and not parallel.enable_expert_parallel
    prove_needs(source, found, config, live_ties=live_ties, has_all=has_all)
    return found


def prove_needs(
    source: Manifest, found: Survey, config: NeedsConfig, *, live_ties: Mapping[str, str], has_all: bool
) -> None:
    """Pass if a worker's engine can be fed from `source`.

    `live_ties` are those of the engine that runs; with `has_all` each tensor has a place at every worker.

    Raises:
        CoverageError: An engine tensor is not wholly written, the engine has no place for a source tensor, two are
            written to the same place, or one would be cast without leave.
    """
    lacking = {name: f"{name}: never written" for name in found.never}
    for name, (missing, total) in found.partial.items():
        lacking[name] = f"{name}: {missing:,} of {total:,} elements are never written"
    unfed = tuple(line for name, line in lacking.items() if not _matches(name, config.constant))
    unmapped = tuple(meta.name for meta in source.tensors if has_all and meta.name in found.unused and not meta.tied_to)
    mismatched = list(found.landings.clashes)
    for name, dtype in () if config.cast else found.landings.casts.items():
        mismatched.append(
            f"{name}: {source.by_name[name].dtype} in the source, {dtype} in the engine; cast=True allows it"
        )
    for name, root in live_ties.items() - found.ties.items():
        if _root(source, name) != _root(source, root):
            mismatched.append(
                f"{name}: the engine tied it to {root} when it loaded equal values for both; give its configuration "
                f"tie_word_embeddings=False and load it again"
            )
    if unfed or unmapped or mismatched:
        lists = {"are not fed": unfed, "have no place in the engine": unmapped, "cannot go as they are": mismatched}
        told = "\n".join(
            f"{len(lines)} {title}:" + "".join(f"\n  {x}" for x in lines) for title, lines in lists.items() if lines
        )
        raise CoverageError(
            f"the source and vLLM's {found.architecture} do not hold the same tensors.\n{told}",
            unfed=unfed,
            unmapped=unmapped,
            mismatched=tuple(mismatched),
        )


def sink_manifest(
    source: Manifest, config: NeedsConfig, wanted: Mapping[str, Sequence[Region]], *, ties: Iterable[str], rank: int
) -> Manifest:
    """The source's tensors as worker `rank` holds them: the boxes `wanted` are fed; others are derived, or tied."""
    metas: list[TensorMeta] = []
    for meta in source.tensors:
        whole = Layout.whole(rank)
        if (boxes := wanted.get(meta.name)) is not None:
            in_boxes = list(boxes) != [Region.whole(meta.name, meta.shape)]
            layout = Layout.from_boxes({rank: boxes}) if in_boxes else whole
            metas.append(replace(meta, layout=layout, tied_to=None))
        elif _matches(meta.name, config.derived):
            metas.append(replace(meta, layout=whole, tied_to=None, feeding="derived"))
        elif meta.name in ties and meta.tied_to in wanted:
            metas.append(replace(meta, layout=whole))
    return Manifest(tuple(metas))


def _root(source: Manifest, name: str) -> str:
    meta = source.by_name.get(name)
    return name if meta is None else meta.tied_to or name


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


# -- The trace ---------------------------------------------------------------------------------------------------------


def survey(config: VllmConfig, sources: Manifest) -> Survey:
    """Trace what an engine of `config` does with the tensors of `sources`.

    Raises:
        CoverageError: Its loader refuses one.
    """
    from vllm.config import set_current_vllm_config

    config = _copy_of(config)
    model: Any = _on_meta(config)
    architecture, latest = type(model).__name__, ""

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        def offer() -> Iterator[tuple[str, Tensor]]:
            nonlocal latest
            for name, tensor in weights:
                latest = name
                yield name, tensor

        model.load_weights(offer())

    try:
        with set_current_vllm_config(config):
            recorder = record_writes(load, model, sources)
    except Exception as error:
        raise CoverageError(
            f"the load_weights of vLLM's {architecture} refuses {latest!r}: {type(error).__name__}: {error}\nGive the "
            f"source the names of the checkpoint (rename=, bindings=), or say what the engine computes itself "
            f"(derived=)",
            unmapped=(latest,),
        ) from error
    coverage, memory = recorder.coverage(), read_memory(model)
    tensors = memory.tensors | {name: memory.tensors[root] for name, root in memory.tied.items()}
    written = {*coverage.complete, *coverage.partial}
    never = tuple(
        name
        for name, tensor in tensors.items()
        if name not in written or not any(write.names for write in recorder.writes_to(tensor))
        if not _makes_itself(model, config, name)
    )
    return Survey(
        architecture=architecture,
        landings=find_landings(recorder, memory.tensors),
        unused=coverage.unused,
        never=never,
        partial={name: (n, tensors[name].numel()) for name, n in coverage.partial.items() if name not in never},
        ties=memory.tied,
    )


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
