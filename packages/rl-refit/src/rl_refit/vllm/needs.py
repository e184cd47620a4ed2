"""Combine what all workers of an engine report of their weights: one manifest, or an error that lists every problem.

Works on plain data, without vLLM and without workers. Tensors of the engine have vLLM's names, those of the source have
Hugging Face names.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rl_refit.errors import CoverageError
from rl_refit.layout import Layout, Region
from rl_refit.manifest import Manifest, TensorMeta

__all__ = ["DERIVED", "NeedsConfig", "find_needs", "prove_needs", "rows_of", "sink_meta"]

DERIVED = ("*inv_freq", "*embed_scale")
"""Buffers of Hugging Face models that no checkpoint holds: an engine computes its own from the configuration."""

Answer = Mapping[str, Any]
Row = tuple[str, str, tuple[int, ...]]
"""Name, dtype, shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedsConfig:
    """What the user declares; patterns are those of `fnmatch`."""

    derived: tuple[str, ...] = DERIVED
    """Source tensors that the engine computes itself: they are not sent."""

    constant: tuple[str, ...] = ()
    """Engine tensors that never change, or whose unwritten elements do not matter."""

    cast: bool = False
    """Whether the engine may keep a tensor in another dtype than the source's."""


def rows_of(source: Manifest, config: NeedsConfig, *, ties: bool) -> list[Row]:
    """What a loader is given: all that is not derived; what is tied to another only with `ties`."""
    return [
        (meta.name, meta.dtype, meta.shape)
        for meta in source.tensors
        if (ties or meta.tied_to is None) and not _matches(meta.name, config.derived)
    ]


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
    return prove_needs(source, rows_of(source, config, ties=given), answers=answers, config=config)


def prove_needs(
    source: Manifest, rows: Sequence[Row], *, answers: Sequence[Answer], config: NeedsConfig
) -> tuple[str, ...]:
    """The tensors that the engine needs of `source`, of which the workers were given `rows`.

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
    return tuple(name for name, _, _ in rows if name not in unused)


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
