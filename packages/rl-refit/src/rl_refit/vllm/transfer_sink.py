"""A vLLM engine that is reached by vLLM's own weight transfer, such as a server on other machines, as a sink.

The new weights are staged in this process and verified there; only when all parties have decided to commit is vLLM's
trainer engine given them. What it does then is vLLM's: it writes into the engine's weights, and cannot go back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, final

import torch

from rl_refit.digest import Digest
from rl_refit.errors import RefitError
from rl_refit.layout import Region
from rl_refit.source import StateDictSource
from rl_refit.staged import StagedSink, empty_like
from rl_refit.vllm.weight_transfer import SourceForVllm, UpdateCheck

__all__ = ["TransferSink"]


@final
class TransferSink(StagedSink):
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
        super().__init__(
            {name: tensor.to(device) for name, tensor in empty_like(Path(like)).items()}, engine="the engine"
        )
        self._source = SourceForVllm(StateDictSource(self._fresh), derived=())
        self._check = None if engine is None else UpdateCheck(engine, self._source)
        self._client, self._make, self._paused = _Client(client), trainer, paused
        self._trainer: Any = None

    def _digest_engine(self, regions: Sequence[Region]) -> Digest:
        """Of what was handed over and all workers were just found to hold; raises where they hold something else."""
        if self._check is None:
            return super()._digest_engine(regions)
        self._check()
        return self._digest_staged([region for region in regions if region.name not in self._check.unreadable])

    def _prepare_to_hand_over(self, version: int) -> None:
        if self._trainer is None:  # vLLM's two sides meet
            self._trainer = self._make(self._client, self._source)

    def _hand_over(self, version: int) -> None:
        """Have vLLM's trainer engine send what is staged, while the engine is paused."""
        self._client.label, self._client.finished = str(version), False
        try:
            with self._paused():
                self._trainer.send_weights()
                if not self._client.finished:
                    raise RefitError("vLLM's trainer engine has not called finish_weight_update", phase="commit")  # noqa: TRY301
                self._source.digest()  # raises where it has not taken all
        except BaseException:
            self._trainer = None
            if self._client.under_way:  # vLLM 0.32 cannot give an update up: layers fill up with the next one's
                self._lost = (
                    "vLLM would bring what it had received of that into the next update: start the engine anew, and "
                    "make a new TransferSink"
                )
            raise


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
