"""What one side of a refit holds: its tensors in order, by Hugging Face name, with a hash that both sides compare.

And the proof that every tensor of the sink gets its bytes from the source, or the list of all that do not. Weights that
silently stay stale cost more than any crash, so both directions are checked: a sink tensor that nobody feeds, and a
source tensor without a place. What the sink declares derived or constant needs no source; a source that has it all the
same does not send it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import torch

from rl_refit.errors import CoverageError, RefitError
from rl_refit.layout import Layout, Region

__all__ = ["Feeding", "Manifest", "TensorMeta", "merge_manifests", "prove_coverage"]

Feeding = Literal["fed", "derived", "constant"]
"""Whether a tensor of a sink needs bytes, is recomputed by the engine from others, or never changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMeta:
    """One tensor of a manifest."""

    name: str
    """The Hugging Face name, `model.embed_tokens.weight`."""

    shape: tuple[int, ...]
    """Global shape, over all ranks."""

    dtype: str
    """As torch writes it, without the prefix: `bfloat16`."""

    layout: Layout
    """Which box of it each rank holds."""

    tied_to: str | None = None
    """The tensor whose memory this one shares; that one is sent, this one follows."""

    feeding: Feeding = "fed"
    """In a sink: "derived" where the engine recomputes it from others, "constant" where it never changes."""

    torch_dtype: torch.dtype = dataclasses.field(init=False, repr=False, compare=False)
    """The dtype as torch's own object."""

    travels: bool = dataclasses.field(init=False, repr=False, compare=False)
    """Whether bytes of it are sent: it is fed, and tied to no other."""

    def __post_init__(self) -> None:
        if type(getattr(torch, self.dtype, None)) is not torch.dtype:
            raise ValueError(f"{self.dtype!r} is no torch dtype; {self.name!r} needs one, such as 'bfloat16'")
        if any(size < 0 for size in self.shape):
            raise ValueError(f"a shape has no negative size; {self.name!r} has {self.shape}")
        if self.feeding not in get_args(Feeding):
            raise ValueError(f"feeding is one of {get_args(Feeding)}; {self.name!r} has {self.feeding!r}")
        object.__setattr__(self, "torch_dtype", getattr(torch, self.dtype))  # the way around `frozen`
        object.__setattr__(self, "travels", self.feeding == "fed" and self.tied_to is None)

    @property
    def total_bytes(self) -> int:
        """Bytes of the global tensor, counted once."""
        return math.prod(self.shape) * self.torch_dtype.itemsize

    def regions(self) -> dict[int, tuple[Region, ...]]:
        """The boxes that each rank holds, none of them empty."""
        return self.layout.regions(self.name, self.shape)

    def regions_on(self, rank: int) -> tuple[Region, ...]:
        """The boxes that `rank` holds, none of them empty."""
        return self.layout.regions_on(rank, self.name, self.shape)


@dataclass(frozen=True)
class Manifest:
    """The tensors of one side, in the order in which they are sent."""

    tensors: tuple[TensorMeta, ...]

    def __post_init__(self) -> None:
        twice = [name for name, count in Counter(meta.name for meta in self.tensors).items() if count > 1]
        if twice:
            raise ValueError(f"a manifest names each tensor once; named more often: {', '.join(twice)}")
        roots = {meta.name for meta in self.tensors if meta.tied_to is None}
        loose = [f"{m.name} -> {m.tied_to}" for m in self.tensors if m.tied_to is not None and m.tied_to not in roots]
        if loose:
            raise ValueError(f"a tie leads to a tensor of the manifest that is not tied itself; got {', '.join(loose)}")

    @cached_property
    def by_name(self) -> dict[str, TensorMeta]:
        """Every tensor by its name."""
        return {meta.name: meta for meta in self.tensors}

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors, ties counted once, replicas not counted."""
        return sum(meta.total_bytes for meta in self.tensors if meta.tied_to is None)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Every rank that holds anything, ascending."""
        return tuple(sorted({rank for layout in {meta.layout for meta in self.tensors} for rank in layout.ranks}))

    def on_rank(self, rank: int) -> Manifest:
        """This manifest as that of rank `rank`, where it knows of a single rank that it calls otherwise."""
        if len(self.ranks) != 1 or self.ranks == (rank,):
            return self
        return Manifest(
            tuple(
                dataclasses.replace(meta, layout=dataclasses.replace(meta.layout, ranks=(rank,)))
                for meta in self.tensors
            )
        )

    @classmethod
    def of_whole(cls, tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]]) -> Manifest:
        """Of one rank that holds every tensor whole: name, dtype and shape of each."""
        return cls(
            tuple(
                TensorMeta(
                    name=name, shape=tuple(shape), dtype=str(dtype).removeprefix("torch."), layout=Layout.whole()
                )
                for name, dtype, shape in tensors
            )
        )

    def hash(self) -> str:
        """sha256 over the manifest as canonical JSON, in hex: equal on every machine for equal manifests."""
        return self._hash

    def to_json(self) -> str:
        """The manifest as canonical JSON, every layout written once."""
        return self._json

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """The manifest that `to_json` wrote.

        Raises:
            RefitError: The text is of another format.
        """
        try:
            title, plain_layouts, rows = json.loads(text)
            if title != _TITLE:
                raise RefitError(f"expected {_TITLE!r}, got {title!r}: both sides need the same release of rl-refit")
            layouts = [Layout(**_by_field(plain, _LAYOUT_FIELDS)) for plain in plain_layouts]
            metas = [_by_field(row, _META_FIELDS) for row in rows]
            return cls(tuple(TensorMeta(**{**meta, "layout": layouts[meta["layout"]]}) for meta in metas))
        except (TypeError, IndexError, ValueError) as error:
            raise RefitError(f"no manifest: {type(error).__name__}: {error}") from error

    @cached_property
    def _json(self) -> str:
        layouts = {layout: number for number, layout in enumerate(dict.fromkeys(meta.layout for meta in self.tensors))}
        rows = [[m.name, m.shape, m.dtype, layouts[m.layout], m.tied_to, m.feeding] for m in self.tensors]
        plain = [[getattr(layout, name) for name in _LAYOUT_FIELDS] for layout in layouts]
        return json.dumps([_TITLE, plain, rows], separators=(",", ":"))

    @cached_property
    def _hash(self) -> str:
        return hashlib.sha256(self._json.encode()).hexdigest()


