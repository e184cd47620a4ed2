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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, final, get_args

import torch
from torch import Tensor, nn

from rl_refit import gpu
from rl_refit.contracts import WeightSource
from rl_refit.digest import Digest
from rl_refit.errors import PoisonedError, RefitError
from rl_refit.layout import Region
from rl_refit.manifest import Manifest
from rl_refit.module_tensors import Bindings, Holding, ModuleReader, ModuleTensors, Rename, as_patterns, check_writable
from rl_refit.staged import StagedSink, digest_held, overwrite

__all__ = ["CommitMode", "ModuleSink"]

CommitMode = Literal["staged", "swap"]


@final
class ModuleSink(StagedSink):
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
        self._checked: list[tuple[object, ...]] = []
        self._needed: dict[str, int] = {}
        super().__init__({})
        self._live: dict[str, tuple[Holding, ...]] = {}
        """In a transaction: the module's own memory of the tensors that travel."""
        self._objects: dict[str, Tensor] = {}
        """And its parameters and buffers."""
        self._memory: set[tuple[torch.device, int]] = set()
        self._kept: dict[str, list[Holding]] = {}
        """Pieces in memory of the caller's that stays until the transaction ends."""

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

    def _begin(self, manifest: Manifest) -> dict[str, int]:
        """Find the module's memory; raises where a tensor of it cannot be written."""
        tensors = self._reader.read()
        live = _travelling(tensors)
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
        self._live, self._objects, self._manifest = live, tensors.objects, tensors.manifest
        return dict(self._needed)

    def _needed_boxes(self, name: str) -> Sequence[Holding]:
        return self._live.get(name, ())

    def _take(self, region: Region, tensor: Tensor, *, stays: bool) -> None:
        if (tensor.device, tensor.untyped_storage().data_ptr()) in self._memory:
            raise RefitError(
                f"the new values of {region} lie in the sink's own memory: trainer and engine share their weights; "
                f"give the engine a model of its own",
                phase="transfer",
                tensor=region.name,
            )
        if stays and self._mode != "swap":
            self._kept.setdefault(region.name, []).append((region, tensor))
        else:
            with torch.no_grad():
                overwrite(self._banked(region.name), region, tensor)

    def _staged(self, name: str) -> Sequence[Holding]:
        kept = self._kept.get(name)
        if kept is not None and sum(piece.numel() for _, piece in kept) == self._needed[name]:
            return kept
        bank = self._banked(name)
        for region, piece in self._kept.pop(name, ()):  # part of it stays, part was copied: once, then all was
            overwrite(bank, region, piece)
        return bank

    def _all_boxes(self) -> Iterable[Region]:
        live = self._live if self._missing is not None else _travelling(self._reader.read())
        return (region for held in live.values() for region in dict.fromkeys(region for region, _ in held))

    def _digest_engine(self, regions: Sequence[Region]) -> Digest:
        return digest_held(regions, _travelling(self._reader.read()))

    def commit(self, version: int) -> None:
        """Give the module the staged weights, as its mode says, then call `on_commit(version)`.

        Raises:
            RefitError: Nothing was touched: as `ready` says, or threads still serve.
        """
        self.ready(version)
        if self._before_commit is not None:
            self._before_commit(version)
        self._begin_writing()
        try:
            super().commit(version)
        finally:
            self._end_writing()

    def _hand_over(self, version: int) -> None:
        with torch.no_grad():
            for name, live in self._live.items():
                if self._mode == "swap":
                    for (region, old), (_, fresh) in zip(live, self._banked(name), strict=True):
                        self._objects[name].data = fresh
                        self._bank[name] = [(region, old)]
                else:
                    for region, piece in self._staged(name):
                        overwrite(live, region, piece)
        if self._on_commit is not None:
            self._on_commit(version)
        # From now on others may read what was written, and write what was read.
        gpu.synchronize(self.device, self._wait_s)

    def _end(self) -> None:
        super()._end()
        self._live, self._objects, self._kept = {}, {}, {}  # whoever moves the module frees what it leaves

    def _banked(self, name: str) -> list[Holding]:
        """The stage of a tensor, allocated once: a copy of each distinct box."""
        boxes = dict(self._live[name])
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


def _travelling(tensors: ModuleTensors) -> dict[str, tuple[Holding, ...]]:
    """The module's own memory of what is sent."""
    return {meta.name: tensors.held[meta.name] for meta in tensors.manifest.tensors if meta.travels}
