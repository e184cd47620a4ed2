"""A real vLLM engine as the sink of weights: the old ones serve until all of the new ones have arrived.

`VllmSink` is of the process that made the engine, an `LLM` or an `AsyncLLM`, and sees both as the same few blocking
calls. It carries no weights: each worker is a rank of the sink of its own, and finds out what it needs of a source; see
`rl_refit.vllm.worker`.

Imports no vLLM: it is handed the engine.
"""

from __future__ import annotations

import asyncio
import pkgutil
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal, TypeVar, final

from rl_refit.engine import Answer, EngineSink
from rl_refit.errors import RefitError
from rl_refit.vllm.survey import DERIVED, NeedsConfig

__all__ = ["WORKER_EXTENSION", "Pause", "VllmEngine", "VllmSink", "ask_replicas", "call_async", "loop_of"]

WORKER_EXTENSION = "rl_refit.vllm.worker.RefitWorker"
"""What vLLM's `worker_extension_cls` must be, or inherit."""

T = TypeVar("T")

Pause = Literal["refuse", "wait", "keep", "abort"]
"""What becomes of unfinished requests at a commit: it is refused, waits for them, freezes them, or aborts them."""


@final
class VllmSink(EngineSink):
    """The weights of a vLLM engine; each of its workers, of all data-parallel replicas, is a rank of the sink.

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
        RefitError: The engine was made without the worker extension, or has data-parallel replicas that this process
            does not reach.
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
        vllm = VllmEngine(engine, loop=loop, pause=pause, timeout_s=timeout_s)
        declared = NeedsConfig(derived=tuple(derived), constant=tuple(constant), cast=cast)
        super().__init__(vllm, timeout_s=timeout_s, options=asdict(declared))
        self.unreadable: Mapping[str, str] = {}
        """The fed tensors that some worker cannot read back after a commit, with the reason; empty before a refit."""

    def surveyed(self, found: Sequence[Mapping[str, str]]) -> None:
        """Hear from the workers what they cannot read back."""
        self.unreadable = {name: why for unreadable in found for name, why in unreadable.items()}


@final
class VllmEngine:
    """A `vllm.LLM`, or an `AsyncLLM` that its event loop runs, from any other thread. An `Engine`.

    Raises:
        RefitError: It was made without the worker extension, or has data-parallel replicas out of this process's reach.
        ValueError: `pause` is not for this kind of engine, or there is no event loop to be found.
    """

    def __init__(
        self, engine: Any, *, loop: asyncio.AbstractEventLoop | None, pause: Pause | None, timeout_s: float
    ) -> None:
        from rl_refit.vllm.worker import RefitWorker

        self._engine, self._timeout_s = engine, timeout_s
        self._core = getattr(engine, "llm_engine", engine)
        parallel = self._core.vllm_config.parallel_config
        self._replicas: int = parallel.data_parallel_size
        self.num_ranks: int = parallel.world_size * self._replicas
        extension = parallel.worker_extension_cls
        if not extension or not issubclass(pkgutil.resolve_name(extension), RefitWorker):
            raise RefitError(
                f"the engine's workers know nothing of refits: its worker_extension_cls is {extension!r}; make it with "
                f"worker_extension_cls={WORKER_EXTENSION!r}, or a class that inherits it",
                phase="prepare",
            )
        reached = len(getattr(self._core.engine_core, "core_engines", ())) if self._core is engine else 1
        if self._replicas > 1 and reached != self._replicas:
            raise RefitError(
                f"the engine has data_parallel_size={self._replicas}, and this process reaches {reached} of its "
                f"replicas: let an AsyncLLM balance the load of all of them, or make one engine a replica, each with a "
                f"sink of its own",
                phase="prepare",
            )
        self._loop = loop or loop_of(engine) if self._core is engine else None
        """Of an `AsyncLLM`; the caller's thread runs an `LLM`."""
        self._pause: Pause = pause or ("refuse" if self._loop is None else "wait")
        if self._loop is None and self._pause not in ("refuse", "wait"):
            raise ValueError(
                f"an LLM can refuse a commit or wait for it while requests are unfinished; got pause={pause!r}"
            )
        if self._loop is not None and self._pause == "refuse":
            raise ValueError("an AsyncLLM is paused for a commit: pause is 'wait', 'keep' or 'abort'; got 'refuse'")

    def call(self, method: str, *args: object) -> list[Answer]:
        """As of `Engine`, like all below."""
        if self._replicas == 1:
            answers: list[Answer] = self._run(self._engine.collective_rpc(method, timeout=self._timeout_s, args=args))
            return answers
        each = self._run(ask_replicas(self._core, "collective_rpc", method, self._timeout_s, args, None))
        return [answer for of_replica in each for answer in of_replica]

    def ready(self) -> None:
        """An `AsyncLLM` can always be paused."""
        deadline = time.monotonic() + self._timeout_s
        while self._loop is None and self._core.has_unfinished_requests():
            if self._pause == "refuse":
                count = self._core.get_num_unfinished_requests()
                raise RefitError(
                    f"{count} requests are unfinished, and would go on with other weights than they began with; commit "
                    f"when they are done, or make the sink with pause='wait'",
                    phase="commit",
                )
            if time.monotonic() > deadline:
                raise RefitError(f"requests are still unfinished after timeout_s={self._timeout_s}", phase="commit")
            time.sleep(0.005)

    def pause(self) -> None:
        """As `pause=` says."""
        self.ready()
        if self._loop is not None:
            self._run(self._engine.pause_generation(mode=self._pause, clear_cache=True))

    def renew(self, version: str) -> None:
        """Reset the caches of prefixes and encoders."""
        self._run(self._core.reset_encoder_cache())
        reset = (
            [self._run(self._core.reset_prefix_cache())]
            if self._replicas == 1
            else self._run(ask_replicas(self._core, "reset_prefix_cache", False, False))
        )
        if not all(reset):
            raise RefitError(
                "the engine could not reset its prefix cache, which holds the old weights' keys and values"
            )
        self._run(self._engine.update_weight_version(version))

    def drop_requests(self) -> None:
        """An `LLM` has none, or they wait for this thread."""
        if self._loop is not None:
            self._run(self._engine.pause_generation(mode="abort", clear_cache=True))

    def resume(self) -> None:
        """An `LLM` was not paused."""
        if self._loop is not None:
            self._run(self._engine.resume_generation())

    def _run(self, answer: Any) -> Any:
        """What an `LLM` answers, or the coroutine of an `AsyncLLM`."""
        return answer if self._loop is None else call_async(self._loop, answer, timeout_s=self._timeout_s)


