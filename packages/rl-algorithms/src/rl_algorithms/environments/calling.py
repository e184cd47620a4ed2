"""How reward functions are called: which arguments they get, and coroutine functions awaited together.

Knows nothing of what the rewards are worth. What a function raised is returned in the place of its rewards.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rl_algorithms.contracts import Conversation, Environment
from rl_algorithms.environments.scores import CannotJudgeError, Score

__all__ = ["ALWAYS_GIVEN", "NAMED", "RewardError", "call_all", "name_of"]

ALWAYS_GIVEN = ("prompts", "completions")
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


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
    """What each function returns for the conversations, as a list with an item per conversation, or what it raised.

    Plain functions run one after another; then all coroutines at once, each for at most `timeout_s` (TimeoutError).

    Raises:
        CannotJudgeError: a function did.
    """
    columns = _columns(conversations)
    returned = [_started(function, conversations, columns) for function in functions]
    waiting = {index: item for index, item in enumerate(returned) if inspect.isawaitable(item)}
    if waiting:
        returned = [*returned]
        for index, item in zip(waiting, _run(_together(list(waiting.values()), timeout_s)), strict=True):
            returned[index] = item
    return [_checked(item, len(conversations)) for item in returned]


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
) -> Any:
    try:
        if isinstance(function, Environment):
            return _judged(function, conversations)
        return function(**{name: columns[name] for name in _accepted(function, columns)})
    except CannotJudgeError:
        raise
    except Exception as error:  # noqa: BLE001 - the caller decides what becomes of it
        return error


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
    bounded = [asyncio.wait_for(item, timeout_s) for item in waiting]
    returned = await asyncio.gather(*bounded, return_exceptions=True)
    # A cancellation is no Exception, and would be taken for what the function returned.
    return [
        RewardError("it cancelled itself") if isinstance(each, asyncio.CancelledError) else each for each in returned
    ]


def _run(coroutine: Coroutine[Any, Any, list[Any]]) -> list[Any]:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    # A notebook's thread has a loop already, and a loop cannot be entered twice.
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(asyncio.run, coroutine).result()
