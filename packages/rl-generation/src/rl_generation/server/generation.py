"""Runs what was asked for on the engine, and ends it when the client is gone. Does not know shapes of responses."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.types import Receive

from rl_generation.engine import RolloutDelta, StreamingEngine
from rl_generation.errors import EngineDeadError, SampleTimeoutError
from rl_generation.requests import Request
from rl_generation.rollout import Rollout, in_order
from rl_generation.server.errors import from_engine

__all__ = ["ClientGoneError", "generate", "stream", "unless_disconnected"]

T = TypeVar("T")

Item = tuple[int, RolloutDelta]
"""The index of a request, and its next delta."""


class ClientGoneError(Exception):
    """Nobody is there any more to answer to."""


async def generate(engine: StreamingEngine, requests: Sequence[Request]) -> list[Rollout]:
    """Answer all requests; rollouts come in order of request, then of sample.

    Raises:
        HttpError: The engine failed or refused; the other requests are then aborted.
    """
    answering = [asyncio.ensure_future(_rollouts(engine, request)) for request in requests]
    try:
        return [rollout for rollouts in await asyncio.gather(*answering) for rollout in rollouts]
    except (EngineDeadError, SampleTimeoutError, ValueError) as error:
        raise from_engine(error) from error
    finally:
        await _end(answering)


async def stream(engine: StreamingEngine, requests: Sequence[Request]) -> AsyncGenerator[Item, None]:
    """Yield the deltas of all requests as they come; closing it aborts what is unfinished.

    Raises:
        HttpError: The engine failed or refused; the other requests are then aborted.
    """
    try:
        items = _one(engine, 0, requests[0]) if len(requests) == 1 else _merged(engine, requests)
        async with aclosing(items):
            async for item in items:
                yield item
    except (EngineDeadError, SampleTimeoutError, ValueError) as error:
        raise from_engine(error) from error


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do `work`, or cancel it as soon as the client disconnects. The body must have been read.

    Raises:
        ClientGoneError: The client disconnected first.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnection(receive))
    try:
        await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        await _end([working, watching])


async def _disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _rollouts(engine: StreamingEngine, request: Request) -> list[Rollout]:
    async with aclosing(_one(engine, 0, request)) as deltas:
        return in_order([delta.rollout async for _, delta in deltas if delta.rollout is not None])


async def _one(engine: StreamingEngine, index: int, request: Request) -> AsyncGenerator[Item, None]:
    async with aclosing(engine.stream(request.prompt, request.sampling)) as deltas:
        async for delta in deltas:
            yield index, delta


async def _merged(engine: StreamingEngine, requests: Sequence[Request]) -> AsyncGenerator[Item, None]:
    items: asyncio.Queue[Item | asyncio.Task[None]] = asyncio.Queue()

    async def feed(index: int, request: Request) -> None:
        async with aclosing(_one(engine, index, request)) as deltas:
            async for item in deltas:
                items.put_nowait(item)

    feeders = [asyncio.create_task(feed(index, request)) for index, request in enumerate(requests)]
    for feeder in feeders:
        feeder.add_done_callback(items.put_nowait)
    unfinished = len(feeders)
    try:
        while unfinished:
            item = await items.get()
            if isinstance(item, asyncio.Task):
                item.result()
                unfinished -= 1
            else:
                yield item
    finally:
        await _end(feeders)
