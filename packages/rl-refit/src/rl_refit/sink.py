"""An `nn.Module` as the sink of weights: the old ones serve until all of the new ones have arrived.

Knows nothing of the source. New weights are staged in a second bank of the same bytes; `commit` copies the bank into
the module's own tensors, which keep their identity and their addresses, so that ties, captured graphs and whoever else
refers to them see the new values.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from rl_refit.contracts import Coverage
from rl_refit.digest import Digest, digest_tensor
from rl_refit.errors import PoisonedError, RefitError
from rl_refit.layout import Region
from rl_refit.manifest import Manifest
from rl_refit.module_tensors import read_module

__all__ = ["ModuleSink"]


@dataclass(frozen=True, slots=True)
class _Transaction:
    """What an open transaction knows, of the tensors that are not tied to another."""

    live: dict[str, Tensor]
    """The module's own memory."""

    missing: dict[str, int]
    """Elements still to be staged."""


@final
class ModuleSink:
    """Every parameter and every buffer of `module`, persistent or not. A `WeightSink`.

    Costs one more copy of the weights, from the first `prepare` on. One thread at a time, and none may run the module
    while `commit` copies.

    Args:
        module: The engine's own model, which nothing else trains.
        on_commit: Called with the version at the end of every commit, when the module has the new weights: to tell an
            engine its version, or to drop its caches. If it raises, the sink is poisoned.
    """

    def __init__(self, module: nn.Module, *, on_commit: Callable[[int], object] | None = None) -> None:
        self._module = module
        self._on_commit = on_commit
        self._manifest: Manifest | None = None
        self._bank: dict[str, Tensor] = {}
        self._open: _Transaction | None = None
        self._version: int | None = None
        self._poison: str | None = None

    @property
    def version(self) -> int | None:
        """The version last committed; None before the first. Says nothing about a poisoned sink."""
        return self._version

    @property
    def poisoned(self) -> bool:
        """Whether a commit failed half-way, and none has succeeded since."""
        return self._poison is not None

    def check(self) -> None:
        """Pass if the weights are whole: what an engine calls before it generates.

        Raises:
            PoisonedError: They may be torn.
        """
        if self._poison is not None:
            raise PoisonedError(
                f"the commit of {self._poison}, so the weights may be part old and part new; "
                f"refit successfully before using them",
                phase="commit",
            )

    def manifest(self) -> Manifest:
        """What the module holds now.

        Raises:
            RefitError: As for `ModuleSource.manifest`.
        """
        self._manifest = read_module(self._module).manifest(self._manifest)
        return self._manifest

    def prepare(self, manifest: Manifest) -> Coverage:
        """Open a transaction; the first time, allocate the bank. Allowed, and needed, when the sink is poisoned.

        Raises:
            RefitError: A transaction is open already, or a tensor of the module cannot be written in place.
        """
        if self._open is not None:
            raise RefitError("this sink is in a transaction already; commit or abort it first", phase="prepare")
        tensors = read_module(self._module)
        self._manifest = tensors.manifest(self._manifest)
        live = {meta.name: tensors.local[meta.name] for meta in tensors.metas if meta.tied_to is None}
        _check_writable(live)
        self._allocate(live)
        self._open = _Transaction(live, {name: tensor.numel() for name, tensor in live.items()})
        return Coverage(manifest_hash=manifest.hash(), sink=self._manifest, version=self._version)

    def stage(self, region: Region, tensor: Tensor) -> None:
        """Copy `tensor` into the bank at `region`.

        Raises:
            RefitError: No transaction is open, the sink has no such tensor, or it is of another dtype or shape.
        """
        missing = self._transaction("stage").missing
        if region.name not in missing:
            raise RefitError(
                f"cannot stage {region}: the sink has no such tensor", phase="transfer", tensor=region.name
            )
        bank = self._bank[region.name]
        place = _place(bank, region)
        if place is None or place.shape != tensor.shape or place.dtype != tensor.dtype:
            raise RefitError(
                f"cannot stage {list(tensor.shape)} in {tensor.dtype} as {region}: "
                f"the sink has {list(bank.shape)} in {bank.dtype}",
                phase="transfer",
                tensor=region.name,
            )
        place.copy_(tensor)
        missing[region.name] -= region.numel

    def digest(self) -> Digest:
        """Of each tensor in the bank while a transaction is open; of the module's own otherwise.

        Raises:
            PoisonedError: No transaction is open, and the weights may be torn.
        """
        if self._open is not None:
            return Digest({name: digest_tensor(self._bank[name]) for name in self._open.live})
        self.check()
        tensors = read_module(self._module)
        names = [meta.name for meta in tensors.metas if meta.tied_to is None]
        return Digest({name: digest_tensor(tensors.local[name]) for name in names})

    def commit(self, version: int) -> None:
        """Copy the bank into the module in place, then call `on_commit(version)`.

        Raises:
            RefitError: Nothing was touched: no transaction is open, `version` is not newer than the committed one, or
                some tensor was not staged exactly once.
        """
        transaction = self._transaction("commit")
        incomplete = [f"{name} ({missing:+,} elements)" for name, missing in transaction.missing.items() if missing]
        if incomplete:
            raise RefitError(f"not staged exactly once, still missing: {', '.join(incomplete)}", phase="commit")
        if self._version is not None and version <= self._version:
            raise RefitError(
                f"version {version} is not newer than the committed {self._version}; a version counts optimizer steps",
                phase="commit",
            )
        try:
            with torch.no_grad():
                for name, tensor in transaction.live.items():
                    _overwrite(tensor, self._bank[name])
            if self._on_commit is not None:
                self._on_commit(version)
            self._version, self._poison, self._open = version, None, None
        except BaseException as error:
            self._poison = f"version {version} failed with {type(error).__name__}: {error}"
            raise

    def abort(self) -> None:
        """Close the transaction; the module keeps what it has, and the bank is kept for the next one."""
        self._open = None

    def _transaction(self, action: str) -> _Transaction:
        if self._open is None:
            raise RefitError(f"cannot {action}: no transaction is open; prepare comes first")
        return self._open

    def _allocate(self, live: dict[str, Tensor]) -> None:
        for name, tensor in live.items():
            bank = self._bank.get(name)
            if bank is None or (bank.shape, bank.dtype, bank.device) != (tensor.shape, tensor.dtype, tensor.device):
                self._bank[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _overwrite(tensor: Tensor, staged: Tensor) -> None:
    tensor.copy_(staged)


def _place(bank: Tensor, region: Region) -> Tensor | None:
    """The part of `bank` that is `region`; None where it is not all inside."""
    if len(region.shape) != bank.dim():
        return None
    place = bank[region.index_within(Region(region.name, (0,) * bank.dim(), tuple(bank.shape)))]
    return place if place.shape == region.shape else None


def _check_writable(tensors: dict[str, Tensor]) -> None:
    """Refuse now what would fail, or overwrite another tensor, in the middle of a commit."""
    extents: dict[int, list[tuple[int, int, str]]] = {}
    for name, tensor in tensors.items():
        if tensor.is_inference():
            raise RefitError(
                f"{name!r} was made under torch.inference_mode, which forbids to overwrite it", tensor=name
            )
        if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            raise RefitError(f"{name!r} is expanded: several of its elements are one; make it contiguous", tensor=name)
        if tensor.numel():
            extents.setdefault(tensor.untyped_storage().data_ptr(), []).append((*_extent(tensor), name))
    for in_storage in extents.values():
        for (_, end, name), (start, _, other) in itertools.pairwise(sorted(in_storage)):
            if start < end:
                raise RefitError(f"{name!r} and {other!r} overlap in memory without being tied", tensor=other)


def _extent(tensor: Tensor) -> tuple[int, int]:
    """First byte, and the byte behind the last one, in the storage."""
    first, itemsize = int(tensor.storage_offset()), tensor.element_size()
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * itemsize, (last + 1) * itemsize
