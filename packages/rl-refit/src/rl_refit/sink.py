"""An `nn.Module` as the sink of weights, in one of two modes.

What the modes do with new weights until all of them have arrived:

    staged      a copy of their own (or the transport's memory, where that stays); commit copies it into the module
    swap        a second set of tensors; commit gives the module these and keeps the old ones for the next refit

With "staged" the module's tensors keep their identity and their addresses, so that ties, captured graphs and whoever
else refers to them see the new values. "swap" keeps the identity of parameters and buffers, and changes addresses.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, final, get_args

import torch
from torch import Tensor, nn

from rl_refit import gpu
from rl_refit.contracts import Coverage, WeightSource
from rl_refit.digest import Digest, digest_views
from rl_refit.errors import PoisonedError, RefitError
from rl_refit.layout import Region
from rl_refit.manifest import Manifest
from rl_refit.module_tensors import Bindings, Holding, ModuleReader, ModuleTensors, Rename, as_patterns, check_writable

__all__ = ["CommitMode", "ModuleSink", "VersionedSink", "assemble", "places_of", "read_box"]

CommitMode = Literal["staged", "swap"]


@dataclass(slots=True)
class _Transaction:
    """What an open transaction knows, of the tensors that travel."""

    tensors: ModuleTensors
    live: dict[str, tuple[Holding, ...]]
    """The module's own memory."""

    missing: dict[str, int]
    """Elements still to be staged."""

    seen: set[Region] = field(default_factory=set)
    """What was staged."""

    kept: dict[str, list[Holding]] = field(default_factory=dict)
    """Pieces in memory of the caller's that stays until the transaction is closed."""


class VersionedSink:
    """What sinks have in common: the version that they committed, and whether they are poisoned.

    A version is a number of optimizer steps, so it only grows; but one that turns out to be of no use, here or at
    another rank of the sink, may be committed once more.
    """

    def __init__(self) -> None:
        self.version: int | None = None
        """The version last committed; None before the first. Says nothing about a poisoned sink."""
        self._floor: int | None = None
        """What the next version must be newer than; None before the first."""
        self._floor_before: int | None = None
        """The same before the last commit."""
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
            raise PoisonedError(
                f"{self._poison}, so the weights may be part old and part new; refit successfully before using them",
                phase="commit",
            )

    def poison(self, reason: str) -> None:
        """Refuse to be used until a refit succeeds: for whoever knows that the weights are not what they should be.

        A version that was committed just before does not count any more, so that the same can be refitted again.
        """
        self._poison = reason
        self.version = self._floor = self._floor_before

    def repeat(self) -> None:
        """Take the version that was just committed once more: others did not come through with it."""
        self._floor = self._floor_before

    def rewind(self, version: int) -> None:
        """Take `version` next, or a later one, even if a later one was committed: the trainer went back to it."""
        if self._floor is not None and self._floor >= version:
            self._floor = self._floor_before = version - 1 if version else None

    def _begin(self) -> int | None:
        """A transaction opens; what the next version must be newer than."""
        self._floor_before = self._floor
        return self._floor

    def _require_ready(self, version: int, missing: Mapping[str, int] | None) -> None:
        """Pass if `version` may be committed, of which `missing` says how many elements each tensor still lacks."""
        if missing is None:
            raise RefitError("cannot commit: no transaction is open; prepare comes first")
        if incomplete := [f"{name} ({count:+,} elements)" for name, count in missing.items() if count]:
            raise RefitError(f"not staged exactly once, still missing: {', '.join(incomplete)}", phase="commit")
        if self._floor is not None and version <= self._floor:
            raise RefitError(
                f"version {version} is not newer than the committed {self._floor}; a version counts optimizer steps",
                phase="commit",
            )

    def _committed(self, version: int) -> None:
        self._floor_before, self.version, self._floor = self._floor, version, version
        self._poison = None


