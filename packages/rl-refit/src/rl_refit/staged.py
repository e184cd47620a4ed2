"""What sinks have in common: a version that only grows, poison, and weights that are staged until the parties decide.

A `ModuleSink`, a worker of vLLM, a LoRA adapter, a server of SGLang, a rank of checkpoint-engine and vLLM's weight
transfer are `StagedSink`s. They differ in where new weights are kept, and in how the engine gets them.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_refit.contracts import Coverage
from rl_refit.digest import Digest, digest_views
from rl_refit.errors import PoisonedError, RefitError
from rl_refit.layout import Region
from rl_refit.manifest import Manifest
from rl_refit.module_tensors import Holding

__all__ = ["StagedSink", "VersionedSink", "assemble", "digest_held", "empty_like", "overwrite", "places_of"]


class VersionedSink:
    """The version that a sink has committed, and whether it is poisoned."""

    _poisoned_so = ", so the weights may be part old and part new; refit successfully before using them"
    """What follows from the reason."""

    def __init__(self) -> None:
        self.version: int | None = None
        """The version last committed; None before the first. Says nothing about a poisoned sink."""
        self._poison: str | None = None

    @property
    def poisoned(self) -> bool:
        """Whether the weights may be torn: a commit failed and none has succeeded since."""
        return self._poison is not None

    @property
    def poison_reason(self) -> str | None:
        """Why it is poisoned; None where it is not."""
        return self._poison

    def check(self) -> None:
        """Pass if the weights are whole: what an engine calls before it generates.

        Raises:
            PoisonedError: They may be torn.
        """
        if self._poison is not None:
            raise PoisonedError(f"{self._poison}{self._poisoned_so}", phase="commit")


class StagedSink(VersionedSink, ABC):
    """A `WeightSink` of one rank.

    A version is a number of optimizer steps, so it only grows; but one that turns out to be of no use, here or at
    another rank of the sink, may be committed once more.

    Args:
        tensors: Where new weights are staged, by the names that every refit must bring.
        engine: What `check` calls an engine that is known to be whole, though perhaps wrong: "refit successfully before
            using …".
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, engine: str | None = None) -> None:
        super().__init__()
        if engine is not None:
            self._poisoned_so = f"; refit successfully before using {engine}"
        self._fresh = dict(tensors)
        self._manifest = Manifest.of_whole((name, each.dtype, each.shape) for name, each in self._fresh.items())
        self._bank: dict[str, list[Holding]] = {
            name: [(Region.whole(name, tensor.shape), tensor)] for name, tensor in self._fresh.items()
        }
        self._missing: dict[str, int] | None = None
        """Elements still to be staged in the open transaction."""
        self._seen: set[Region] = set()
        """What was staged in it."""
        self._is_prepared = False
        """Whether the engine is prepared for it."""
        self._lost: str | None = None
        """What a failed commit has left that no other can repair; None where it can."""
        self._floor: int | None = None
        """What the next version must be newer than; None before the first."""
        self._floor_before: int | None = None
        """The same before the last commit."""

    # -- What a kind of sink does in its own way ----------------------------------------------------------------------

    def _begin(self, manifest: Manifest) -> dict[str, int]:
        """A transaction opens with a source that has `manifest`: how many elements are needed of each tensor."""
        return {name: sum(box.numel for box, _ in held) for name, held in self._bank.items()}

    def _needed_boxes(self, name: str) -> Sequence[Holding]:
        """The boxes of a tensor that this rank needs, in memory of their dtype; none where it needs nothing of it."""
        return self._bank.get(name, ())

    def _take(self, region: Region, tensor: Tensor, *, stays: bool) -> None:
        """Keep the new values of `region`, until the transaction ends."""
        with torch.no_grad():
            overwrite(self._bank[region.name], region, tensor)

    def _staged(self, name: str) -> Sequence[Holding]:
        """Where the new values of a tensor are."""
        return self._bank[name]

    def _prepare_to_hand_over(self, version: int) -> None:
        """Once, when all is staged and verified and nothing is decided: what fails here fails nobody's weights."""

    @abstractmethod
    def _hand_over(self, version: int) -> None:
        """Give the engine what is staged. Where it raises, the sink is poisoned."""

    def _all_boxes(self) -> Iterable[Region]:
        """Those that this rank holds of all tensors that travel."""
        return (box for held in self._bank.values() for box, _ in held)

    def _digest_engine(self, regions: Sequence[Region]) -> Digest:
        """Of what the engine holds, without what cannot be read back: all of it, unless a sink knows better."""
        return Digest({})

    def _end(self) -> None:
        """The transaction is over."""
        self._missing, self._seen, self._is_prepared = None, set(), False

    # -- What all do alike --------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where tensors are staged."""
        return next((tensor.device for held in self._bank.values() for _, tensor in held), torch.device("cpu"))

    def poison(self, reason: str) -> None:
        """Refuse to be used until a refit succeeds; see `WeightSink`, as for all below."""
        self._poison = reason
        self.version = self._floor = self._floor_before

    def repeat(self) -> None:
        """Take the version that was just committed once more: others did not come through with it."""
        self._floor = self._floor_before

    def rewind(self, version: int) -> None:
        """Take `version` next, or a later one, even if a later one was committed: the trainer went back to it."""
        if self._floor is not None and self._floor >= version:
            self._floor = self._floor_before = version - 1 if version else None

    def prepare(self, manifest: Manifest) -> Coverage:
        """Open a transaction. Allowed, and needed, when the sink is poisoned.

        Raises:
            RefitError: One is open already.
            PoisonedError: A commit has failed in a way that no other can repair.
            CoverageError: The engine needs what the source does not have, or has no place for what it has.
        """
        if self._lost is not None:
            raise PoisonedError(f"{self._poison}; {self._lost}", phase="prepare")
        if self._missing is not None:
            raise RefitError("this sink is in a transaction already; commit or abort it first", phase="prepare")
        self._missing = self._begin(manifest)
        self._floor_before = self._floor
        return Coverage(manifest_hash=manifest.hash(), sink=self._manifest, version=self._floor)

    def stage(self, region: Region, tensor: Tensor, *, stays: bool = False) -> None:
        """Take `tensor` as the new values of `region`; without a copy where it `stays` and the sink can keep it.

        Raises:
            RefitError: No transaction is open, nothing needs such a box, or `tensor` is of another dtype or shape.
        """
        if self._missing is None:
            raise RefitError("cannot stage: no transaction is open; prepare comes first")
        needed = self._needed_boxes(region.name)
        places = places_of(needed, region)
        if not places or tensor.shape != region.shape or tensor.dtype != places[0].dtype:
            boxes = ", ".join(f"{list(box.shape)} at {list(box.offsets)}" for box, _ in needed)
            raise RefitError(
                f"cannot stage {list(tensor.shape)} in {tensor.dtype} as {region}: the sink has "
                f"{f'{boxes} in {needed[0][1].dtype}' if needed else 'no such tensor'}",
                phase="transfer",
                tensor=region.name,
            )
        if region in self._seen:
            raise RefitError(f"{region} is staged a second time", phase="transfer", tensor=region.name)
        self._take(region, tensor, stays=stays)
        self._seen.add(region)
        self._missing[region.name] -= region.numel

    def digest(self, regions: Iterable[Region] | None = None) -> Digest:
        """Of what is staged while a transaction is open; of what the engine holds otherwise, where it can be read.

        Raises:
            PoisonedError: No transaction is open, and the weights may be torn.
        """
        if self._missing is None:
            self.check()
        regions = tuple(self._all_boxes() if regions is None else regions)
        return self._digest_engine(regions) if self._missing is None else self._digest_staged(regions)

    def _digest_staged(self, regions: Sequence[Region]) -> Digest:
        return digest_held(regions, {name: self._staged(name) for name in {region.name for region in regions}})

    def ready(self, version: int) -> None:
        """Pass if all is staged, and nothing stands in the way of a commit.

        Raises:
            RefitError: No transaction is open, some tensor was not staged exactly once, `version` is not newer than the
                committed one, or the engine is not ready.
        """
        if self._missing is None:
            raise RefitError("cannot commit: no transaction is open; prepare comes first")
        if incomplete := [f"{name} ({count:+,} elements)" for name, count in self._missing.items() if count]:
            raise RefitError(f"not staged exactly once, still missing: {', '.join(incomplete)}", phase="commit")
        if self._floor is not None and version <= self._floor:
            raise RefitError(
                f"version {version} is not newer than the committed {self._floor}; a version counts optimizer steps",
                phase="commit",
            )
        if not self._is_prepared:
            self._prepare_to_hand_over(version)
            self._is_prepared = True

    def commit(self, version: int) -> None:
        """Give the engine what is staged.

        Raises:
            RefitError: It did not take it. What it has then is not known, so the sink is poisoned.
        """
        self.ready(version)
        try:
            self._hand_over(version)
        except BaseException as error:
            self._poison = f"the commit of version {version} failed with {type(error).__name__}: {error}"
            raise
        self._floor_before, self.version, self._floor = self._floor, version, version
        self._poison = None
        self._end()

    def abort(self) -> None:
        """Forget what was staged. The engine goes on with what it has."""
        self._end()


