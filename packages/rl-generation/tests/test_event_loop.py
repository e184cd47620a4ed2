"""An event loop in a thread of its own, reached from threads and from other loops."""

import asyncio
import concurrent.futures
import contextlib
import threading

import pytest

from rl_generation.errors import EngineDeadError
from rl_generation.event_loop import MOST_UNREAD, EventLoop

PATIENCE_S = 60


@pytest.fixture
def events():
    events = EventLoop("rl-generation-test")
    yield events
    events.close()


class Source:
    """Yields numbers for ever, unless it ends or fails; knows when it was closed."""

    def __init__(self, numbers=None, error=None):
        self.numbers, self.error, self.closed = numbers, error, threading.Event()
        self.asked = 0

    async def __call__(self):
        try:
            number = 0
            while number != self.numbers:
                self.asked += 1
                yield number
                await asyncio.sleep(0)
                number += 1
            if self.error is not None:
                raise self.error
        finally:
            self.closed.set()


async def where():
    return threading.current_thread().name


def test_it_runs_elsewhere_whoever_calls(events):
    assert events.run(where()) == "rl-generation-test"

    async def inside():
        return await events.wait(where())

    assert asyncio.run(inside()) == "rl-generation-test"


def test_a_slow_consumer_holds_the_source_back_and_loses_nothing(events):
    source = Source(100)

    async def slowly():
        numbers = events.iterate(source)
        first = await anext(numbers)
        await asyncio.sleep(0.2)
        return first, source.asked, [number async for number in numbers]

    first, asked, others = asyncio.run(slowly())
    assert asked <= MOST_UNREAD + 1
    assert [first, *others] == list(range(100))


def test_errors_come_back_as_they_are(events):
    async def fail():
        raise EngineDeadError("gone")

    async def inside():
        await events.wait(fail())

    for call in (lambda: events.run(fail()), lambda: asyncio.run(inside())):
        with pytest.raises(EngineDeadError, match="gone"):
            call()


def test_items_come_in_order_and_then_the_error(events):
    async def inside(source):
        return [item async for item in events.iterate(source)]

    assert asyncio.run(inside(Source(50))) == list(range(50))
    with pytest.raises(ValueError, match="broken"):
        asyncio.run(inside(Source(3, ValueError("broken"))))


def test_whoever_stops_early_closes_the_source(events):
    async def inside(source):
        async with contextlib.aclosing(events.iterate(source)) as items:
            async for item in items:
                if item == 3:
                    break

    source = Source()
    asyncio.run(inside(source))
    assert source.closed.wait(PATIENCE_S)


def test_cancelling_who_waits_cancels_what_is_waited_for(events):
    begun, cancelled = threading.Event(), threading.Event()

    async def forever():
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def inside():
        task = asyncio.create_task(events.wait(forever()))
        assert await asyncio.to_thread(begun.wait, PATIENCE_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(inside())
    assert cancelled.wait(PATIENCE_S)


def test_it_does_not_wait_for_itself(events):
    async def inside():
        assert events.is_current
        return events.run(where())

    with pytest.raises(RuntimeError, match=r"the event loop that it waits for; .*`asyncio\.to_thread"):
        events.run(inside())
    assert not events.is_current


def test_closing_ends_what_is_under_way_and_the_thread(events):
    begun, source = threading.Event(), Source()
    ended = threading.Event()

    async def iterate():
        with contextlib.suppress(concurrent.futures.CancelledError):
            async for _ in events.iterate(source):
                begun.set()
            return
        ended.set()

    thread = threading.Thread(target=lambda: asyncio.run(iterate()))
    thread.start()
    assert begun.wait(PATIENCE_S)
    events.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert source.closed.is_set()
    assert ended.is_set()
    assert events.loop.is_closed()
    assert "rl-generation-test" not in [each.name for each in threading.enumerate()]
    with pytest.raises(EngineDeadError, match="the engine is closed"):
        events.run(where())
    events.close()
