"""Only the adapter: the A and B matrices of LoRA into an engine that holds adapters beside its own weights.

    sink = AdapterSink(engine_adapters, load=put_into_a_slot, unload=free_the_slot)
    refit = Refit(StateDictSource(adapter_tensors), sink)
    refit(version=step)
    engine.generate(prompts, adapter=sink.current)

The base weights are not touched, so that nothing can be torn: while all is verified and nothing is decided yet, the new
adapter goes into a slot of its own (`ready`); the commit changes which slot is the current one; and the adapter before
it stays for requests that began with it, until the next commit. `rl_refit.vllm.VllmAdapterSink` does this with vLLM.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from rl_refit.contracts import Coverage
from rl_refit.digest import Digest, digest_regions
from rl_refit.errors import PoisonedError, RefitError
from rl_refit.layout import Region
from rl_refit.manifest import Manifest
from rl_refit.sink import ModuleSink, VersionedSink
from rl_refit.source import NamedTensors

__all__ = ["AdapterSink"]


class AdapterSink(VersionedSink):
    """The adapter of an engine, whole on this rank. A `WeightSink`.

    Args:
        tensors: Name → a tensor of the shape and dtype that the engine takes, on the device where `load` wants it, such
            as an adapter that was saved before. Every refit must bring exactly these names. Values are not looked at.
        load: Called with the number of a slot, from 1 on and never twice, and the verified tensors, which it must not
            keep: puts them into the engine beside what is there. What it returns is `current` after the commit. If it
            raises, nobody commits, and the adapter before goes on.
        unload: Called with a slot number and what `load` returned, once nobody needs it: of the adapter before the
            last, and of one whose refit was given up. If it raises, it is called with the same again before the next
            adapter is loaded, and that refit fails if it raises once more.
        read: From what `load` returned to the tensors that the engine now holds under these names, or None for those
            that cannot be read back. Without it nothing is read back, and `report.unreadable` has every name.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        load: Callable[[int, Mapping[str, Tensor]], Any],
        unload: Callable[[int, Any], object],
        read: Callable[[Any], Mapping[str, Tensor | None]] | None = None,
    ) -> None:
        if not tensors:
            raise ValueError("an adapter has at least one tensor; got none")
        # Nobody is served from here, so it is written in place.
        self._fresh = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        self._stage = ModuleSink(NamedTensors(self._fresh), mode="in_place")
        self._load, self._unload, self._read = load, unload, read
        super().__init__()
        self._open = False
        self._slots = 0
        self._waiting: tuple[int, Any] | None = None
        """Loaded, and not committed yet."""
        self._current: tuple[int, Any] | None = None
        self._before: tuple[int, Any] | None = None
        """For requests that began with it."""
        self._idle: list[tuple[int, Any]] = []
        """To be freed."""

    @property
    def device(self) -> torch.device:
        """Where tensors are staged."""
        return self._stage.device

    @property
    def current(self) -> Any:
        """What `load` returned for the committed adapter: what requests are to name.

        Raises:
            RefitError: Nothing was committed yet.
            PoisonedError: As for `check`.
        """
        self.check()
        if self._current is None:
            raise RefitError("no adapter was committed yet; refit first, or ask the engine without one")
        return self._current[1]

    def check(self) -> None:
        """Pass if the committed adapter may be used; a commit tears nothing, so only `poison` forbids it.

        Raises:
            PoisonedError: Other ranks do not have the same, or the engine holds something else than was sent.
        """
        if self._poison is not None:
            raise PoisonedError(f"{self._poison}; refit successfully before using the adapter", phase="commit")

    def prepare(self, manifest: Manifest) -> Coverage:
        """Open a transaction.

        Raises:
            RefitError: One is open already.
        """
        if self._open:
            raise RefitError("this sink is in a transaction already; commit or abort it first", phase="prepare")
        coverage = self._stage.prepare(manifest)
        self._open = True
        return Coverage(manifest_hash=coverage.manifest_hash, sink=coverage.sink, version=self._version.begin())

    def stage(self, region: Region, tensor: Tensor, *, stays: bool = False) -> None:
        """Take `tensor`, the new values of `region`; always a copy, which is small."""
        self._stage.stage(region, tensor)

    def digest(self, regions: Iterable[Region] | None = None) -> Digest:
        """Of what is staged while a transaction is open; of what the engine holds otherwise, where it can be read."""
        if self._open:
            return self._stage.digest(regions)
        self.check()
        held = {} if self._read is None or self._current is None else self._read(self._current[1])
        whole = {name: Region(name, (0,) * each.ndim, tuple(each.shape)) for name, each in self._fresh.items()}

        def view(region: Region) -> Tensor | None:
            tensor = held.get(region.name)
            return None if tensor is None else tensor[region.index_within(whole[region.name])]

        return digest_regions(whole.values() if regions is None else regions, view)

    def ready(self, version: int) -> None:
        """Put the new adapter into a slot of its own, if all is staged.

        Raises:
            RefitError: As for `ModuleSink.ready`, or the engine did not take the adapter.
        """
        if not self._open:
            raise RefitError("cannot commit: no transaction is open; prepare comes first")
        self._version.require_newer(version)
        self._stage.ready(self._stage_version())
        if self._waiting is not None:
            return
        try:
            self._free()
        except Exception as error:
            raise RefitError(
                f"the engine did not free the slot {self._idle[0][0]} of an earlier adapter: {type(error).__name__}: "
                f"{error}; the committed one goes on, and the next refit tries again",
                phase="commit",
            ) from error
        self._slots += 1
        try:
            self._waiting = self._slots, self._load(self._slots, self._fresh)
        except RefitError:
            raise
        except Exception as error:
            raise RefitError(
                f"the engine did not take the adapter of version {version}: {type(error).__name__}: {error}; the one "
                f"before it goes on",
                phase="commit",
            ) from error

    def commit(self, version: int) -> None:
        """Make the adapter in its new slot the current one, and free the slot of the one before the last."""
        self.ready(version)
        self._stage.commit(self._stage_version())
        if self._before is not None:
            self._idle.append(self._before)
        self._before, self._current, self._waiting = self._current, self._waiting, None
        self._version.commit(version)
        self._open, self._poison = False, None
        with contextlib.suppress(Exception):  # the new adapter serves; the next refit tries again
            self._free()

    def abort(self) -> None:
        """Forget what was staged, and free its slot; the committed adapter was not touched."""
        self._stage.abort()
        if self._waiting is not None:
            self._idle.append(self._waiting)
        self._waiting, self._open = None, False
        with contextlib.suppress(Exception):  # an abort never raises; the next refit tries again
            self._free()

    def close(self) -> None:
        """Free every slot. The engine has no adapter of this sink afterwards."""
        self.abort()
        self._idle += [slot for slot in (self._before, self._current) if slot is not None]
        self._before = self._current = None
        self._free()

    def _free(self) -> None:
        while self._idle:
            self._unload(*self._idle[0])
            del self._idle[0]

    def _stage_version(self) -> int:
        """The stage counts by itself: a version that is repeated is new to it."""
        return (self._stage.version or 0) + 1
