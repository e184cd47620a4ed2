"""Makes a streaming engine of one that steps in its caller's thread. Does not know models, HTTP or text.

One worker thread owns the engine. Whatever touches it is a task of that thread, in order of arrival; a step that leaves
work behind queues the next one behind the tasks that came meanwhile. So requests join and leave between two steps, and
so may new weights (`between_steps`), without a lock.
"""

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import Literal, Self, TypeVar, final

from rl_generation.engine import EngineMetrics, RolloutDelta, SteppingEngine
from rl_generation.errors import EngineDeadError, EngineOptionError
from rl_generation.requests import Sampling

T = TypeVar("T")

STEPS = ("add_request", "step", "abort_request", "has_unfinished_requests")


@final
class Streamer:
    """Answers many prompts at once from any event loop, with an engine of one thread.

    From now on nothing else may call the engine, except through `between_steps`.

    Args:
        engine: A `TransformersEngine`, or another that steps.
        health_timeout_s: Seconds within which the worker thread must get to a health check; longer than a step takes.

    Raises:
        TypeError: The engine does not step.
    """

    def __init__(self, engine: SteppingEngine, *, health_timeout_s: float = 60.0) -> None:
        missing = [name for name in STEPS if not hasattr(engine, name)]
        if missing:
            raise TypeError(
                f"{type(engine).__name__} has no {', '.join(missing)}: a Streamer needs an engine that steps, as the "
                f"protocol SteppingEngine says"
            )
        self.engine: SteppingEngine = engine
        """The engine behind it."""
        self._health_timeout_s = health_timeout_s
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rl-generation")
        self._streams: dict[str, _Stream] = {}
        self._numbers = itertools.count()
        self._stepping = False
        self.is_paused = False
        """Whether it is paused, by anybody."""
        self._dead: EngineDeadError | None = None
        self._closed = False

    async def stream(self, prompt: Sequence[int], sampling: Sampling) -> AsyncGenerator[RolloutDelta, None]:
        """Yield new tokens of the `n` answers as they come; closing the iterator aborts what is unfinished.

        Raises:
            PromptError: The engine refuses the request.
            LogpError: Some answer of the engine has a broken logp; every stream that is open then ends so.
            EngineDeadError: The engine is gone.
        """
        request_id = f"stream-{next(self._numbers)}"
        stream = _Stream(sampling.n)
        try:
            await asyncio.wrap_future(
                self._submit(lambda: self._add(request_id, stream, prompt=prompt, sampling=sampling))
            )
            while stream.unfinished:
                delta = await stream.next()
                stream.unfinished -= delta.rollout is not None
                yield delta
        finally:
            if stream.unfinished and not self._closed:
                self._submit(lambda: self._drop(request_id))

    async def abort(self) -> int:
        """Abort every request that is under way, and return how many; their streams end with reason `"abort"`."""
        return await asyncio.wrap_future(self._submit(self._abort_all))

    async def read_metrics(self) -> EngineMetrics:
        """Return the engine's metrics, read between two steps.

        Raises:
            EngineDeadError: The engine is gone.
        """
        return await asyncio.wrap_future(self._submit(self.engine.metrics))

    async def check_health(self) -> None:
        """Return once the worker thread got to this call.

        Raises:
            EngineDeadError: The engine died, or the thread is in one step for longer than `health_timeout_s`.
        """
        if self._dead is not None:
            raise self._dead
        turn = asyncio.wrap_future(self._submit(lambda: None))
        try:
            await asyncio.wait_for(turn, self._health_timeout_s)
        except TimeoutError:
            raise EngineDeadError(f"the engine has been in one step for {self._health_timeout_s} s") from None

    def pause(self, *, mode: Literal["keep"] = "keep") -> None:
        """Stop stepping until `resume`; what is under way is frozen, and what is asked for meanwhile waits.

        Returns between two steps. The keys and values of what is frozen stay: a refit meanwhile is one underway.

        Raises:
            EngineOptionError: Another mode than "keep".
            EngineDeadError: The streamer is closed.
        """
        if mode != "keep":
            raise EngineOptionError(f"a Streamer pauses with mode='keep' alone; got mode={mode!r}")
        self._submit(lambda: self._set_paused(paused=True)).result()

    def resume(self) -> None:
        """Step again."""
        self._submit(lambda: self._set_paused(paused=False)).result()

    def between_steps(self, call: Callable[[], T]) -> "Future[T]":
        """Run `call` in the worker thread, where it may use the engine: a refit, a commit, a sleep."""
        return self._submit(call)

    def close(self) -> None:
        """Abort what is under way, end the thread, and leave the engine to its owner; it can be called again."""
        if not self._closed:
            self._closed = True
            self._worker.submit(self._abort_all)
            self._worker.submit(self._finish)
            self._worker.shutdown(wait=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, call: Callable[[], T]) -> "Future[T]":
        if self._closed:
            raise EngineDeadError("the streamer is closed")
        return self._worker.submit(call)

    # -- In the worker thread -------------------------------------------------------------------------------------

    def _add(self, request_id: str, stream: "_Stream", *, prompt: Sequence[int], sampling: Sampling) -> None:
        self.engine.add_request(request_id, prompt, sampling)
        self._dead = None  # it took a request: somebody has restarted it
        self._streams[request_id] = stream
        self._go_on()

    def _drop(self, request_id: str) -> None:
        if self._streams.pop(request_id, None) is not None:
            self.engine.abort_request(request_id)

    def _abort_all(self) -> int:
        for request_id in self._streams:
            self.engine.abort_request(request_id)
        return len(self._streams)

    def _set_paused(self, *, paused: bool) -> None:
        self.is_paused = paused
        self._go_on()

    def _go_on(self) -> None:
        """Queue a step, where there is something to do, behind the tasks that have come meanwhile."""
        idle = self.is_paused or self._stepping or self._closed
        if not idle and self.engine.has_unfinished_requests():
            self._stepping = True
            self._worker.submit(self._turn)

    def _turn(self) -> None:
        self._stepping = False
        if not self.is_paused and self._step():  # it may have been paused since this was queued
            self._go_on()

    def _step(self) -> bool:
        """Step once; return whether to go on."""
        try:
            news = self.engine.step()
        except BaseException as error:  # noqa: BLE001 - raised again where the answers are taken
            # No answer of a broken step can be told from another: all streams end so.
            streams, self._streams = self._streams, {}
            for each in streams.values():
                each.put(error)
            if isinstance(error, EngineDeadError):
                self._dead = error
                return False
            for request_id in streams:
                self.engine.abort_request(request_id)
            return bool(streams)  # one that fails with nobody waiting is left alone until the next request
        for request_id, delta in news:
            stream = self._streams.get(request_id)  # None where its consumer dropped it
            if stream is not None and stream.put(delta):
                del self._streams[request_id]
        return True

    def _finish(self) -> None:
        while self.engine.has_unfinished_requests() and self._step():
            pass


