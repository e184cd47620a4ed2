"""The proof that every tensor of the sink gets its bytes from the source, or the list of all that do not.

Knows names, shapes, dtypes and ties, and no layouts. Weights that silently stay stale cost more than any crash, so both
directions are checked: a sink tensor that nobody feeds, and a source tensor without a place. What the sink declares
derived or constant needs no source; a source that has it all the same does not send it.
"""

from __future__ import annotations

from rl_refit.errors import CoverageError
from rl_refit.manifest import Manifest, TensorMeta

__all__ = ["prove_coverage"]


def prove_coverage(source: Manifest, sink: Manifest) -> tuple[str, ...]:
    """The names that must be sent, in the sink's order: its tensors that are fed and not tied to another.

    A tensor that is tied to a derived or constant one is the same memory, and needs no source either.

    Raises:
        CoverageError: With every tensor of the sink that is not fed, every tensor of the source that has no place, and
            every shape, dtype or tie that differs.
    """
    sent = tuple(meta.name for meta in sink.tensors if meta.travels)
    unfed = tuple(name for name in sent if name not in source.by_name)
    placed = {_root(meta) for meta in source.tensors if meta.name in sink.by_name}  # ties have the place of their root
    unmapped = tuple(meta.name for meta in source.tensors if _root(meta) not in placed)
    mismatched = tuple(
        line
        for meta in sink.tensors
        if meta.name in source.by_name and sink.by_name[_root(meta)].travels
        for line in _differences(meta, source)
    )
    if unfed or unmapped or mismatched:
        raise CoverageError(
            _describe(unfed, unmapped, mismatched), unfed=unfed, unmapped=unmapped, mismatched=mismatched
        )
    return sent


def _differences(meta: TensorMeta, source: Manifest) -> list[str]:
    sent = source.by_name[meta.name]
    lines = []
    if sent.shape != meta.shape:
        lines.append(f"{meta.name}: shape {list(sent.shape)} in the source, {list(meta.shape)} in the sink")
    if sent.dtype != meta.dtype:
        lines.append(f"{meta.name}: dtype {sent.dtype} in the source, {meta.dtype} in the sink")
    root = source.by_name.get(_root(meta))
    if root is not None and _root(root) != _root(sent):
        lines.append(f"{meta.name}: tied to {meta.tied_to} in the sink, a tensor of its own in the source")
    return lines


def _root(meta: TensorMeta) -> str:
    return meta.tied_to or meta.name


def _describe(unfed: tuple[str, ...], unmapped: tuple[str, ...], mismatched: tuple[str, ...]) -> str:
    parts = [
        ("sink tensors that the source does not feed", unfed),
        ("source tensors that have no place in the sink", unmapped),
        ("tensors that differ", mismatched),
    ]
    lists = [f"{len(names)} {title}:" + "".join(f"\n  {name}" for name in names) for title, names in parts if names]
    remedies = _rename_that_helps(unfed, unmapped) or [_FEED] * bool(unfed)
    remedies += [_AGREE] * bool(mismatched)
    return "\n".join(["source and sink do not hold the same tensors.", *lists, *remedies])


def _rename_that_helps(unfed: tuple[str, ...], unmapped: tuple[str, ...]) -> list[str]:
    """What to do where wrappers have put something into every name, such as torch.compile and DDP do."""
    if not unfed or not unmapped:
        return []
    for part in {f"{part}." for name in unmapped for part in name.split(".")}:
        renamed = {name.replace(part, "") for name in unmapped}
        if renamed >= set(unfed) and all(part in name for name in unmapped):
            return [
                f"without {part!r} the names agree: ModuleSource(…, rename=lambda name: name.replace({part!r}, ''))"
            ]
    return []


_FEED = "what the engine recomputes or never changes is declared to the sink as derived or constant"
_AGREE = (
    "nothing is reshaped or untied on the way, and cast only where ModuleSource(cast=torch.bfloat16) says so: "
    "give both sides one dtype, one shape and the same ties"
)
