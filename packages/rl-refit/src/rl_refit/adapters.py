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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_refit.digest import Digest
from rl_refit.errors import RefitError
from rl_refit.layout import Region
from rl_refit.staged import StagedSink, digest_held

__all__ = ["AdapterSink"]


class AdapterSink(StagedSink):
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
        super().__init__({name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, engine="the adapter")
        self._load, self._unload, self._read = load, unload, read
        self._slots = 0
        self._waiting: tuple[int, Any] | None = None
        """Loaded, and not committed yet."""
        self._current: tuple[int, Any] | None = None
        self._before: tuple[int, Any] | None = None
        """For requests that began with it."""
        self._idle: list[tuple[int, Any]] = []
        """To be freed."""

    @property
    def current(self) -> Any:
        """What `load` returned for the committed adapter: what requests are to name.

        Raises:
            RefitError: Nothing was committed yet.
            PoisonedError: Other ranks do not have the same, or the engine holds something else than was sent; a commit
                itself tears nothing.
        """
        self.check()
        if self._current is None:
            raise RefitError("no adapter was committed yet; refit first, or ask the engine without one")
        return self._current[1]

    def abort(self) -> None:
        """Forget what was staged, and free its slot; the committed adapter was not touched."""
        super().abort()
        if self._waiting is not None:
            self._idle.append(self._waiting)
        self._waiting = None
        with contextlib.suppress(Exception):  # an abort never raises; the next refit tries again
            self._free()

    def _digest_engine(self, regions: Sequence[Region]) -> Digest:
        read = {} if self._read is None or self._current is None else self._read(self._current[1])
        held = {
            name: [(Region.whole(name, self._fresh[name].shape), each)]
            for name, each in read.items()
            if each is not None
        }
        return digest_held([region for region in regions if region.name in held], held)

    def _prepare_to_hand_over(self, version: int) -> None:
        """Put the new adapter into a slot of its own: if the engine does not take it, nobody commits."""
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

    def _hand_over(self, version: int) -> None:
        """Make the adapter in its new slot the current one, and free the slot of the one before the last."""
        if self._before is not None:
            self._idle.append(self._before)
        self._before, self._current, self._waiting = self._current, self._waiting, None
        with contextlib.suppress(Exception):  # the new adapter serves; the next refit tries again
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
