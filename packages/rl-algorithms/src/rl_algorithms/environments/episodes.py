"""Episodes: an environment written as one object for one conversation, and many of them driven as a batch.

An episode has gymnasium's shape, on messages instead of arrays:

    class Countdown:
        def reset(self, *, seed, row):                 # -> what the policy answers first
            return "Count down from 3, one number in each turn."
        def step(self, answer):                        # -> observations, reward, terminated, truncated, info
            return "Go on.", float(answer == "0"), answer == "0", False, {}
        def close(self): ...

    EpisodeEnvironment(Countdown)

Its methods may be coroutines instead; those run on one event loop. Plain ones run on threads, each call on whichever is
free, so that an episode must not depend on its thread.
"""

import concurrent.futures
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from rl_algorithms.choices import check_choice
from rl_algorithms.contracts import Conversation, EnvironmentReturn, EpisodeStart, matches
from rl_algorithms.environments.episode_returns import EpisodeError, as_return, as_start, shape_of
from rl_algorithms.environments.executor import (
    DeadlineExecutor,
    OnError,
    Outcome,
    TimedOutError,
    check_limits,
    describe,
    wait_for_all,
)

__all__ = ["Episode", "EpisodeEnvironment", "EpisodeError"]

logger = logging.getLogger(__name__)


@runtime_checkable
class Episode(Protocol):
    """One conversation's environment. Its state is its own; it is used for one episode and then closed."""

    def reset(self, *, seed: int, row: Mapping[str, object]) -> Any:
        """What the policy answers first: text of the user, a list of messages, or an `EpisodeStart`."""

    def step(self, answer: str) -> Any:
        """An `EnvironmentReturn`, or `(observations, reward, terminated, truncated, info)`.

        `observations` is text of the user or a list of messages; `info` may have `rewards` and `metrics`, and nothing
        else. What is observed at the end is dropped: nobody answers it.
        """

    def close(self) -> Any:
        """Let go of what the episode holds. Called once, however it ended, and maybe while a call hangs."""


