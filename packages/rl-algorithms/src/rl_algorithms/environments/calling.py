"""How reward functions are called: which arguments they get, their deadline, coroutine functions awaited together.

What a function raised is returned instead of its rewards.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

from rl_algorithms.contracts import Conversation, Environment
from rl_algorithms.environments.deadlines import TimedOutError, Workers
from rl_algorithms.environments.interruption import call_within
from rl_algorithms.environments.scores import CannotJudgeError, Score

__all__ = ["ALWAYS_GIVEN", "NAMED", "RewardError", "call_all", "name_of"]

ALWAYS_GIVEN = ("prompts", "completions")
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

BLOCKED_S = 1.0
FOREVER_S = 1e9


class RewardError(ValueError):
    """A reward function raised or returned something that is not a finite number; the message names the sample."""


def name_of(function: Callable[..., Any] | Environment) -> str:
    """What the user calls this function."""
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def call_all(
    functions: Sequence[Callable[..., Any] | Environment],
    conversations: Sequence[Conversation],
    *,
    timeout_s: float | None,
) -> list[list[Any] | Exception]:
    """Call each function once for all conversations.

    Plain functions run one after another; then all coroutines at once. Each call has `timeout_s` seconds.

    Returns:
        For each function a list with an item per conversation, or what it raised: `TimedOutError` at its deadline.

    Raises:
        CannotJudgeError: a function did.
    """
    columns = _columns(conversations)
    returned = [_started(function, conversations, columns, timeout_s=timeout_s) for function in functions]
    waiting = {index: item for index, item in enumerate(returned) if inspect.isawaitable(item)}
    if waiting:
        try:
            awaited = _run(_together(list(waiting.values()), timeout_s), timeout_s)
        except TimedOutError as error:  # one of them blocks the event loop that they share
            awaited = [error] * len(waiting)
        for index, item in zip(waiting, awaited, strict=True):
            returned[index] = _checked(item, len(conversations))
    return returned


def _columns(conversations: Sequence[Conversation]) -> dict[str, list[object]]:
    names = dict.fromkeys(name for conversation in conversations for name in conversation.row)
    columns: dict[str, list[object]] = {
        name: [conversation.row.get(name) for conversation in conversations] for name in names
    }
    columns["prompts"] = [conversation.messages[-1]["content"] for conversation in conversations]
    columns["completions"] = [conversation.answer for conversation in conversations]
    return columns


def _started(
    function: Callable[..., Any] | Environment,
    conversations: Sequence[Conversation],
    columns: Mapping[str, list[object]],
    *,
    timeout_s: float | None,
) -> Any:
    """The rewards as a list, what was raised, or the coroutine that is to be awaited."""

    def call() -> Any:
        if isinstance(function, Environment):
            return _judged(function, conversations)
        returned = function(**{name: columns[name] for name in _accepted(function, columns)})
        return returned if inspect.isawaitable(returned) else _checked(returned, len(conversations))

    try:
        return call_within(call, timeout_s=timeout_s)
    except CannotJudgeError:
        raise
    except Exception as error:  # noqa: BLE001 - the caller decides what becomes of it
        return error
    except SystemExit as error:  # would end the run without a word
        ended = RewardError(f"it raised SystemExit({error})")
        ended.__cause__ = error
        return ended


def _judged(environment: Environment, conversations: Sequence[Conversation]) -> list[Score]:
    returns = environment.step(conversations)
    if open_ended := sum(not item.terminated for item in returns):
        raise RewardError(
            f"it did not end {open_ended} of {len(returns)} conversations; only a single-turn environment can be a part"
        )
    return [Score(item.reward, metrics=item.metrics, failed=item.failed) for item in returns]


def _accepted(function: Callable[..., Any], columns: Mapping[str, object]) -> list[str]:
    """The names in `columns` that `function` takes."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return list(columns)
    return [parameter.name for parameter in parameters if parameter.name in columns]


def _checked(returned: Any, number: int) -> list[Any] | Exception:
    if isinstance(returned, Exception):
        return returned
    if isinstance(returned, Mapping | str | bytes | set):
        return RewardError(f"it returned a {type(returned).__name__}, and must return a list with a number per answer")
    try:
        rewards: list[Any] = list(returned)
    except Exception as error:  # noqa: BLE001 - a lazy sequence may raise what it likes
        return error
    if len(rewards) != number:
        return RewardError(f"it returned {len(rewards)} rewards for {number} answers")
    return rewards


async def _together(waiting: Sequence[Awaitable[Any]], timeout_s: float | None) -> list[Any]:
    async def bounded(item: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                return await item
        except TimeoutError as error:
            if deadline.expired():
                raise TimedOutError(f"it ran longer than timeout_s={timeout_s:g}") from error
            raise  # the function's own, of a request of its for example

    returned = await asyncio.gather(*map(bounded, waiting), return_exceptions=True)
    for each in returned:
        if isinstance(each, BaseException) and not isinstance(each, Exception | asyncio.CancelledError):
            raise each  # an interruption of all of them
    # A cancellation is no Exception, and would be taken for what the function returned.
    return [
        RewardError("it cancelled itself") if isinstance(each, asyncio.CancelledError) else each for each in returned
    ]


def _run(coroutine: Coroutine[Any, Any, list[Any]], timeout_s: float | None) -> list[Any]:
    """Run `coroutine`; a coroutine function that blocks the event loop ends it a second after the deadline of all."""
    limit = None if timeout_s is None else timeout_s + BLOCKED_S
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        returned: list[Any] = call_within(lambda: asyncio.run(coroutine), timeout_s=limit)
        return returned
    # The thread of a notebook runs a loop already, and a loop cannot be entered twice.
    (outcome,) = Workers(max_workers=1).run([lambda: asyncio.run(coroutine)], timeout_s=limit or FOREVER_S)
    rewards: list[Any] = outcome.result()
    return rewards