# -- Boxes and the memory where they lie -----------------------------------------------------------------------------


def places_of(holdings: Iterable[Holding], region: Region) -> list[Tensor]:
    """A view of `region` in each of the holdings that have all of it."""
    return [
        memory if box == region else memory[region.index_within(box)]
        for box, memory in holdings
        if box == region or (len(box.shape) == len(region.shape) and box.intersect(region) == region)
    ]


def overwrite(holdings: Iterable[Holding], region: Region, tensor: Tensor) -> None:
    """Copy `tensor` to every place of `region`."""
    for place in places_of(holdings, region):
        place.copy_(tensor)


def assemble(holdings: Iterable[Holding], region: Region) -> Tensor:
    """A copy of `region`, of which each holding has a part."""
    parts: list[tuple[Region, Region, Tensor]] = []
    for box, memory in holdings:
        shared = region.intersect(box)
        if shared is not None:
            parts.append((shared, box, memory))
    if sum(shared.numel for shared, _, _ in parts) != region.numel:
        raise RefitError(f"{region} is not staged", phase="verify", tensor=region.name)
    copy = torch.empty(region.shape, dtype=parts[0][2].dtype, device=parts[0][2].device)
    for shared, box, memory in parts:
        copy[shared.index_within(region)].copy_(memory[shared.index_within(box)])
    return copy