async def ask_replicas(engine: Any, method: str, *args: object) -> list[Any]:
    """What every data-parallel replica of an `AsyncLLM` answers to a call of its core, in their order.

    vLLM's own calls go to all of them, and hand on the answer of the first.
    """
    core = engine.engine_core
    asked = (core._call_utility_async(method, *args, engine=each) for each in core.core_engines)  # noqa: SLF001
    return await asyncio.gather(*asked)


def call_async(loop: asyncio.AbstractEventLoop, what: Coroutine[Any, Any, T], *, timeout_s: float) -> T:
    """What a coroutine of an engine's returns, which `loop` runs in another thread.

    Raises:
        RefitError: The loop does not run, or in this thread; or there is no answer after `timeout_s`.
    """
    if not loop.is_running() or _running_loop() is loop:
        what.close()
        raise RefitError(
            "the event loop of the engine must run, in another thread than this one, while a sink talks to it; from a "
            "coroutine, use `await asyncio.to_thread(refit, version=…)`"
        )
    future = asyncio.run_coroutine_threadsafe(what, loop)
    try:
        return future.result(timeout_s)
    except TimeoutError as error:
        future.cancel()
        raise RefitError(f"the engine did not answer within timeout_s={timeout_s}") from error


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def loop_of(engine: Any) -> asyncio.AbstractEventLoop:
    """The loop that runs the caller, or the engine's own task."""
    loop: asyncio.AbstractEventLoop | None = _running_loop()
    if loop is None and engine.output_handler is not None:
        loop = engine.output_handler.get_loop()
    if loop is None:
        raise ValueError("no event loop was found that runs the engine; give it as loop=")
    return loop
