"""Weights, gradients and optimizer state away from the device and back, bit for bit, so that an engine has its memory.

Empties the storages under the tensors and fills them again: parameters, ties, views, DTensors, FSDP2's padded shards
and the optimizer's state are the same objects before and after, and only addresses on the device change. A backend asks
it (`require`) before it touches what may be away.

Everything is copied before anything is freed, and everything is back before anything is allowed again: what raises
half-way leaves the parts where they were.
"""

import ctypes
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from rl_backends.metrics.memory import MemoryUse, memory_by_category
from rl_backends.metrics.storages import Held, held_storages, named_parameters, optimizer_tensors
from rl_backends.offload.report import OffloadReport
from rl_backends.offload.resizable import make_resizable
from rl_backends.offload.stand_ins import Refusals, StandIns
from rl_backends.offload.stores import DiskStore, HostStore, Store
from rl_parallel_plans.checkpoints import reshard

__all__ = ["PARTS", "Offloader", "Part"]

Part = Literal["weights", "gradients", "optimizer"]
PARTS: tuple[Part, ...] = ("weights", "gradients", "optimizer")
_WEIGHTS: tuple[Part, ...] = ("weights",)


class Offloader:
    """Moves parts of `model` and its optimizers.

    Args:
        model: plain or sharded; gathered parameters of FSDP2 are resharded first.
        to: "host" moves what is on a GPU into pinned host memory, which is kept and used again; "disk" moves what is
            anywhere into safetensors files, deleted when they are read back.
        extra: tensors with their names that belong to a part and that neither the model nor torch's optimizers know,
            such as gradient buffers and master weights.
        directory: where "disk" makes a folder of its own. It has no default: the usual one is memory on many machines.

    Raises:
        ValueError: a place that is none, or "disk" without a directory.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        to: Literal["host", "disk"] = "host",
        directory: str | Path | None = None,
        extra: Callable[[Part], Iterable[tuple[str, Tensor]]] | None = None,
    ) -> None:
        if to not in {"host", "disk"}:
            raise ValueError(f"to={to!r} must be 'host' or 'disk'")
        if (to == "disk") != (directory is not None):
            raise ValueError(f"to={to!r} with directory={directory!r}: a directory is for 'disk', which needs one")
        self._model = model
        self._extra = extra
        self._to: Literal["host", "disk"] = to
        self._directory = Path(directory) if directory is not None else None
        self._stores: dict[Part, Store] = {}
        self._away: dict[Part, list[Held]] = {}
        self._optimizers: list[torch.optim.Optimizer] = []
        self._stand_ins: StandIns | None = None
        self._refusals: list[Refusals] = []

    @property
    def away(self) -> tuple[Part, ...]:
        """The parts that are offloaded now."""
        return tuple(part for part in PARTS if part in self._away)

    def require(self, what: str, parts: Collection[Part] = PARTS) -> None:
        """Raise where any of `parts`, which `what` needs, is away.

        Raises:
            RuntimeError: it names `what`, the parts and `onload()`.
        """
        missing = [part for part in self.away if part in parts]
        if missing:
            raise RuntimeError(f"{what} needs {_listed(missing)}, offloaded to the {self._to}; call onload() first")

    def offload(
        self, optimizers: Iterable[torch.optim.Optimizer] = (), *, parts: Collection[Part] = PARTS
    ) -> OffloadReport:
        """Move `parts` away and give their memory back. Parts that are away already stay so.

        Args:
            optimizers: of the model's parameters.
            parts: of "weights", "gradients" and "optimizer". Buffers stay.

        Raises:
            ValueError: a part that is none.
            RuntimeError: memory that cannot be emptied, or no host memory left; nothing has changed.
            OSError: the disk is full; nothing has changed.
        """
        start, optimizers = time.perf_counter(), list(optimizers)
        wanted = self._checked(parts, away=False)
        before = memory_by_category(self._model, [*self._optimizers, *optimizers])
        found = self._find(wanted, optimizers)
        try:
            _synchronize(found)
            for part, storages in found.items():
                if storages:
                    self._store(part).put([held.bytes for held in storages])
            _synchronize(found)
            self._refuse(wanted, optimizers)
        except BaseException:
            self._allow(wanted)
            for part in wanted:
                self._forget(part)
            raise
        for part, storages in found.items():
            self._away[part] = storages
            _empty(storages)
        self._optimizers += [each for each in optimizers if all(each is not known for known in self._optimizers)]
        _give_back(found)
        return self._report("offload", found, before=before, start=start, asked=parts)

    def onload(self, parts: Collection[Part] = PARTS) -> OffloadReport:
        """Bring `parts` back, those of them that are away.

        Raises:
            ValueError: a part that is none.
            RuntimeError: the device's memory is taken by somebody else, or what was put away is damaged. Everything is
                still offloaded, and can be asked for again.
        """
        start = time.perf_counter()
        found = {part: self._away[part] for part in self._checked(parts, away=True)}
        before = memory_by_category(self._model, self._optimizers)
        try:
            for part, storages in found.items():
                for held in storages:
                    held.storage.resize_(held.num_bytes)
                if storages:
                    self._store(part).get([held.bytes for held in storages])
            _synchronize(found)
        except BaseException as error:
            for storages in found.values():
                _empty(storages)
            _give_back(found)
            error.add_note(
                f"{_listed(self.away)} of the model are still offloaded to the {self._to}; make room and "
                "call onload() again"
            )
            raise
        for part in found:
            del self._away[part]
            self._forget(part)
        self._allow(tuple(found))
        report = self._report("onload", found, before=before, start=start, asked=parts)
        if not self._away:
            self._optimizers.clear()
        return report

    def close(self) -> None:
        """Give back the host memory that is kept for the next time.

        Raises:
            RuntimeError: something is away.
        """
        self.require("close()")
        for store in self._stores.values():
            store.close()
        self._stores.clear()

    def _checked(self, parts: Collection[Part], *, away: bool) -> tuple[Part, ...]:
        unknown = [part for part in parts if part not in PARTS]
        if unknown or isinstance(parts, str):
            raise ValueError(f"parts={parts!r}: a sequence of {', '.join(map(repr, PARTS))}")
        return tuple(part for part in PARTS if part in parts and (part in self._away) == away)

    def _find(self, parts: Sequence[Part], optimizers: Iterable[torch.optim.Optimizer]) -> dict[Part, list[Held]]:
        reshard(self._model)
        named = named_parameters(self._model)
        tensors: dict[Part, list[tuple[str, Tensor]]] = {
            "weights": list(named),
            "gradients": [(f"gradient of {name}", p.grad) for name, p in named if p.grad is not None],
            "optimizer": list(optimizer_tensors(optimizers)),
        }
        if self._extra is not None:
            for part in parts:
                tensors[part] += self._extra(part)
        if self._to == "disk":
            make_resizable([each for part in parts for each in tensors[part]])
        # Views of the weights among the others, such as shards of a distributed optimizer, move with the weights alone.
        seen: set[int] = set()
        if "weights" not in parts:
            seen = {held.storage._cdata for held in held_storages(tensors["weights"])}  # noqa: SLF001 - as there
        return {
            part: [
                held
                for held in held_storages(tensors[part], seen=seen)
                if self._to == "disk" or held.device.type != "cpu"
            ]
            for part in parts
        }

    def _store(self, part: Part) -> Store:
        if part not in self._stores:
            pinned = torch.cuda.is_available()
            self._stores[part] = HostStore(pinned=pinned) if self._directory is None else DiskStore(self._directory)
        return self._stores[part]

    def _forget(self, part: Part) -> None:
        if part in self._stores:
            self._stores[part].clear()

    def _refuse(self, parts: Sequence[Part], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        if "weights" in parts:
            self._refusals.append(Refusals(self._model, (), self._require_weights))
            self._stand_ins = StandIns(self._model)
        self._refusals.append(Refusals(None, optimizers, self.require))

    def _require_weights(self, what: str) -> None:
        self.require(what, _WEIGHTS)

    def _allow(self, parts: Sequence[Part]) -> None:
        if "weights" in parts and self._stand_ins is not None:
            self._stand_ins.remove()
            self._stand_ins = None
        if not self._away:
            for each in self._refusals:
                each.remove()
            self._refusals.clear()

    def _report(
        self,
        action: Literal["offload", "onload"],
        found: dict[Part, list[Held]],
        *,
        before: MemoryUse,
        start: float,
        asked: Collection[Part],
    ) -> OffloadReport:
        seconds = time.perf_counter() - start
        state = "away" if action == "offload" else "here"
        notes = [f"{part} was {state} already" for part in PARTS if part in asked and part not in found]
        if self._to == "host" and found and not any(found.values()):
            notes.append("device is cpu: everything is in host memory already, and nothing was moved or freed")
        return OffloadReport(
            action=action,
            to=self._to,
            bytes_moved={part: sum(held.num_bytes for held in storages) for part, storages in found.items()},
            seconds=seconds,
            before=before,
            after=memory_by_category(self._model, self._optimizers),
            host_bytes=sum(store.host_bytes for store in self._stores.values()),
            notes=tuple(notes),
        )


def _empty(storages: Iterable[Held]) -> None:
    for held in storages:
        held.storage.resize_(0)


def _devices(found: dict[Part, list[Held]]) -> set[torch.device]:
    return {held.device for storages in found.values() for held in storages}


def _synchronize(found: dict[Part, list[Held]]) -> None:
    for device in _devices(found):
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _give_back(found: dict[Part, list[Held]]) -> None:
    """From the allocators to the system: they keep what is freed for the next time."""
    kinds = {device.type for device in _devices(found)}
    if "cuda" in kinds:
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if "cpu" in kinds else None  # glibc's alone
    if trim is not None:
        trim(0)


def _listed(parts: Sequence[str]) -> str:
    return " and ".join({"optimizer": "optimizer state"}.get(part, part) for part in parts)
