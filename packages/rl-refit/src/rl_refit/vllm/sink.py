"""A real vLLM engine as the sink of weights: the old ones serve until all of the new ones have arrived.

Lives in the process that made the engine. New weights are staged whole in shared memory, beside an engine that goes on
generating; a commit pauses it, and has every worker load from that memory what its shard needs.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from rl_refit.contracts import Coverage
from rl_refit.digest import Digest
from rl_refit.errors import DigestError, PoisonedError, RefitError
from rl_refit.layout import Region
from rl_refit.manifest import Manifest
from rl_refit.sink import CommittedVersion
from rl_refit.vllm.bank import Bank, identity_of
from rl_refit.vllm.engines import Answer, Pause, engine_of
from rl_refit.vllm.needs import DERIVED, Needs, NeedsConfig, needs_of, rows_of

__all__ = ["WORKER_EXTENSION", "VllmSink"]

WORKER_EXTENSION = "rl_refit.vllm.worker.RefitWorker"
"""What vLLM's `worker_extension_cls` must be, or inherit."""


@dataclass(slots=True)
class _Transaction:
    """What an open transaction knows."""

    missing: dict[str, int]
    """Elements still to be staged."""
    digests: dict[str, str] = field(default_factory=dict)
    """Of tensors that were digested whole since they were staged."""


