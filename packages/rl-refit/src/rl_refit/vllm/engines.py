"""vLLM's `LLM` and `AsyncLLM` as a sink sees them: the same few blocking calls, made in the caller's thread.

Imports no vLLM: it is handed the engine.
"""

from __future__ import annotations

import asyncio
import pkgutil
import time
from collections.abc import Coroutine
from typing import Any, Literal, TypeVar, final

from rl_refit.engine import Answer, Engine
from rl_refit.errors import RefitError

__all__ = ["Pause", "call_async", "engine_of", "loop_of"]

T = TypeVar("T")

Pause = Literal["refuse", "wait", "keep", "abort"]
"""What becomes of unfinished requests at a commit: it is refused, waits for them, freezes them, or aborts them."""


def engine_of(engine: Any, *, loop: asyncio.AbstractEventLoop | None, pause: Pause | None, timeout_s: float) -> Engine:
    """The engine behind a vLLM `LLM` or `AsyncLLM`.

    Raises:
        RefitError: It was made without the worker extension, or spans several data-parallel replicas.
        ValueError: `pause` is not for this kind of engine, or there is no event loop to be found.
    """
    inner = getattr(engine, "llm_engine", engine)
    _check_configuration(inner.vllm_config.parallel_config)
    if inner is not engine:
        return _SyncEngine(engine, pause=pause or "refuse", timeout_s=timeout_s)
    return _AsyncEngine(engine, loop=loop or loop_of(engine), pause=pause or "wait", timeout_s=timeout_s)


def _check_configuration(parallel: Any) -> None:
    from rl_refit.vllm.worker import RefitWorker

    name = f"{RefitWorker.__module__}.{RefitWorker.__qualname__}"
    extension = parallel.worker_extension_cls
    if not extension or not issubclass(pkgutil.resolve_name(extension), RefitWorker):
        raise RefitError(
            f"the engine's workers know nothing of refits: its worker_extension_cls is {extension!r}; make it with "
            f"worker_extension_cls={name!r}, or a class that inherits it",
            phase="prepare",
        )
    if parallel.data_parallel_size > 1:
        raise RefitError(
            f"the engine has data_parallel_size={parallel.data_parallel_size}, and vLLM hands on the answers of the "
            f"first replica only; make one engine a replica, each with a sink of its own",
            phase="prepare",
        )


@final
class _SyncEngine:
    """`vllm.LLM`. Its caller's thread runs it, so nothing is to be paused unless another thread generates."""

    def __init__(self, llm: Any, *, pause: Pause, timeout_s: float) -> None:
        if pause not in ("refuse", "wait"):
            raise ValueError(
                f"an LLM can refuse a commit or wait for it while requests are unfinished; got pause={pause!r}"
            )
        self._llm, self._pause, self._timeout_s = llm, pause, timeout_s
        self.num_ranks: int = llm.llm_engine.vllm_config.parallel_config.world_size

    def call(self, method: str, *args: object) -> list[Answer]:
        answers: list[Answer] = self._llm.collective_rpc(method, timeout=self._timeout_s, args=args)
        return answers

    def ready(self) -> None:
        engine, deadline = self._llm.llm_engine, time.monotonic() + self._timeout_s
        while engine.has_unfinished_requests():
            if self._pause == "refuse":
                count = engine.get_num_unfinished_requests()
                raise RefitError(
                    f"{count} requests are unfinished, and would go on with other weights than they began with; commit "
                    f"when they are done, or make the sink with pause='wait'",
                    phase="commit",
                )
            if time.monotonic() > deadline:
                raise RefitError(f"requests are still unfinished after timeout_s={self._timeout_s}", phase="commit")
            time.sleep(0.005)

    def pause(self) -> None:
        self.ready()

    def renew(self, version: str) -> None:
        self._llm.llm_engine.reset_encoder_cache()
        if not self._llm.reset_prefix_cache():
            raise RefitError(
                "the engine could not reset its prefix cache, which holds the old weights' keys and values"
            )
        self._llm.update_weight_version(version)

    def drop_requests(self) -> None:
        pass

    def resume(self) -> None:
        pass


@final
class _AsyncEngine:
    """`vllm.v1.engine.async_llm.AsyncLLM`, which its event loop runs, from any other thread."""

    def __init__(self, engine: Any, *, loop: asyncio.AbstractEventLoop, pause: Pause, timeout_s: float) -> None:
        if pause == "refuse":
            raise ValueError("an AsyncLLM is paused for a commit: pause is 'wait', 'keep' or 'abort'; got 'refuse'")
        self._engine, self._loop, self._pause, self._timeout_s = engine, loop, pause, timeout_s
        self.num_ranks: int = engine.vllm_config.parallel_config.world_size

    def call(self, method: str, *args: object) -> list[Answer]:
        return self._run(self._engine.collective_rpc(method, timeout=self._timeout_s, args=args))

    def ready(self) -> None:
        pass

    def pause(self) -> None:
        self._run(self._engine.pause_generation(mode=self._pause, clear_cache=True))

    def renew(self, version: str) -> None:
        self._run(self._engine.reset_encoder_cache())
        if not self._run(self._engine.reset_prefix_cache()):
            raise RefitError(
                "the engine could not reset its prefix cache, which holds the old weights' keys and values"
            )
        self._run(self._engine.update_weight_version(version))

    def drop_requests(self) -> None:
        self._run(self._engine.pause_generation(mode="abort", clear_cache=True))

    def resume(self) -> None:
        self._run(self._engine.resume_generation())

    def _run(self, what: Coroutine[Any, Any, T]) -> T:
        return call_async(self._loop, what, timeout_s=self._timeout_s)


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
