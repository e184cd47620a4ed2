"""What the workers' surveys come to: the sink's manifest, or every reason why there is none.

Knows plain data, neither vLLM nor workers. The engine's tensors go by the names that they have in vLLM, the source's by
Hugging Face names.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rl_refit.errors import CoverageError
from rl_refit.layout import Layout
from rl_refit.manifest import Manifest, TensorMeta

__all__ = ["DERIVED", "Needs", "NeedsConfig", "lacking", "needs_of", "rows_of"]

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


@dataclass(frozen=True, slots=True)
class Needs:
    """What an engine needs of one source, proved."""

    manifest: Manifest
    """Of the sink: every tensor of the source, fed, tied or derived."""

    unreadable: dict[str, str]
    """Fed tensors that cannot be read back after a commit, with the reason."""

    text: str
    """For people."""


def rows_of(source: Manifest, config: NeedsConfig, *, ties: bool) -> list[Row]:
    """What a loader is given: all that is not derived; what is tied to another only with `ties`."""
    return [
        (meta.name, meta.dtype, meta.shape)
        for meta in source.tensors
        if (ties or meta.tied_to is None) and not _matches(meta.name, config.derived)
    ]


def lacking(answers: Iterable[Answer], config: NeedsConfig) -> tuple[str, ...]:
    """The engine's tensors, of any worker, that are not wholly written and not declared constant."""
    lines: dict[str, None] = {}
    for answer in answers:
        loose = {name: f"{name}: never written" for name in answer["never"]}
        for name, (missing, total) in answer["partial"].items():
            loose[name] = f"{name}: {missing:,} of {total:,} elements are never written"
        lines |= dict.fromkeys(line for name, line in loose.items() if not _matches(name, config.constant))
    return tuple(lines)


def needs_of(source: Manifest, rows: Sequence[Row], *, answers: Sequence[Answer], config: NeedsConfig) -> Needs:
    """The sink's side of a refit from `source`, of which the workers were given `rows`.

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
    fed = {name for name, _, _ in rows} - unused
    unfed, mismatched = lacking(answers, config), _mismatches(answers, source, config)
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
    manifest = Manifest(tuple(_sink_meta(meta, config, fed=meta.name in fed) for meta in source.tensors))
    travelling = {meta.name for meta in manifest.tensors if meta.travels}
    unreadable = {name: why for answer in answers for name, why in answer["unreadable"].items() if name in travelling}
    return Needs(manifest, unreadable, _explain(answers, manifest, unreadable))


def _sink_meta(meta: TensorMeta, config: NeedsConfig, *, fed: bool) -> TensorMeta:
    if fed:
        return replace(meta, layout=Layout.whole(), tied_to=None)
    if _matches(meta.name, config.derived):
        return replace(meta, layout=Layout.whole(), tied_to=None, feeding="derived")
    return replace(meta, layout=Layout.whole())


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


def _explain(answers: Sequence[Answer], manifest: Manifest, unreadable: Mapping[str, str]) -> str:
    first = answers[0]
    travelling = [meta for meta in manifest.tensors if meta.travels]
    nbytes = sum(meta.total_bytes for meta in travelling)
    lines = [
        f"{first['architecture']} of vLLM {first['vllm']}: proved by tracing its load_weights on the meta device",
        f"{len(travelling)} tensors of the source are fed, {nbytes:,} bytes, staged once in shared memory",
        *(f"tied, not sent: {meta.name} -> {meta.tied_to}" for meta in manifest.tensors if meta.tied_to),
        *(f"computed by the engine, not sent: {m.name}" for m in manifest.tensors if m.feeding == "derived"),
    ]
    for rank, answer in enumerate(answers):
        padded = f", {len(answer['padded'])} of them padded by the loader" if answer["padded"] else ""
        fed = len(answer["complete"]) + len(answer["padded"])
        lines.append(f"worker {rank}: {fed} tensors written whole{padded}, {len(answer['derived'])} made by the engine")
        lines += [f"  declared constant: {name}" for name in (*answer["never"], *answer["partial"])]
        lines += [f"  padded: {name}" for name in answer["padded"]]
        lines += [f"  cast to {dtype}: {name}" for name, dtype in answer["casts"].items()]
        ties = {name: root for name, root in answer["ties"].items() if name not in answer["derived"]}
        lines += [f"  tied: {name} -> {root}" for name, root in ties.items()]
    if first["repaired"]:
        lines.append("repaired after every reload, which leaves them stale on a CPU: tied heads, packed experts")
    reasons: dict[str, list[str]] = {}
    for name, why in unreadable.items():
        reasons.setdefault(why, []).append(name)
    lines += [
        f"not read back after a commit, {why}: {len(names)}, such as {names[0]}" for why, names in reasons.items()
    ]
    return "\n".join(lines)