def digest_held(regions: Sequence[Region], held: Mapping[str, Sequence[Holding]]) -> Digest:
    """Of `regions`, wherever they lie among the holdings of their tensor, by name; of a part in each, put together.

    Raises:
        DigestError: A box lies in several places, which differ.
    """
    places = (
        (region, place)
        for region in regions
        for place in places_of(held[region.name], region) or [assemble(held[region.name], region)]
    )
    return digest_views(regions, places)


def empty_like(folder: Path) -> dict[str, Tensor]:
    """A tensor for each that the safetensors files of a Hugging Face folder hold, by their headers; no tied head.

    Raises:
        RefitError: It is no checkpoint of safetensors files.
    """
    from safetensors import SafetensorError, safe_open

    index, config = folder / "model.safetensors.index.json", folder / "config.json"
    tensors: dict[str, Tensor] = {}
    try:
        if index.is_file():
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        else:
            names = sorted(file.name for file in folder.glob("*.safetensors"))
        if not names:
            raise FileNotFoundError(f"{folder} has neither {index.name} nor any *.safetensors file")
        for name in names:
            with safe_open(folder / name, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118  (it cannot be iterated)
                    if key in tensors:
                        raise ValueError(f"more than one file has {key}; keep one set of files in the folder")  # noqa: TRY301
                    header = file.get_slice(key)
                    shape = header.get_shape()
                    dtype = (header[:0] if shape else file.get_tensor(key)).dtype
                    tensors[key] = torch.zeros(shape, dtype=dtype)
        settings: dict[str, Any] = json.loads(config.read_bytes()) if config.is_file() else {}
    except (OSError, ValueError, KeyError, AttributeError, SafetensorError) as error:
        raise RefitError(
            f"like= is the checkpoint folder that the server was started with, and {folder} is not: "
            f"{type(error).__name__}: {error}"
        ) from error
    tied = settings.get("tie_word_embeddings", settings.get("text_config", {}).get("tie_word_embeddings"))
    if tied and any(name.endswith("embed_tokens.weight") for name in tensors):
        tensors.pop("lm_head.weight", None)
    return tensors