@final
class VllmSink:
    """The weights of a vLLM engine, tensor parallel or not. A `WeightSink` of one rank.

    Costs the weights once more in shared memory of the host, whatever the number of workers. One thread at a time. The
    first `prepare` for a source takes the engine's attention for as long as its model class takes to construct without
    memory; later ones, and staging, none. Whoever generates asks `check` first: an engine of rl-generation does when it
    is made with `ready=sink.check`.

    Args:
        engine: A `vllm.LLM` or an `AsyncLLM`, made with `worker_extension_cls=WORKER_EXTENSION`; its workers are
            processes of this host.
        pause: What becomes of requests that are unfinished at a commit. An `LLM` refuses the commit ("refuse", the
            default) or waits for another thread to finish them ("wait"); an `AsyncLLM` waits for them ("wait", the
            default), freezes them to go on with the new weights ("keep"), or aborts them ("abort").
        loop: The event loop that runs an `AsyncLLM`; found where the sink is made in it, or the engine has generated.
        derived: Patterns, as of `fnmatch`, of source tensors that the engine computes itself.
        constant: Patterns of engine tensors, by vLLM's names, that need no feeding.
        cast: Whether the engine may keep a tensor in another dtype than the source's; nothing is cast otherwise.
        timeout_s: Seconds that one call of the engine may take.
        directory: Where shared memory is made; a file system in memory.

    Raises:
        RefitError: The engine was made without the worker extension, or spans several data-parallel replicas.
        ValueError: `pause` is not for this kind of engine, or no loop was found.
    """

    def __init__(
        self,
        engine: Any,
        *,
        pause: Pause | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        derived: Sequence[str] = DERIVED,
        constant: Sequence[str] = (),
        cast: bool = False,
        timeout_s: float = 600.0,
        directory: str = "/dev/shm",  # noqa: S108  (the file has no name)
    ) -> None:
        self._engine = engine_of(engine, loop=loop, pause=pause, timeout_s=timeout_s)
        self._config = NeedsConfig(derived=tuple(derived), constant=tuple(constant), cast=cast)
        self._directory = directory
        self._needs: tuple[str, Needs] | None = None
        self._bank: Bank | None = None
        self._identity: tuple[int, int, int] = (0, 0, 0)
        self._open: _Transaction | None = None
        self._version = CommittedVersion()
        self._poison: str | None = None

    @property
    def device(self) -> torch.device:
        """Where tensors are staged: the host's memory."""
        return torch.device("cpu")

    @property
    def version(self) -> int | None:
        """The version last committed; None before the first. Says nothing about a poisoned sink."""
        return self._version.value

    @property
    def poisoned(self) -> bool:
        """Whether the engine's weights may be torn: a commit failed half-way, and none has succeeded since."""
        return self._poison is not None

    @property
    def unreadable(self) -> Mapping[str, str]:
        """The fed tensors that cannot be read back after a commit, with the reason; empty before `prepare`."""
        return {} if self._needs is None else self._needs[1].unreadable

    def check(self) -> None:
        """Pass if the weights are whole: what calls the engine asks this before it generates.

        Raises:
            PoisonedError: They may be torn.
        """
        if self._poison is not None:
            raise PoisonedError(
                f"{self._poison}, so the engine's weights may be part old and part new; refit successfully before it "
                f"generates",
                phase="commit",
            )

    def poison(self, reason: str) -> None:
        """Refuse to be used until a refit succeeds: for whoever knows that this engine is not what its peers are.

        A version that was committed just before does not count any more, so that the same can be refitted again.
        """
        self._poison = reason
        self._version.withdraw()

    def repeat(self) -> None:
        """Take the version that was just committed once more: others did not come through with it."""
        self._version.repeat()

    def explain(self) -> str:
        """What was proved of the engine at the last `prepare`: fed, tied, computed, padded, constant, not read back.

        Raises:
            RefitError: There was none.
        """
        if self._needs is None:
            raise RefitError("nothing is known before prepare, which asks the engine what it needs of a source")
        return self._needs[1].text

    def prepare(self, manifest: Manifest) -> Coverage:
        """Open a transaction; the first time for a source, survey the engine and allocate the bank.

        Raises:
            RefitError: A transaction is open already, a worker failed, or shared memory is too small.
            CoverageError: The engine needs what the source does not have, or has no place for what it has.
        """
        if self._open is not None:
            raise RefitError("this sink is in a transaction already; commit or abort it first", phase="prepare")
        if self._needs is None or self._needs[0] != manifest.hash():
            self._needs = (manifest.hash(), self._survey(manifest))
        sink = self._needs[1].manifest
        bank = self._bank_for(sink)
        missing = {name: tensor.numel() for name, tensor in bank.tensors.items()}
        self._open = _Transaction(missing)
        return Coverage(manifest_hash=manifest.hash(), sink=sink, version=self._version.begin())

    def stage(self, region: Region, tensor: Tensor, *, stays: bool = False) -> None:
        """Copy `tensor`, the new values of `region`, into shared memory.

        Raises:
            RefitError: No transaction is open, the engine needs no such box, or `tensor` is of another dtype or shape.
        """
        transaction, bank = self._transaction("stage")
        view = bank.view(region)
        if view is None or view.shape != tensor.shape or view.dtype != tensor.dtype:
            known = bank.tensors.get(region.name)
            has = "no such tensor" if known is None else f"{list(known.shape)} in {known.dtype}"
            raise RefitError(
                f"cannot stage {list(tensor.shape)} in {tensor.dtype} as {region}: the sink has {has}",
                phase="transfer",
                tensor=region.name,
            )
        with torch.no_grad():
            view.copy_(tensor)
        transaction.missing[region.name] -= region.numel
        transaction.digests.pop(region.name, None)

    def digest(self, regions: Iterable[Region] | None = None) -> Digest:
        """Of the staged boxes while a transaction is open; otherwise of what the engine's own tensors hold of them.

        What the engine has packed, cut over workers or rearranged is left out: `unreadable` says what and why. Where
        workers hold copies that differ, the digest is none.

        Raises:
            PoisonedError: No transaction is open, and the weights may be torn.
            RefitError: A worker failed.
        """
        if self._open is None:
            self.check()
            return self._resident(None if regions is None else list(regions))
        transaction, bank = self._transaction("digest")
        asked = bank.whole if regions is None else tuple(regions)
        digest = bank.digest(asked)
        whole = set(bank.whole)
        transaction.digests |= {box.name: digest.tensors[box.name] for box in asked if box in whole}
        return digest

    def commit(self, version: int) -> None:
        """Pause the engine, have every worker load the bank, drop what was cached, and go on generating.

        Raises:
            RefitError: Nothing was touched: no transaction is open, `version` is not newer than the committed one, some
                tensor was not staged exactly once, or requests are unfinished. Otherwise the sink is poisoned.
            DigestError: Nothing was touched: a worker does not read what was verified.
        """
        transaction, bank = self._transaction("commit")
        self._check_complete(transaction, version)
        rest = bank.digest(box for box in bank.whole if box.name not in transaction.digests)
        self._apply(Digest({**transaction.digests, **rest.tensors}), version)
        self._open = None

    def abort(self) -> None:
        """Close the transaction; the engine keeps what it has, and the bank is kept for the next one."""
        self._open = None

    def close(self) -> None:
        """Let go of the shared memory; the workers keep theirs until they end, or another sink attaches."""
        self._open, self._bank, self._needs = None, None, None

    # -- The engine's side ---------------------------------------------------------------------------------------

    def _survey(self, source: Manifest) -> Needs:
        """First without tied tensors; with them where that leaves something of the engine unwritten."""
        tied = any(meta.tied_to for meta in source.tensors)
        for ties in (False, True):
            rows = rows_of(source, self._config, ties=ties)
            answers = self._call("rl_refit_survey", rows)
            if not (tied and any(answer["never"] or answer["partial"] for answer in answers)):
                break
        return needs_of(source, rows, answers=answers, config=self._config)

    def _bank_for(self, sink: Manifest) -> Bank:
        metas = [meta for meta in sink.tensors if meta.travels]
        wanted = [(meta.name, meta.dtype, meta.shape) for meta in metas]
        if self._bank is not None and [row[:3] for row in self._bank.table] == wanted:
            return self._bank
        self._bank = None
        bank, descriptor = Bank.create(metas, self._directory)
        try:
            self._identity = identity_of(descriptor)
            self._call("rl_refit_attach", f"/proc/{os.getpid()}/fd/{descriptor}", self._identity, bank.table)
        finally:
            os.close(descriptor)
        self._bank = bank
        return bank

    def _apply(self, expected: Digest, version: int) -> None:
        self._engine.pause()
        try:
            answers = self._engine.call("rl_refit_apply", self._identity, expected.hex)
            refusal = _refusal(answers, expected)
            if refusal is None:
                _raise_errors(answers, phase="commit")
                self._engine.renew(str(version))
        except BaseException as error:
            self._poison = f"the commit of version {version} failed with {type(error).__name__}: {error}"
            self._go_on_poisoned(error)
            raise
        self._engine.resume()
        if refusal is not None:
            raise refusal
        self._version.commit(version)
        self._poison = None

    def _go_on_poisoned(self, cause: BaseException) -> None:
        """What was under way must not go on with torn weights; what is new is refused by whoever asks `check`."""
        try:
            self._engine.drop_requests()
            self._engine.resume()
        except Exception as error:  # noqa: BLE001  (the cause is what the caller must see)
            cause.add_note(f"nor could the engine abort its requests and resume: {type(error).__name__}: {error}")

    def _resident(self, regions: Sequence[Region] | None) -> Digest:
        whole = None if self._bank is None else list(self._bank.whole)
        boxes = None if regions in (None, whole) else [(box.name, box.offsets, box.shape) for box in regions or ()]
        said: dict[str, set[str]] = {}
        for answer in self._call("rl_refit_read", boxes):
            for name, value in answer["tensors"].items():
                said.setdefault(name, set()).add(value)
        return Digest({name: " or ".join(sorted(values)) for name, values in said.items()})

    def _call(self, method: str, *args: object) -> list[Answer]:
        answers = self._engine.call(method, *args)
        _raise_errors(answers, phase="prepare")
        return answers

    # -- The transaction -----------------------------------------------------------------------------------------

    def _transaction(self, action: str) -> tuple[_Transaction, Bank]:
        if self._open is None or self._bank is None:
            raise RefitError(f"cannot {action}: no transaction is open; prepare comes first")
        return self._open, self._bank

    def _check_complete(self, transaction: _Transaction, version: int) -> None:
        incomplete = [f"{name} ({missing:+,} elements)" for name, missing in transaction.missing.items() if missing]
        if incomplete:
            raise RefitError(f"not staged exactly once, still missing: {', '.join(incomplete)}", phase="commit")
        self._version.require_newer(version)


def _refusal(answers: Sequence[Answer], expected: Digest) -> RefitError | None:
    """Why no worker touched its engine, where that is so."""
    if any(answer.get("state") != "refused" for answer in answers):
        return None
    for answer in answers:
        if "error" in answer:
            return RefitError(f"worker {answer['rank']}: {answer['error']}; make a new sink", phase="commit")
    given = [Digest(answer["tensors"]) for answer in answers]
    differing = tuple(dict.fromkeys(name for digest in given for name in expected.differing(digest)))
    return DigestError(
        f"workers do not read what was verified, and loaded nothing: {', '.join(differing)}", tensors=differing
    )


def _raise_errors(answers: Sequence[Answer], *, phase: str) -> None:
    failed = [answer for answer in answers if "error" in answer]
    if failed:
        error = RefitError("; ".join(f"worker {each['rank']}: {each['error']}" for each in failed), phase=phase)
        error.add_note(failed[0].get("traceback", ""))
        raise error