class EpisodeEnvironment:
    """A batch environment made of episodes, which run concurrently and cannot hold one another up.

    An episode is closed when it ends, when it fails, when its conversation is dropped, and when the environment is
    closed; use `with`, or call `close`. A call that is over its deadline costs its rollout and no other: the rollout is
    `failed`, and the hung thread abandoned (see `executor`); every episode that hangs for good leaves one behind.

    Args:
        factory: makes a new episode. It may take as long as a reset; it may be a coroutine function.
        max_workers: how many calls run at the same time.
        timeout_s: the deadline of each call, in seconds from when it begins.
        reset_timeout_s: the same for making and for resetting an episode; `timeout_s` where it is None.
        on_error: `"stop"` raises what an episode raises, naming the row; `"fail"` makes it the failure of one rollout.

    Raises:
        ValueError: a limit makes no sense, or `on_error` is neither.
    """

    def __init__(
        self,
        factory: Callable[[], Any],
        *,
        max_workers: int = 32,
        timeout_s: float = 60.0,
        reset_timeout_s: float | None = None,
        on_error: OnError = "stop",
    ) -> None:
        check_choice("on_error", on_error, OnError)
        check_limits(timeout_s=timeout_s, max_workers=max_workers)
        check_limits(timeout_s=timeout_s if reset_timeout_s is None else reset_timeout_s, max_workers=max_workers)
        self._factory = factory
        self._timeout_s = timeout_s
        self._reset_timeout_s = timeout_s if reset_timeout_s is None else reset_timeout_s
        self._stops = on_error == "stop"
        self._executor = DeadlineExecutor(max_workers=max_workers)
        self._closing: weakref.WeakSet[Future[None]] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._running: weakref.WeakSet[_Running] = weakref.WeakSet()
        self._closed = False

    def reset(self, rows: Sequence[Mapping[str, object]], *, seeds: Sequence[int]) -> list[EpisodeStart]:
        """Begin an episode for each row.

        One that cannot begin fails at its first step, for a start has no word for it. Until then it says what another
        rollout of its group (equal row, equal seed) says.

        Raises:
            EpisodeError: an episode raised, or began with what is no message, and `on_error` is `"stop"`.
            BlockedLoopError: an async episode blocks the event loop.
        """
        self._check_open()
        made = self._executor.run([self._factory] * len(rows), timeout_s=self._reset_timeout_s)
        running = [self._begin(each.value) if matches(each.value, Episode) else None for each in made]
        calls = [
            functools.partial(each.episode.reset, seed=seed, row=row)
            for each, seed, row in zip(running, seeds, rows, strict=True)
            if each is not None
        ]
        outcomes = iter(self._executor.run(calls, timeout_s=self._reset_timeout_s))
        starts = []
        for row, maker, each in zip(rows, made, running, strict=True):
            try:
                outcome = _not_made(maker) if each is None else next(outcomes)
                starts.append(replace(as_start(outcome.result()), state=each))
            except Exception as error:  # noqa: BLE001 - raised again where errors stop the run
                if each is not None:
                    self._begin_closing(each)
                reason = self._failure(error, doing="begin", where=_where(row))
                starts.append(_broken_start(reason))
        return _as_siblings(starts, rows, seeds)

    def step(self, conversations: Sequence[Conversation]) -> list[EnvironmentReturn]:
        """Hand each episode its answer.

        Raises:
            EpisodeError: an episode raised or returned what makes no sense, and `on_error` is `"stop"`; or a
                conversation is not one of this environment's, or has ended.
            BlockedLoopError: an async episode blocks the event loop.
        """
        self._check_open()
        states = [self._state(conversation) for conversation in conversations]
        running = [state for state in states if isinstance(state, _Running)]
        if len({*map(id, running)}) < len(running):
            raise EpisodeError("two conversations of one batch share an episode; each must have a reset of its own")
        return wait_for_all(self._step(*pair) for pair in zip(states, conversations, strict=True))

    def submit(self, conversation: Conversation) -> Future[EnvironmentReturn]:
        """Hand one episode its answer, and wait for none; the future raises what `step` raises."""
        self._check_open()
        return self._step(self._state(conversation), conversation)

    def _step(self, state: "_Running | _Broken", conversation: Conversation) -> Future[EnvironmentReturn]:
        async def step() -> EnvironmentReturn:
            if isinstance(state, _Broken):
                return EnvironmentReturn(reward=0.0, terminated=True, failed=state.reason)
            call = functools.partial(state.episode.step, conversation.answer)
            outcome = await self._executor.call(call, timeout_s=self._timeout_s)
            try:
                result = as_return(outcome.result())
            except Exception as error:  # noqa: BLE001 - raised again where errors stop the run
                self._begin_closing(state)
                reason = self._failure(error, doing="go on", where=_where(conversation.row))
                return EnvironmentReturn(reward=0.0, terminated=True, failed=reason)
            if not (result.terminated or result.truncated or result.failed is not None):
                return replace(result, state=state)
            if state.retire():  # closed within the deadline, so that what it held is free when the next begins
                await self._close_episode(state.episode)
            return result

        return self._executor.spawn(step(), timeout_s=self._timeout_s)

    def close(self) -> None:
        """Close every episode that is still open; the environment cannot be used afterwards."""
        with self._lock:
            self._closed = True
            left = list(self._running)
        for running in left:
            self._begin_closing(running)
        concurrent.futures.wait(list(self._closing), timeout=self._timeout_s)
        self._executor.close()

    def __enter__(self) -> "EpisodeEnvironment":  # noqa: PYI034 - beartype knows no Self outside its own classes
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, episode: Any) -> "_Running":
        running = _Running(episode)
        running.closes = weakref.finalize(running, self._close_dropped, episode)
        running.closes.atexit = False  # a process that ends takes its episodes with it
        with self._lock:
            self._running.add(running)
        return running

    async def _close_episode(self, episode: Any) -> None:
        """Close; what goes wrong is logged, for the rollout is judged by then."""
        outcome = await self._executor.call(episode.close, timeout_s=self._timeout_s)
        if outcome.error is not None:
            logger.warning("an episode could not be closed: %s", describe(outcome.error))

    def _begin_closing(self, running: "_Running") -> None:
        """Close without waiting: after an error, when closing may hang as well."""
        if running.retire():
            self._close_aside(running.episode)

    def _close_aside(self, episode: Any) -> Future[None]:
        closing = self._executor.spawn(self._close_episode(episode), timeout_s=self._timeout_s)
        self._closing.add(closing)
        return closing

    def _close_dropped(self, episode: Any) -> None:
        """Close from a finalizer, which may run in any thread, even in one that holds the executor's lock."""
        closed: Future[None] = Future()
        self._closing.add(closed)

        def close() -> None:
            self._close_aside(episode).add_done_callback(lambda _: closed.set_result(None))

        threading.Thread(target=close, name="rl-closing", daemon=True).start()

    def _failure(self, error: Exception, *, doing: str, where: str) -> str:
        """Why a rollout fails; raises instead where errors stop the run. A deadline that has passed never does."""
        if self._stops and not isinstance(error, TimedOutError):
            raise EpisodeError(
                f"{where}: the episode cannot {doing}: {describe(error)}. Mend it, or count it as a failed rollout "
                f"by on_error='fail'"
            ) from error
        return f"the episode cannot {doing}: {describe(error)}"

    def _state(self, conversation: Conversation) -> "_Running | _Broken":
        state, where = conversation.state, _where(conversation.row)
        if isinstance(state, _Broken):
            return state
        if not isinstance(state, _Running):
            raise EpisodeError(
                f"{where}: the conversation's state is {state!r}, and must be what reset or the last step returned: "
                f"episodes begin by reset"
            )
        if state.ended:
            raise EpisodeError(f"{where}: the episode has ended, and got another answer; begin a new one by reset")
        return state

    def _check_open(self) -> None:
        if self._closed:
            raise EpisodeError("the environment is closed; make a new one")


