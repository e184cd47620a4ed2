"""An event loop in a thread of its own, and ways to reach it from every other thread and loop.

An `AsyncLLM`, or a pool of connections, lives on one loop for as long as it lives; scripts, notebooks, servers and Ray
actors come and go with loops of their own, or with none. Knows of engines only that they die.
"""

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from rl_generation.errors import EngineDeadError

T = TypeVar("T")
_END = object()
_PATIENCE_S = 10.0

MOST_UNREAD = 16
"""Items that wait for a consumer on another loop; then whoever yields them is held back, and may put some together."""

UNREAD_PERIOD_S = 0.01
"""Between two looks whether a consumer has read on."""


class EventLoop:
    """Runs until it is closed; a daemon thread, which keeps no program from ending."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether this is the loop's own thread."""
        return threading.current_thread() is self._thread

    def start(self, what: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T]":
        """Begin `what` on this loop, from any thread.

        Raises:
            EngineDeadError: The loop is closed, and with it the engine that it ran.
        """
        if not self._thread.is_alive():
            what.close()
            raise EngineDeadError("the engine is closed; restart() makes a new one")
        return asyncio.run_coroutine_threadsafe(what, self.loop)

    def run(self, what: Coroutine[Any, Any, T]) -> T:
        """Block until `what` is done, from any thread but the loop's own; an interrupt cancels it.

        Raises:
            RuntimeError: This is the loop's own thread, which would wait for itself.
            EngineDeadError: The loop is closed.
        """
        if self.is_current:
            what.close()
            raise RuntimeError(
                "this call blocks, and was made on the event loop that it waits for; from a coroutine there, await its "
                "asynchronous form where it has one, or `asyncio.to_thread(…)`"
            )
        future = self.start(what)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def wait(self, what: Coroutine[Any, Any, T]) -> T:
        """Await `what`, which runs on this loop, from any other loop; cancelling the one cancels the other."""
        return await asyncio.wrap_future(self.start(what))

    async def iterate(self, items: Callable[[], AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
        """Yield what `items` yields on this loop, from any loop; closing this iterator closes that one.

        `items` is asked for more once all but `MOST_UNREAD` were read.
        """
        here, received = asyncio.get_running_loop(), asyncio.Queue[Any]()
        handed_over = read = 0

        def hand_over(item: object) -> None:
            with contextlib.suppress(RuntimeError):  # whoever iterated has ended, and its loop with it
                here.call_soon_threadsafe(received.put_nowait, item)

        async def pump() -> None:
            nonlocal handed_over
            async with contextlib.aclosing(items()) as source:
                async for item in source:
                    hand_over(item)
                    handed_over += 1
                    while handed_over - read >= MOST_UNREAD and not here.is_closed():  # noqa: ASYNC110
                        await asyncio.sleep(UNREAD_PERIOD_S)

        pumping = self.start(pump())
        pumping.add_done_callback(lambda _: hand_over(_END))
        try:
            while (item := await received.get()) is not _END:
                read += 1
                yield item
            pumping.result()
        finally:
            pumping.cancel()

    def close(self, last: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Cancel what is under way, await `last`, and end the thread; it can be called again.

        Garbage is collected anywhere: in the loop's own thread, another one does it, and this returns at once.
        """
        if self.is_current:
            threading.Thread(target=self.close, args=(last,)).start()
            return
        if not self._thread.is_alive():
            return

        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            if last is not None:
                await last()

        with contextlib.suppress(concurrent.futures.CancelledError, concurrent.futures.TimeoutError):
            self.start(end()).result(_PATIENCE_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_PATIENCE_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()
