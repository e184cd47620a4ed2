"""Weights, gradients and optimizer state off the device and back, bit for bit, so that an engine has their memory.

The storages under the tensors are emptied and filled again: parameters, ties, views, DTensors, FSDP2's padded shards
and the optimizer's state are the same objects before and after, and only addresses on the device change. A backend
calls `require` before it uses what may be offloaded.

Everything is copied before anything is freed, and everything is back before anything is allowed again: what raises
half-way leaves the parts where they were.
"""

import ctypes
import os
import shutil
import tempfile
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from rl_backends.metrics.memory import NamedStorage, named_storages, plain_tensors, tensors_by_category

Part = Literal["weights", "gradients", "optimizer"]
PARTS: tuple[Part, ...] = ("weights", "gradients", "optimizer")
_WEIGHTS: tuple[Part, ...] = ("weights",)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadReport:
    """Of one `offload` or `onload`, on this rank."""

    bytes_moved: Mapping[str, int]
    """Of each part that was asked for and was not there already: what the device was freed of, or has again."""
    seconds: float
    host_bytes: int
    """Host memory that is kept for the next time, or holds what is away."""
    notes: tuple[str, ...]
    """Why something that was asked for did not happen."""


class Offloader:
    """Moves parts of `model` and its optimizers.

    Args:
        model: plain or sharded; gathered parameters of FSDP2 are resharded first.
        directory: a folder of its own is made there, and what is anywhere moves into files in it, deleted
            when they are read back. None moves what is on a GPU into pinned host memory, which is kept and used again.
    """

    def __init__(self, model: nn.Module, *, directory: str | Path | None = None) -> None:
        self.directory = None if directory is None else Path(directory)
        """Where files go; None where there are none."""
        self._to: Literal["host", "disk"] = "host" if directory is None else "disk"
        self._model = model
        self._stores: dict[Part, Store] = {}
        self._away: dict[Part, list[NamedStorage]] = {}
        self._replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._handles: list[RemovableHandle] = []

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
        found = self._find(wanted, optimizers)
        devices = {held.device for storages in found.values() for held in storages}
        try:
            _synchronize(devices)
            for part, storages in found.items():
                if storages:
                    self._store(part).put([held.bytes for held in storages])
            _synchronize(devices)
            if "weights" in wanted:
                self._handles += refuse_model(self._model, partial(self.require, parts=_WEIGHTS))
                self._replaced = put_placeholders(self._model)
            for optimizer in optimizers:
                refuse = partial(self.require, f"step of {type(optimizer).__name__}")
                self._handles.append(optimizer.register_step_pre_hook(lambda *_, refuse=refuse: refuse()))
        except BaseException:
            self._allow(wanted)
            self._clear_stores(wanted)
            raise
        for part, storages in found.items():
            self._away[part] = storages
            _empty(storages)
        _give_back(devices)
        return self._report(found, "away", start=start, asked=parts)

    def onload(self, parts: Collection[Part] = PARTS) -> OffloadReport:
        """Bring `parts` back, those of them that are away.

        Raises:
            ValueError: a part that is none.
            RuntimeError: the device's memory is taken by somebody else, or what was put away is damaged. Everything is
                still offloaded, and can be asked for again.
        """
        start = time.perf_counter()
        found = {part: self._away[part] for part in self._checked(parts, away=True)}
        devices = {held.device for storages in found.values() for held in storages}
        try:
            for part, storages in found.items():
                for held in storages:
                    held.storage.resize_(held.num_bytes)
                if storages:
                    self._store(part).get([held.bytes for held in storages])
            _synchronize(devices)
        except BaseException as error:
            for storages in found.values():
                _empty(storages)
            _give_back(devices)
            error.add_note(
                f"{_listed(self.away)} of the model are still offloaded to the {self._to}; make room and "
                "call onload() again"
            )
            raise
        for part in found:
            del self._away[part]
        self._clear_stores(found)
        self._allow(found)
        return self._report(found, "here", start=start, asked=parts)

    def close(self) -> None:
        """Give back the host memory that is kept for the next time.

        Raises:
            RuntimeError: something is away.
        """
        self.require("close()")
        self._stores.clear()

    def _checked(self, parts: Collection[Part], *, away: bool) -> tuple[Part, ...]:
        unknown = [part for part in parts if part not in PARTS]
        if unknown or isinstance(parts, str):
            raise ValueError(f"parts={parts!r}: a sequence of {', '.join(map(repr, PARTS))}")
        return tuple(part for part in PARTS if part in parts and (part in self._away) == away)

    def _find(
        self, parts: Sequence[Part], optimizers: Iterable[torch.optim.Optimizer]
    ) -> dict[Part, list[NamedStorage]]:
        tensors = dict(zip(PARTS, tensors_by_category(self._model, optimizers).values(), strict=False))
        if self._to == "disk":
            make_resizable([each for part in parts for each in tensors[part]])
        # Views of the weights among the others, such as shards of a distributed optimizer, move with the weights alone.
        seen: set[int] = set()
        if "weights" not in parts:
            seen = {held.storage._cdata for held in named_storages(tensors["weights"])}  # noqa: SLF001 - as there
        return {
            part: [
                held
                for held in named_storages(tensors[part], seen=seen)
                if self._to == "disk" or held.device.type != "cpu"
            ]
            for part in parts
        }

    def _store(self, part: Part) -> "Store":
        if part not in self._stores:
            pinned = torch.cuda.is_available()
            self._stores[part] = HostStore(pinned=pinned) if self.directory is None else DiskStore(self.directory)
        return self._stores[part]

    def _clear_stores(self, parts: Collection[Part]) -> None:
        for part, store in self._stores.items():
            if part in parts:
                store.clear()

    def _allow(self, parts: Collection[Part]) -> None:
        if "weights" in parts:
            for module, name, parameter in self._replaced:
                module._parameters[name] = parameter  # noqa: SLF001 - the inverse of put_placeholders
            self._replaced = []
        if not self._away:
            for handle in self._handles:
                handle.remove()
            self._handles = []

    def _report(
        self, found: dict[Part, list[NamedStorage]], state: str, *, start: float, asked: Collection[Part]
    ) -> OffloadReport:
        notes = [f"{part} was {state} already" for part in PARTS if part in asked and part not in found]
        if self._to == "host" and found and not any(found.values()):
            notes.append("device is cpu: everything is in host memory already, and nothing was moved or freed")
        return OffloadReport(
            bytes_moved={part: sum(held.num_bytes for held in storages) for part, storages in found.items()},
            seconds=time.perf_counter() - start,
            host_bytes=sum(store.host_bytes for store in self._stores.values()),
            notes=tuple(notes),
        )