@final
class ModuleSink(VersionedSink):
    """Every parameter and every buffer of `module`, persistent or not. A `WeightSink`.

    "staged" and "swap" cost one more copy of the weights, from the first piece that does not stay. One thread
    at a time takes part in refits. Another that runs the module does so in `with sink.serving():`, which a commit waits
    for; or asks `check` before, where nothing can begin in between.

    Args:
        module: The engine's own model, which nothing else trains.
        mode: When the module gets the new weights: "staged", "swap".
        before_commit: Called with the version when all is verified and nothing is touched yet, to stop an engine. If it
            raises, the old weights stay.
        on_commit: Called with the version at the end of every commit, when the module has the new weights: to tell an
            engine its version, or to drop its caches. If it raises, the sink is poisoned.
        rename: From a name in the module to its Hugging Face name. Nothing is stripped without it.
        bindings: Where the module keeps boxes of named tensors in fused, stacked, padded or permuted storage.
        derived: Patterns, as of `fnmatch`, of tensors that the engine computes from others, and `on_commit` anew.
        constant: Patterns of tensors that never change; of bound ones, the elements that no binding reaches.
        wait_s: Seconds that a commit waits for threads that are `serving`.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        mode: CommitMode = "staged",
        before_commit: Callable[[int], object] | None = None,
        on_commit: Callable[[int], object] | None = None,
        rename: Rename | None = None,
        bindings: Bindings | None = None,
        derived: Iterable[str] = (),
        constant: Iterable[str] = (),
        wait_s: float = 600.0,
    ) -> None:
        if mode not in get_args(CommitMode):
            raise ValueError(f"mode={mode!r} is none of {', '.join(get_args(CommitMode))}")
        self._reader = ModuleReader(
            module,
            rename=rename,
            bindings=bindings,
            feeding={"derived": as_patterns(derived), "constant": as_patterns(constant)},
            complete=True,
        )
        if mode == "swap" and bindings is not None:
            raise ValueError("mode='swap' exchanges whole tensors, which bindings look into; use mode='staged'")
        self._mode = mode
        self._bound = bindings is not None
        self._before_commit, self._on_commit = before_commit, on_commit
        self._wait_s = wait_s
        self._turns = threading.Condition()
        self._serving: list[int] = []
        """The threads that are in `serving`."""
        self._writing = False
        self._bank: dict[str, list[Holding]] = {}
        self._checked: list[tuple[object, ...]] = []
        self._memory: set[tuple[torch.device, int]] = set()
        self._needed: dict[str, int] = {}
        self._open: _Transaction | None = None
        super().__init__()

    @property
    def device(self) -> torch.device:
        """Where the module is."""
        return self._reader.device

    def check(self) -> None:
        """Pass if the weights are whole: what an engine calls before it generates.

        Raises:
            PoisonedError: They may be torn, or are being written.
        """
        super().check()
        if self._writing:
            raise PoisonedError("new weights are being written; generate when they have been committed", phase="commit")

    @contextmanager
    def serving(self) -> Iterator[int | None]:
        """Keep the weights as they are for as long as this is entered; gives their version, or None before the first.

        Waits while new ones are being written. A commit waits until every thread has left.

        Raises:
            PoisonedError: They may be torn.
        """
        with self._turns:
            while self._writing and self._poison is None:
                self._turns.wait()
            self.check()
            self._serving.append(threading.get_ident())
        try:
            yield self.version
        finally:
            with self._turns:
                self._serving.remove(threading.get_ident())
                self._turns.notify_all()

    def _begin_writing(self) -> None:
        """From now on nobody serves, until `_end_writing`."""
        with self._turns:
            if threading.get_ident() in self._serving:
                raise RefitError("this thread is in `serving`, and a commit would wait for it; leave that first")
            self._writing = True
            until = time.monotonic() + self._wait_s
            while self._serving:
                if not self._turns.wait(until - time.monotonic()):
                    self._writing = False
                    self._turns.notify_all()
                    raise RefitError(
                        f"{len(self._serving)} threads still serve after wait_s={self._wait_s}; nothing was written"
                    )
        gpu.synchronize(self.device, self._wait_s)  # what they have begun in streams of theirs reads the weights

    def _end_writing(self) -> None:
        with self._turns:
            self._writing = False
            self._turns.notify_all()

    def manifest(self) -> Manifest:
        """What the module holds now.

        Raises:
            RefitError: As for `ModuleSource.manifest`.
            CoverageError: Elements of bound storage that nothing feeds and nothing declares constant.
        """
        return self._reader.read().manifest

    def weights(self) -> WeightSource:
        """What the module holds, as the source of another sink: what it serves, and does not train.

        To be read while no transaction is open.
        """
        return self._reader

    def prepare(self, manifest: Manifest) -> Coverage:
        """Open a transaction. Allowed, and needed, when the sink is poisoned.

        Raises:
            RefitError: A transaction is open already, or a tensor of the module cannot be written.
        """
        if self._open is not None:
            raise RefitError("this sink is in a transaction already; commit or abort it first", phase="prepare")
        tensors = self._reader.read()
        live = {meta.name: tensors.held[meta.name] for meta in tensors.manifest.tensors if meta.travels}
        if tensors.identity not in self._checked:
            check_writable(live, tensors=tensors, bound=self._bound, swap=self._mode == "swap")
            self._needed = {name: sum(box.numel for box in {box for box, _ in held}) for name, held in live.items()}
            self._checked = [tensors.identity, *self._checked[:1]]  # "swap" has two, in turn
        self._memory = {
            (view.device, view.untyped_storage().data_ptr())
            for held in live.values()
            for _, view in held
            if view.numel()
        }
        self._open = _Transaction(tensors, live, dict(self._needed))
        return Coverage(manifest_hash=manifest.hash(), sink=tensors.manifest, version=self._begin())

    def stage(self, region: Region, tensor: Tensor, *, stays: bool = False) -> None:
        """Take `tensor` as the new values of `region`; without a copy where it `stays` and the mode allows it.

        Raises:
            RefitError: No transaction is open, the sink has no such box, or `tensor` is of another dtype or shape.
        """
        transaction = self._open
        if transaction is None:
            raise RefitError("cannot stage: no transaction is open; prepare comes first")
        live = transaction.live.get(region.name)
        if live is None:
            raise RefitError(
                f"cannot stage {region}: the sink has no such tensor", phase="transfer", tensor=region.name
            )
        places = places_of(live, region)
        if not places or tensor.shape != region.shape or tensor.dtype != places[0].dtype:
            raise RefitError(
                f"cannot stage {list(tensor.shape)} in {tensor.dtype} as {region}: the sink has "
                f"{[list(box.shape) for box, _ in live]} in {live[0][1].dtype if live else 'nothing'}",
                phase="transfer",
                tensor=region.name,
            )
        if (tensor.device, tensor.untyped_storage().data_ptr()) in self._memory:
            raise RefitError(
                f"the new values of {region} lie in the sink's own memory: trainer and engine share their weights; "
                f"give the engine a model of its own",
                phase="transfer",
                tensor=region.name,
            )
        if region in transaction.seen:
            raise RefitError(f"{region} is staged a second time", phase="transfer", tensor=region.name)
        transaction.seen.add(region)
        transaction.missing[region.name] -= tensor.numel()
        if stays and self._mode != "swap":
            transaction.kept.setdefault(region.name, []).append((region, tensor))
        else:
            with torch.no_grad():
                overwrite(self._banked(region.name, live), region, tensor)

    def digest(self, regions: Iterable[Region] | None = None) -> Digest:
        """Of the staged boxes while a transaction is open; of the module's own otherwise.

        Raises:
            PoisonedError: No transaction is open, and the weights may be torn.
        """
        transaction = self._open
        if transaction is None:
            self.check()
            tensors = self._reader.read()
            live = {meta.name: tensors.held[meta.name] for meta in tensors.manifest.tensors if meta.travels}
        else:
            live = transaction.live
        if regions is None:
            regions = [region for held in live.values() for region in dict.fromkeys(region for region, _ in held)]
        regions = tuple(regions)
        held_of: dict[str, Sequence[Holding]] = {}
        for name in {region.name for region in regions}:
            held_of[name] = live[name] if transaction is None else self._staged(name, transaction)
        places = (
            (region, place)
            for region in regions
            for place in places_of(held_of[region.name], region) or [assemble(held_of[region.name], region)]
        )
        return digest_views(regions, places)

    def ready(self, version: int) -> None:
        """Pass if all is staged.

        Raises:
            RefitError: No transaction is open, `version` is not newer than the committed one, or some tensor was not
                staged exactly once.
        """
        self._require_ready(version, None if self._open is None else self._open.missing)

    def commit(self, version: int) -> None:
        """Give the module the staged weights, as its mode says, then call `on_commit(version)`.

        Raises:
            RefitError: Nothing was touched: as `ready` says, or threads still serve.
        """
        self.ready(version)
        transaction = self._open
        assert transaction is not None
        if self._before_commit is not None:
            self._before_commit(version)
        self._begin_writing()
        try:
            with torch.no_grad():
                for name, live in transaction.live.items():
                    if self._mode == "swap":
                        for (region, old), (_, fresh) in zip(live, self._banked(name, live), strict=True):
                            transaction.tensors.objects[name].data = fresh
                            self._bank[name] = [(region, old)]
                    else:
                        for region, piece in self._staged(name, transaction):
                            overwrite(live, region, piece)
            if self._on_commit is not None:
                self._on_commit(version)
            # From now on others may read what was written, and write what was read.
            gpu.synchronize(self.device, self._wait_s)
            self._committed(version)
            self._open = None
        except BaseException as error:
            self._poison = f"the commit of version {version} failed with {type(error).__name__}: {error}"
            raise
        finally:
            self._end_writing()

    def abort(self) -> None:
        """Close the transaction; the module keeps what it has, and the bank is kept."""
        self._open = None

    def _staged(self, name: str, transaction: _Transaction) -> Sequence[Holding]:
        """Where the new values of a tensor are, until they are committed."""
        live, kept = transaction.live[name], transaction.kept.get(name)
        if kept is not None and sum(piece.numel() for _, piece in kept) == self._needed[name]:
            return kept
        bank = self._banked(name, live)
        for region, piece in transaction.kept.pop(name, ()):  # part of it stays, part was copied: once, then all was
            overwrite(bank, region, piece)
        return bank

    def _banked(self, name: str, live: tuple[Holding, ...]) -> list[Holding]:
        """The stage of a tensor, allocated once: a copy of each distinct box."""
        boxes = {region: view for region, view in live}  # noqa: C416  (of equal boxes the last)
        bank = self._bank.get(name)
        if bank is None or [(r, t.dtype, t.device) for r, t in bank] != [
            (region, view.dtype, view.device) for region, view in boxes.items()
        ]:
            with torch.inference_mode(False):  # or no refit outside of that mode could write it again
                bank = [
                    (region, torch.empty(region.shape, dtype=view.dtype, device=view.device))
                    for region, view in boxes.items()
                ]
            self._bank[name] = bank
        return bank


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


def read_box(holdings: Sequence[Holding], region: Region) -> Tensor:
    """What the holdings have of `region`: a view of one of them, or a copy of parts of several."""
    places = places_of(holdings, region)
    return places[0] if places else assemble(holdings, region)