_TITLE = "rl-refit manifest 2"
_LAYOUT_FIELDS = {"mesh_shape": list, "sharded_dims": list, "strided_axes": list, "ranks": list, "boxes": list | None}
_META_FIELDS = {"name": str, "shape": list, "dtype": str, "layout": int, "tied_to": str | None, "feeding": str}


def _by_field(plain: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """A row of JSON as arguments: lists become tuples."""
    for value, (name, kind) in zip(plain, fields.items(), strict=True):
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TypeError(f"{name} is no {value!r}")
    return {
        name: _frozen(value, name) if isinstance(value, list | int) else value
        for name, value in zip(fields, plain, strict=True)
    }


def _frozen(plain: Any, name: str) -> Any:
    if isinstance(plain, list):
        return tuple(_frozen(each, name) for each in plain)
    if (type(plain) is int and plain >= 0) or (plain is None and name == "sharded_dims"):
        return plain
    raise TypeError(f"expected a whole number that is not negative, got {plain!r} in {name}")


def merge_manifests(manifests: Sequence[Manifest]) -> Manifest:
    """One side's manifest, from what each of its ranks, in order, says that it holds.

    A rank may know only of itself: what is on several ranks then becomes the boxes of them all. So a plain tensor that
    every rank has whole is replicated, and the stages of a pipeline add up.

    Raises:
        RefitError: Two ranks disagree about a tensor's shape, dtype, tie, feeding, or about one rank's boxes.
    """
    by_name: dict[str, list[tuple[int, TensorMeta]]] = {}
    for rank, manifest in enumerate(manifests):
        for meta in manifest.tensors:
            by_name.setdefault(meta.name, []).append((rank, meta))
    return Manifest(tuple(_merge_metas(said) for said in by_name.values()))


def _merge_metas(said: list[tuple[int, TensorMeta]]) -> TensorMeta:
    (first_rank, first), *others = said
    for rank, meta in others:
        if _identity(meta) != _identity(first):
            raise RefitError(
                f"rank {first_rank} and rank {rank} disagree on {first.name!r}: {_identity(first)} and "
                f"{_identity(meta)} (shape, dtype, tied to, feeding)",
                tensor=first.name,
            )
    if all(meta.layout == first.layout for _, meta in others):
        return first
    boxes: dict[int, tuple[Region, ...]] = {}
    for _, meta in said:
        for holder, held in meta.regions().items():
            if boxes.setdefault(holder, held) != held:
                raise RefitError(f"two ranks disagree on what rank {holder} holds of {first.name!r}", tensor=first.name)
    return dataclasses.replace(first, layout=Layout.from_boxes(dict(sorted(boxes.items()))))


def _identity(meta: TensorMeta) -> tuple[object, ...]:
    return meta.shape, meta.dtype, meta.tied_to, meta.feeding


# -- What both sides hold --------------------------------------------------------------------------------------------


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
