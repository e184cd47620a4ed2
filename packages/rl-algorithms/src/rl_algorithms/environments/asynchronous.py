"""Asynchronous environments: written for one conversation as a coroutine, run concurrently for a batch of them.

All coroutines share one event loop on a thread of its own, so that clients and connections that an environment opens
stay with one loop. What awaits (a sandbox over HTTP, a judge behind an API) goes well here; what computes belongs on
threads or in processes, for it would block the loop.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol, runtime_checkable

from rl_algorithms.choices import check_choice
from rl_algorithms.contracts import Conversation, EnvironmentReturn, EpisodeStart, matches
from rl_algorithms.environments.executor import (
    DeadlineExecutor,
    OnError,
    Outcome,
    TimedOutError,
    check_limits,
    describe,
    wait_for_all,
)

__all__ = [
    "AsyncEnvironment",
    "AsyncEnvironmentError",
    "AsyncResettingEnvironment",
    "ConcurrentEnvironment",
    "ConcurrentResettingEnvironment",
]


class AsyncEnvironmentError(ValueError):
    """An async environment raised or returned something that makes no sense; the message names the row."""


@runtime_checkable
class AsyncEnvironment(Protocol):
    """The judge of one conversation at a time. It keeps nothing of it: its state travels with the conversation."""

    async def step(self, conversation: Conversation) -> EnvironmentReturn:
        """What it says of the newest answer."""


@runtime_checkable
class AsyncResettingEnvironment(AsyncEnvironment, Protocol):
    """An async environment that says itself how an episode begins."""

    async def reset(self, row: Mapping[str, object], *, seed: int) -> EpisodeStart:
        """How the episode of this row begins."""


class ConcurrentEnvironment:
    """An async environment, run for a whole batch at a time.

    Args:
        environment: what judges; its `step` is a coroutine function.
        max_concurrency: how many conversations are judged at the same time.
        timeout_s: the deadline of each, in seconds from when it begins. One that is over it is `failed`.
        on_error: `"stop"` raises what the environment raises, naming the row; `"fail"` makes it the failure of one
            rollout.

    Raises:
        ValueError: a limit makes no sense, `on_error` is neither, or the environment has a `reset` that nobody would
            call.
    """

    def __init__(
        self,
        environment: AsyncEnvironment,
        *,
        max_concurrency: int = 64,
        timeout_s: float = 60.0,
        on_error: OnError = "stop",
    ) -> None:
        if matches(environment, AsyncResettingEnvironment):
            raise AsyncEnvironmentError(
                f"{type(environment).__name__} has a reset, which ConcurrentEnvironment would never call; "
                f"use ConcurrentResettingEnvironment"
            )
        self._environment = environment
        self._runs = _Runs(max_concurrency=max_concurrency, timeout_s=timeout_s, on_error=on_error)

    def step(self, conversations: Sequence[Conversation]) -> list[EnvironmentReturn]:
        """Judge every newest answer, concurrently.

        Raises:
            AsyncEnvironmentError: the environment raised or returned no `EnvironmentReturn` with a finite reward, and
                `on_error` is `"stop"`.
            BlockedLoopError: it blocks the event loop.
        """
        return wait_for_all(self.submit(conversation) for conversation in conversations)

    def submit(self, conversation: Conversation) -> Future[EnvironmentReturn]:
        """Begin to judge one newest answer; the future raises what `step` raises."""
        return self._runs.submit(self._environment, conversation)

    def close(self) -> None:
        """Cancel what runs, and end the event loop."""
        self._runs.executor.close()


class ConcurrentResettingEnvironment:
    """As `ConcurrentEnvironment`, for an environment that says itself how an episode begins."""

    def __init__(
        self,
        environment: AsyncResettingEnvironment,
        *,
        max_concurrency: int = 64,
        timeout_s: float = 60.0,
        on_error: OnError = "stop",
    ) -> None:
        self._environment = environment
        self._runs = _Runs(max_concurrency=max_concurrency, timeout_s=timeout_s, on_error=on_error)

    def reset(self, rows: Sequence[Mapping[str, object]], *, seeds: Sequence[int]) -> list[EpisodeStart]:
        """Begin an episode for each row.

        Raises:
            AsyncEnvironmentError: the environment raised, was over its deadline, or returned no `EpisodeStart`. A start
                has no word for a failed rollout, so this stops the run whatever `on_error` says.
            BlockedLoopError: it blocks the event loop.
        """
        calls = [
            functools.partial(self._environment.reset, row, seed=seed) for row, seed in zip(rows, seeds, strict=True)
        ]
        starts = []
        outcomes = self._runs.executor.run(calls, timeout_s=self._runs.timeout_s)
        for row, outcome in zip(rows, outcomes, strict=True):
            if outcome.error is not None or not isinstance(outcome.value, EpisodeStart):
                raise _error(row, outcome, wanted="an EpisodeStart") from outcome.error
            starts.append(outcome.value)
        return starts

    def step(self, conversations: Sequence[Conversation]) -> list[EnvironmentReturn]:
        """As `ConcurrentEnvironment.step`."""
        return wait_for_all(self.submit(conversation) for conversation in conversations)

    def submit(self, conversation: Conversation) -> Future[EnvironmentReturn]:
        """Begin to judge one newest answer; the future raises what `step` raises."""
        return self._runs.submit(self._environment, conversation)

    def close(self) -> None:
        """Cancel what runs, and end the event loop."""
        self._runs.executor.close()


class _Runs:
    """The executor of an environment and what is done about its errors."""

    def __init__(self, *, max_concurrency: int, timeout_s: float, on_error: OnError) -> None:
        check_choice("on_error", on_error, OnError)
        check_limits(timeout_s=timeout_s, max_workers=max_concurrency)
        self.timeout_s, self._stops = timeout_s, on_error == "stop"
        self.executor = DeadlineExecutor(max_workers=max_concurrency)

    def submit(self, environment: AsyncEnvironment, conversation: Conversation) -> Future[EnvironmentReturn]:
        async def judge() -> EnvironmentReturn:
            call = functools.partial(environment.step, conversation)
            outcome = await self.executor.call(call, timeout_s=self.timeout_s)
            value = outcome.value
            if isinstance(value, EnvironmentReturn) and (value.failed is not None or math.isfinite(value.reward)):
                return value
            error = _error(conversation.row, outcome, wanted="an EnvironmentReturn with a finite reward")
            if self._stops and not isinstance(outcome.error, TimedOutError):
                raise error from outcome.error
            return EnvironmentReturn(reward=0.0, terminated=True, failed=str(error))

        return self.executor.spawn(judge(), timeout_s=self.timeout_s)


def _error(row: Mapping[str, object], outcome: Outcome, *, wanted: str) -> AsyncEnvironmentError:
    wrong = f"it returned {outcome.value!r:.100}, and must return {wanted}"
    what = wrong if outcome.error is None else describe(outcome.error)
    return AsyncEnvironmentError(f"the row {dict(row)!r:.200}: the environment failed: {what}")