class _Running:
    """A conversation's handle on its episode. Dropping it closes the episode."""

    __slots__ = ("__weakref__", "closes", "ended", "episode")

    def __init__(self, episode: Any) -> None:
        self.episode = episode
        self.ended = False
        self.closes: weakref.finalize[..., _Running] | None = None

    def retire(self) -> bool:
        """Mark it as ended; True for the one who now has to close it."""
        self.ended = True
        return self.closes is not None and self.closes.detach() is not None


class _Broken:
    """A conversation's handle on an episode that could not begin."""

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason


def _not_made(outcome: Outcome) -> Outcome:
    missing = EpisodeError(f"the factory made {shape_of(outcome.value)}, which lacks reset, step or close")
    return outcome if outcome.error is not None else Outcome(error=missing)


def _broken_start(reason: str) -> EpisodeStart:
    message = {"role": "user", "content": "0"}  # any text will do, and every tokenizer knows a digit
    return EpisodeStart(messages=(message,), state=_Broken(reason))


def _as_siblings(
    starts: list[EpisodeStart], rows: Sequence[Mapping[str, object]], seeds: Sequence[int]
) -> list[EpisodeStart]:
    """Let broken starts say what their group says: a group that begins in two ways cannot be compared with itself."""
    fine = [index for index, start in enumerate(starts) if not isinstance(start.state, _Broken)]
    repaired = list(starts)
    for index in {*range(len(starts))} - {*fine}:
        for other in fine:
            if seeds[other] == seeds[index] and rows[other] == rows[index]:
                repaired[index] = replace(starts[other], state=starts[index].state)
                break
    return repaired


def _where(row: Mapping[str, object]) -> str:
    shown = repr(dict(row))
    return f"the row {shown if len(shown) <= 200 else shown[:200] + '...'}"