class _Stream:
    """What goes from the worker thread to one consumer, in the event loop where it was made.

    A consumer that is slower than the engine gets several deltas of an answer as one: no more than one of each answer
    ever waits.
    """

    def __init__(self, samples: int) -> None:
        self.unfinished = samples
        """Samples whose end the consumer has not seen."""
        self._undelivered = samples
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._news: dict[int, list[RolloutDelta]] = {}
        """Of each answer what its consumer has not seen."""
        self._error: BaseException | None = None
        self._ready = asyncio.Event()

    def put(self, item: RolloutDelta | BaseException) -> bool:
        """Hand an item over; return whether the end of every sample has been put."""
        with self._lock:
            known = bool(self._news) or self._error is not None
            if isinstance(item, RolloutDelta):
                self._news.setdefault(item.sample_index, []).append(item)
                self._undelivered -= item.rollout is not None
            else:
                self._error = item
        if not known:
            # A loop that is closed has no consumer any more.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._ready.set)
        return not self._undelivered

    async def next(self) -> RolloutDelta:
        await self._ready.wait()
        with self._lock:
            if not self._news:
                self.unfinished = 0
                assert self._error is not None
                raise self._error
            index = next(iter(self._news))
            news = self._news.pop(index)
            if not self._news and self._error is None:
                self._ready.clear()
        return RolloutDelta(
            sample_index=index,
            tokens=tuple(chain.from_iterable(delta.tokens for delta in news)),
            logp=tuple(chain.from_iterable(delta.logp for delta in news)),
            top_logp=tuple(chain.from_iterable(delta.top_logp for delta in news)),
            rollout=news[-1].rollout,
        )