def _empty(storages: Iterable[NamedStorage]) -> None:
    for held in storages:
        held.storage.resize_(0)


def _synchronize(devices: Iterable[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _give_back(devices: Iterable[torch.device]) -> None:
    """From the allocators to the system: they keep what is freed for the next time."""
    kinds = {device.type for device in devices}
    if "cuda" in kinds:
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if "cpu" in kinds else None  # glibc's alone
    if trim is not None:
        trim(0)


def _listed(parts: Sequence[str]) -> str:
    return " and ".join({"optimizer": "optimizer state"}.get(part, part) for part in parts)


# ---- Tensors in memory that cannot be resized.


def make_resizable(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Give each of `tensors`, named for messages, memory of its own where what it has cannot be resized. Ties stay."""
    own: dict[tuple[object, ...], Tensor] = {}
    for name, tensor in tensors:
        for plain in plain_tensors(tensor):
            storage = plain.untyped_storage()
            if plain.device.type == "cpu" and storage.resizable() and storage.is_shared():  # it would not grow again
                raise RuntimeError(
                    f"{name} lies in memory that is shared with other processes, and giving it back would part it from "
                    "theirs; offload another part, or do not share the model's tensors"
                )
            if storage.resizable() or plain.device.type == "meta":
                continue
            if plain is not tensor:
                raise RuntimeError(
                    f"{name} lies in memory that cannot be given back (mapped from a file, or of another library), "
                    f"inside of a {type(tensor).__name__}; load the model into memory of its own"
                )
            place = (storage.data_ptr(), plain.storage_offset(), plain.shape, plain.stride(), plain.dtype)
            if place not in own:
                own[place] = plain.detach().clone()
            plain.data = own[place]


# ---- What takes the place of offloaded weights.


def put_placeholders(model: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Put a parameter on the meta device in the place of every parameter of `model`; return what was where.

    Memory without bytes would be read all the same, and crash the process instead of raising an error. Whoever walks
    the module (a refit, a checkpoint) finds tensors of the right names, shapes and dtypes without values.
    """
    replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
    placeholders: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():  # noqa: SLF001 - setattr would run wrappers' own code
            if parameter is None:
                continue
            replaced.append((module, name, parameter))
            if id(parameter) not in placeholders:
                shape = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                placeholder: Any = nn.Parameter(shape, requires_grad=False)
                placeholder.offloaded_parameter = parameter
                placeholders[id(parameter)] = placeholder
            module._parameters[name] = placeholders[id(parameter)]  # noqa: SLF001 - as FSDP2 does
    return replaced


def refuse_model(model: nn.Module, refuse: Callable[[str], None]) -> list[RemovableHandle]:
    """Call `refuse` before every forward and state dict of `model`."""

    def forward(module: nn.Module, *_: Any) -> None:
        refuse(f"the forward of {type(module).__name__}")

    def state_dict(module: nn.Module, *_: Any) -> None:
        refuse(f"state_dict of {type(module).__name__}")

    return [
        model.register_state_dict_pre_hook(state_dict),  # type: ignore[no-untyped-call]
        *(
            module.register_forward_pre_hook(forward, prepend=True)  # before FSDP2's, which gathers
            for module in model.modules()
            if module is model or next(module.parameters(recurse=False), None) is not None
        ),
    ]


# ---- Where bytes go that leave a device: host memory that is used again, or files in a folder of this process alone.
# They are given and taken as contiguous uint8 tensors of one dim on any device.

# A power of two, since torch rounds pinned memory up to one; what is packed into such chunks wastes one at most.
CHUNK_BYTES = 64 * 2**20


class Store(ABC):
    """Keeps one sequence of bytes at a time."""

    host_bytes = 0
    """Host memory that it holds."""

    def put(self, pieces: Sequence[Tensor]) -> None:
        """Copy `pieces`, one after the other, into room for all of them."""
        for part, place in self._places(pieces, new=True):
            place.copy_(part, non_blocking=place.is_pinned())

    def get(self, into: Sequence[Tensor]) -> None:
        """Copy back."""
        for part, place in self._places(into, new=False):
            part.copy_(place, non_blocking=place.is_pinned())

    @abstractmethod
    def clear(self) -> None:
        """The bytes are not wanted any more."""

    @abstractmethod
    def _room(self, num_bytes: int, *, new: bool) -> Sequence[Tensor]:
        """Room for so many bytes, in one chunk or several alike; `new`, or what was written to."""

    def _places(self, pieces: Sequence[Tensor], *, new: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Each part of a piece, and where it lies here."""
        chunks, at = self._room(sum(piece.numel() for piece in pieces), new=new), 0
        for piece in pieces:
            done = 0
            while done < piece.numel():
                chunk, offset = divmod(at, chunks[0].numel())
                size = min(piece.numel() - done, chunks[0].numel() - offset)
                yield piece[done : done + size], chunks[chunk][offset : offset + size]
                done, at = done + size, at + size


class HostStore(Store):
    """Chunks of host memory that are kept for the next time."""

    def __init__(self, *, pinned: bool, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._pinned, self._chunk_bytes = pinned, chunk_bytes
        self._chunks: list[Tensor] = []

    def clear(self) -> None:
        """Nothing: the next bytes overwrite these."""

    def _room(self, num_bytes: int, *, new: bool) -> list[Tensor]:
        del new
        while self.host_bytes < num_bytes:
            self._chunks.append(torch.empty(self._chunk_bytes, dtype=torch.uint8, pin_memory=self._pinned))
            self.host_bytes += self._chunk_bytes
        return self._chunks


class DiskStore(Store):
    """A file in a new folder that only this user can read, and that goes by `clear`, with the store, or the process.

    A process that is killed leaves the folder: its name begins with `rl-backends-offload-`.

    directory: where the folder is made; on a disk, since files in a file system of memory free none.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._delete: weakref.finalize[[str], DiskStore] | None = None
        self._file = Path()

    def clear(self) -> None:
        """Delete the folder."""
        if self._delete is not None:
            self._delete()
        self._delete = None

    def _room(self, num_bytes: int, *, new: bool) -> list[Tensor]:
        if new:
            folder = tempfile.mkdtemp(prefix="rl-backends-offload-", dir=self._directory)
            self._delete = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            self._file = Path(folder) / "bytes"
            try:  # a full disk is an error here; who writes to mapped memory, it kills
                with self._file.open("wb") as file:
                    os.posix_fallocate(file.fileno(), 0, num_bytes)
            except OSError as error:
                raise OSError(f"{self._file} could not be written: {error}") from error
        if (size := self._file.stat().st_size) != num_bytes:
            raise RuntimeError(f"{self._file} is not what was written to it: {size} of {num_bytes} bytes are there")
        return [torch.from_file(str(self._file), shared=True, size=num_bytes, dtype=torch.uint8)]
