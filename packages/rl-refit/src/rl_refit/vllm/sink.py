"""A real vLLM engine as the sink of weights: the old ones serve until all of the new ones have arrived.

`VllmSink` is of the process that made the engine. It carries no weights: each worker is a rank of the sink of its own,
see `rl_refit.vllm.worker`. It tells the workers what the engine needs of a source, and pauses it for a commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, final

from rl_refit.engine import EngineSink
from rl_refit.errors import RefitError
from rl_refit.manifest import Manifest
from rl_refit.vllm.engines import Pause, engine_of
from rl_refit.vllm.needs import DERIVED, NeedsConfig, explain_needs, prove_needs, rows_of

__all__ = ["WORKER_EXTENSION", "VllmSink"]

WORKER_EXTENSION = "rl_refit.vllm.worker.RefitWorker"
"""What vLLM's `worker_extension_cls` must be, or inherit."""


@final
class VllmSink(EngineSink):
    """The weights of a vLLM engine, tensor parallel or not; each of its workers is a rank of the sink.

    A worker stages the boxes that its own parameters hold, on its own device: tensor parallelism divides the bytes. The
    first refit from a source takes the engine's attention for as long as its model class takes to construct without
    memory; later ones, and what comes before a commit, none. One thread at a time. Whoever generates asks `check`
    first: an engine of rl-generation does when it is made with `ready=sink.check`.

    Args:
        engine: A `vllm.LLM` or an `AsyncLLM`, made with `worker_extension_cls=WORKER_EXTENSION`.
        pause: What becomes of requests that are unfinished at a commit. An `LLM` refuses the commit ("refuse", the
            default) or waits for another thread to finish them ("wait"); an `AsyncLLM` waits for them ("wait", the
            default), freezes them to go on with the new weights ("keep"), or aborts them ("abort").
        loop: The event loop that runs an `AsyncLLM`; found where the sink is made in it, or the engine has generated.
        derived: Patterns, as of `fnmatch`, of source tensors that the engine computes itself.
        constant: Patterns of engine tensors, by vLLM's names, that need no feeding.
        cast: Whether the engine may keep a tensor in another dtype than the source's; nothing is cast otherwise.
        timeout_s: Seconds that one call of the engine may take.

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
    ) -> None:
        super().__init__(engine_of(engine, loop=loop, pause=pause, timeout_s=timeout_s), timeout_s=timeout_s)
        self._config = NeedsConfig(derived=tuple(derived), constant=tuple(constant), cast=cast)
        self._text: str | None = None
        self._unreadable: dict[str, str] = {}

    @property
    def unreadable(self) -> Mapping[str, str]:
        """The fed tensors that some worker cannot read back after a commit, with the reason; empty before a refit."""
        return self._unreadable

    def explain(self) -> str:
        """What was proved of the engine at the last survey: fed, tied, computed, padded, constant, not read back.

        Raises:
            RefitError: There was none.
        """
        if self._text is None:
            raise RefitError("nothing is known before the first refit, which asks the engine what it needs of a source")
        return self._text

    def survey(self) -> None:
        """First without tied tensors; with them where that leaves something of the engine unwritten."""
        config = asdict(self._config)
        (text,) = (answer["manifest"] for answer in self.call("rl_refit_source") if answer["manifest"])
        source = Manifest.from_json(text)
        tied = any(meta.tied_to for meta in source.tensors)
        for ties in (False, True):
            answers = self.call("rl_refit_survey", config, ties)
            if not (tied and any(answer["never"] or answer["partial"] for answer in answers if not answer["refused"])):
                break
        rows = rows_of(source, self._config, ties=ties)
        fed = prove_needs(source, rows, answers=answers, config=self._config)
        settled = self.call("rl_refit_settle", config, fed)
        self._unreadable = {name: why for room in settled for name, why in room["unreadable"].items()}
        self._text = explain_needs(source, fed, answers=answers, settled=settled, config=self._config)
