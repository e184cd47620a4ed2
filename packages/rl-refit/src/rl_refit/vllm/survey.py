"""What an engine needs of a source, proved by tracing `load_weights` on a model without memory.

Each worker makes a second instance of the engine's model class on the meta device, from a copy of its configuration;
its `load_weights` is given the source's tensors, on meta as well, and every write is noted. The engine itself is only
looked at. The driver combines the answers: what is to be sent, or an error that lists every problem. What an answer,
plain data, says of the engine's tensors, by the names they have in vLLM:

    never       nothing of a source is written there, and the engine does not make it itself: buffers that no checkpoint
                holds, and what a layer of attention writes when it processes its weights after loading
    partial     some elements are written by nobody: how many, of how many
"""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rl_refit.errors import CoverageError, RefitError
from rl_refit.layout import Layout, Region
from rl_refit.manifest import Manifest, TensorMeta
from rl_refit.tracing.layouts import Landings, find_landings
from rl_refit.tracing.memory import read_memory
from rl_refit.tracing.writes import Recorder, record_writes, trace_writes

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["DERIVED", "NeedsConfig", "find_needs", "offered", "prove_needs", "sink_meta", "survey"]

DERIVED = ("*inv_freq", "*embed_scale")
"""Buffers of Hugging Face models that no checkpoint holds: an engine computes its own from the configuration."""

Answer = Mapping[str, Any]


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


def find_needs(
    call: Callable[..., Sequence[Answer]],
    source: Manifest,
    config: NeedsConfig,
    *,
    ties: Sequence[bool] = (False, True),
) -> tuple[str, ...]:
    """The tensors that the engine needs of `source`, as its workers say, which `call` asks.

    First without tied tensors; with them where that leaves something of the engine unwritten.

    Raises:
        CoverageError: As for `prove_needs`.
    """
    tied = any(meta.tied_to for meta in source.tensors)
    for given in ties:
        answers = call("survey", asdict(config), given)
        if not (tied and any(answer["never"] or answer["partial"] for answer in answers if not answer["refused"])):
            break
    return prove_needs(source, offered(source, config, ties=given), answers=answers, config=config)


def prove_needs(
    source: Manifest, given: Manifest, *, answers: Sequence[Answer], config: NeedsConfig
) -> tuple[str, ...]:
    """The tensors that the engine needs of `source`, of which the workers' loaders were `given` some.

    Raises:
        CoverageError: An engine tensor is not wholly written, the engine has no place for a source tensor, two are
            written to the same place, or one would be cast without leave.
    """
    architecture = answers[0]["architecture"]
    refused = [answer["refused"] for answer in answers if answer["refused"]]
    if refused:
        name, error = refused[0]
        raise CoverageError(
            f"the load_weights of vLLM's {architecture} refuses {name!r}: {error}\nGive the source the names of the "
            f"checkpoint (rename=, bindings=), or say what the engine computes itself (derived=)",
            unmapped=(name,),
        )
    unused = set.intersection(*(set(answer["unused"]) for answer in answers))
    mismatched = _mismatches(answers, source, config)
    lacking: dict[str, None] = {}  # of any worker, what is not wholly written
    for answer in answers:
        loose = {name: f"{name}: never written" for name in answer["never"]}
        for name, (missing, total) in answer["partial"].items():
            loose[name] = f"{name}: {missing:,} of {total:,} elements are never written"
        lacking |= dict.fromkeys(line for name, line in loose.items() if not _matches(name, config.constant))
    unfed = tuple(lacking)
    unmapped = tuple(meta.name for meta in source.tensors if meta.name in unused and meta.tied_to is None)
    if unfed or unmapped or mismatched:
        lists = {"are not fed": unfed, "have no place in the engine": unmapped, "cannot go as they are": mismatched}
        told = "\n".join(
            f"{len(lines)} {title}:" + "".join(f"\n  {x}" for x in lines) for title, lines in lists.items() if lines
        )
        raise CoverageError(
            f"the source and vLLM's {architecture} do not hold the same tensors.\n{told}",
            unfed=unfed,
            unmapped=unmapped,
            mismatched=mismatched,
        )
    return tuple(name for name in given.by_name if name not in unused)


def sink_meta(
    meta: TensorMeta, config: NeedsConfig, *, boxes: Sequence[Region] | None, fed: bool, rank: int
) -> TensorMeta | None:
    """A tensor of the source as worker `rank` holds it: `boxes` that are fed, tied, or derived; None for nothing."""
    if fed:
        assert boxes is not None
        whole = Region.whole(meta.name, meta.shape)
        layout = Layout.whole(rank) if list(boxes) == [whole] else Layout.from_boxes({rank: boxes})
        return replace(meta, layout=layout, tied_to=None)
    if _matches(meta.name, config.derived):
        return replace(meta, layout=Layout.whole(rank), tied_to=None, feeding="derived")
    return replace(meta, layout=Layout.whole(rank)) if meta.tied_to is not None else None


def _mismatches(answers: Iterable[Answer], source: Manifest, config: NeedsConfig) -> tuple[str, ...]:
    lines: dict[str, None] = {}
    for answer in answers:
        lines |= dict.fromkeys(answer["clashes"])
        for name, dtype in () if config.cast else answer["casts"].items():
            lines[f"{name}: {source.by_name[name].dtype} in the source, {dtype} in the engine; cast=True allows it"] = (
                None
            )
        for name, root in answer["live_ties"].items() - answer["ties"].items():
            if _root(source, name) != _root(source, root):
                lines[
                    f"{name}: the engine tied it to {root} when it loaded equal values for both; give its "
                    f"configuration tie_word_embeddings=False and load it again"
                ] = None
    return tuple(lines)


def _root(source: Manifest, name: str) -> str:
    meta = source.by_name.get(name)
    return name if meta is None else meta.tied_to or name


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


# -- In a worker -----------------------------------------------------------------------------------------------------


def survey(config: VllmConfig, sources: Manifest) -> tuple[dict[str, Any], Landings | None]:
    """Trace what an engine of `config` does with the tensors of `sources`.

    Returns:
        The answer, and what stays in the worker: None where the loader refused a tensor.
    """
    from vllm.config import set_current_vllm_config

    config = _copy_of(config)
    model: Any = _on_meta(config)
    answer: dict[str, Any] = {"architecture": type(model).__name__, "ties": read_memory(model).tied}
    latest = ""

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
    except Exception as error:  # noqa: BLE001  (whatever a model's loader raises is the answer)
        return {**answer, "refused": [latest, f"{type(error).__name__}: {error}"]}, None
    found = find_landings(recorder, read_memory(model).tensors)
    answer |= {"refused": None, "clashes": found.clashes, "casts": found.casts}
    return answer | _sorted_out(recorder, model, config), found


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
