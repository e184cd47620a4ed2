"""A vLLM engine that is reached by vLLM's own weight transfer, such as a server on other machines, as a sink.

    info = NCCLTrainerInitInfo(rank=0, …)
    sink = TransferSink(
        HTTPVLLMWeightSyncClient("http://engine:8000"),
        lambda client, source: WeightTransferTrainerFactory.trainer_init(info, client=client, source=source),
        like="Qwen3-8B", paused=paused, device="cuda",
    )
    Refit(ModuleSource(policy), sink)(version=step)

The new weights are staged in this process and verified there; only when all parties have decided to commit is vLLM's
trainer engine given them. What it does then is vLLM's: it writes into the engine's weights, and cannot go back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, final

import torch

from rl_refit.contracts import Coverage
from rl_refit.digest import Digest, digest_regions
from rl_refit.errors import PoisonedError, RefitError
from rl_refit.layout import Region
from rl_refit.manifest import Manifest
from rl_refit.sglang import empty_like
from rl_refit.sink import ModuleSink, VersionedSink
from rl_refit.source import NamedTensors, StateDictSource
from rl_refit.vllm.weight_transfer import SourceForVllm, UpdateCheck

__all__ = ["TransferSink"]


@final
class TransferSink(VersionedSink):
    """The weights of what a client of vLLM's weight transfer reaches. A `WeightSink` of one rank.

    Args:
        client: With vLLM's four calls, `VLLMWeightSyncClient`. A commit finishes with its version as `weight_version`.
        trainer: Makes vLLM's trainer engine from the client and the source that it is given; called before the first
            commit is decided, so that no weights change where the two sides do not meet.
        like: The checkpoint folder that the engine was started with: every refit brings the tensors of its files.
        paused: Makes the context in which a commit runs: it keeps the engine from generating, which vLLM's four calls
            do not, and forgets its prefix cache before it goes on. It sees the exception of a commit that fails.
        device: Where weights are staged, a whole copy: a GPU for the engines of NCCL and IPC.
        engine: The `LLM` or `AsyncLLM` that is updated, where it is of this process and was made with
            `worker_extension_cls=WORKER_EXTENSION`: an `UpdateCheck` proves its coverage now, and compares what it
            holds after every commit. Without, nothing can be read back, and `report.unreadable` names every tensor.

    Raises:
        RefitError: `like` is no checkpoint of safetensors files.
        CoverageError: `engine` needs other tensors than `like` has.
    """

    def __init__(
        self,
        client: Any,
        trainer: Callable[[Any, SourceForVllm], Any],
        *,
        like: Path | str,
        paused: Callable[[], AbstractContextManager[object]],
        device: torch.device | str = "cpu",
        engine: Any = None,
    ) -> None:
        self._fresh = {name: tensor.to(device) for name, tensor in empty_like(Path(like)).items()}
        # Nobody generates from this copy, so it is written in place.
        self._stage = ModuleSink(NamedTensors(self._fresh), mode="in_place")
        self._source = SourceForVllm(StateDictSource(self._fresh), derived=())
        self._check = None if engine is None else UpdateCheck(engine, self._source)
        self._client, self._make = _Client(client), trainer
        self._trainer: Any = None
        self._paused, self.device = paused, torch.device(device)
        super().__init__()
        self._torn = self._open = False

    def check(self) -> None:
        """Pass if the last commit succeeded. The four calls ask an engine nothing: one started anew is not found out.

        Raises:
            PoisonedError: It failed.
        """
        if self._poison is not None:
            raise PoisonedError(f"{self._poison}; refit successfully before using the engine", phase="commit")

    def prepare(self, manifest: Manifest) -> Coverage:
        """Open a transaction.

        Raises:
            RefitError: One is open already.
            PoisonedError: An update broke off in the engine. vLLM 0.32 cannot give one up: layers keep what they had
                received of it, and fill up with the next update's.
        """
        if self._torn:
            raise PoisonedError(
                f"{self._poison}; vLLM would bring what it had received of that into the next update: start the engine "
                f"anew, and make a new TransferSink",
                phase="prepare",
            )
        if self._open:
            raise RefitError("this sink is in a transaction already; commit or abort it first", phase="prepare")
        coverage = self._stage.prepare(manifest)
        self._open = True
        return Coverage(manifest_hash=coverage.manifest_hash, sink=coverage.sink, version=self._version.begin())

    def stage(self, region: Region, tensor: torch.Tensor, *, stays: bool = False) -> None:
        """Take a copy of `tensor`, the new values of `region`."""
        self._stage.stage(region, tensor)

    def digest(self, regions: Iterable[Region] | None = None) -> Digest:
        """Of what is staged; after a commit, of what was handed over and all workers were just found to hold.

        Raises:
            DigestError: Workers hold something else.
        """
        if self._open:
            return self._stage.digest(regions)
        self.check()
        whole = (Region(name, (0,) * each.ndim, tuple(each.shape)) for name, each in self._fresh.items())
        asked = tuple(whole if regions is None else regions)
        if self._check is None:
            return digest_regions(asked, lambda _: None)
        self._check()
        unreadable = self._check.unreadable
        return self._stage.digest(region for region in asked if region.name not in unreadable)

    def ready(self, version: int) -> None:
        """Pass if all is staged, and vLLM's two sides have met.

        Raises:
            RefitError: As for `ModuleSink.ready`.
        """
        if not self._open:
            raise RefitError("cannot commit: no transaction is open; prepare comes first")
        self._version.require_newer(version)
        self._stage.ready(self._stage_version())
        if self._trainer is None:
            self._trainer = self._make(self._client, self._source)

    def commit(self, version: int) -> None:
        """Have vLLM's trainer engine send what is staged, while the engine is paused.

        Raises:
            RefitError: It left out tensors, or did not finish. After that, or any error of its own, the sink is
                poisoned; for good where an update had begun and did not end, see `prepare`.
        """
        self.ready(version)
        try:
            self._hand_over(version)
        except BaseException as error:
            self._poison = f"the commit of version {version} failed with {type(error).__name__}: {error}"
            self._trainer, self._torn = None, self._client.under_way
            raise
        self._stage.commit(self._stage_version())
        self._version.commit(version)
        self._open, self._poison = False, None

    def _hand_over(self, version: int) -> None:
        self._client.label, self._client.finished = str(version), False
        with self._paused():
            self._trainer.send_weights()
            if not self._client.finished:
                raise RefitError("vLLM's trainer engine has not called finish_weight_update", phase="commit")
            self._source.digest()  # raises where it has not taken all

    def abort(self) -> None:
        """Forget what was staged. The engine goes on with what it has."""
        self._stage.abort()
        self._open = False

    def _stage_version(self) -> int:
        """The stage counts by itself: a version that is repeated is new to it."""
        return (self._stage.version or 0) + 1


@final
class _Client:
    """The client as vLLM's trainer engines see it. They finish without a version; this adds it."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.label, self.finished, self.under_way = "", False, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def start_weight_update(self) -> None:
        self.under_way = True
        self._client.start_weight_update()

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._client.finish_weight_update(self.label)
        self.finished, self.under_way = True, False
