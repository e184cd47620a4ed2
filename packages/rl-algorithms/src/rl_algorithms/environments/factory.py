"""An `Environment` from the class or function that makes one, whichever kind of object it makes.

an episode (reset, step of a response, close)   one object for each conversation, on threads or an event loop
an environment with `async def step`            one coroutine for each conversation
any other environment                           as it is: it scores whole batches
"""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from rl_algorithms.contracts import Environment, matches
from rl_algorithms.environments.asynchronous import ConcurrentEnvironment, ConcurrentResettingEnvironment
from rl_algorithms.environments.episodes import Episode, EpisodeEnvironment
from rl_algorithms.environments.executor import OnError

__all__ = ["EnvironmentFactoryError", "environment_from"]

TIMEOUT_S = 60.0


class EnvironmentFactoryError(ValueError):
    """A factory raised, or made something that is not an environment; the message names it."""


def environment_from(
    factory: Callable[[], Any], *, name: str, timeout_s: float | None = None, on_error: OnError = "stop"
) -> Environment:
    """Make an environment. The factory is called at once, to see which kind of object it makes.

    Args:
        factory: makes an episode or an environment; it is called for each conversation if it makes episodes.
        name: what error messages call it.
        timeout_s: seconds for one response, 60 by default; only for episodes and coroutines.
        on_error: `"stop"` raises an error of one conversation; `"fail"` leaves that conversation out of training.

    Raises:
        EnvironmentFactoryError: the factory raised (the cause is chained), made no environment, or made one that scores
            whole batches although a `timeout_s` is given, or one whose methods take other arguments.
    """
    try:
        first = factory()
    except Exception as error:
        raise EnvironmentFactoryError(f"{name} raised {type(error).__name__}: {error}") from error
    limit = TIMEOUT_S if timeout_s is None else timeout_s
    if _is_episode(first):
        closing = first.close()
        if inspect.iscoroutine(closing):
            asyncio.run(closing)
        return EpisodeEnvironment(factory, timeout_s=limit, on_error=on_error)
    if not callable(getattr(first, "step", None)):
        raise EnvironmentFactoryError(
            f"{name} made {type(first).__name__}, which has no step; it must be an environment (step of conversations) "
            f"or an episode (reset, step of a response, close)"
        )
    if inspect.iscoroutinefunction(first.step):
        wrap: Any = ConcurrentResettingEnvironment if hasattr(first, "reset") else ConcurrentEnvironment
        concurrent: Environment = wrap(first, timeout_s=limit, on_error=on_error)
        return concurrent
    if timeout_s is not None:
        raise EnvironmentFactoryError(
            f"timeout_s={timeout_s} (env.timeout_s in a recipe) limits one conversation, and {name} scores whole "
            f"batches at once; leave it out, or write an episode"
        )
    _check_signatures(first)
    batch: Environment = first
    return batch


def _is_episode(made: Any) -> bool:
    """Episodes are reset with one row; environments of a batch with `rows`, or not at all."""
    if not matches(made, Episode):
        return False
    try:
        return "rows" not in inspect.signature(made.reset).parameters
    except (TypeError, ValueError):  # a function written in C has no signature
        return True


def _check_signatures(environment: object) -> None:
    """Refuse methods that cannot be called as a loop calls them, which would raise far from what is to be corrected."""
    calls: dict[str, dict[str, Any]] = {"step": {}, "reset": {"seeds": []}}
    for name, named in calls.items():
        method: Any = getattr(environment, name, None)
        if method is None:
            continue
        try:
            inspect.signature(method).bind([], **named)
        except ValueError:
            continue  # written in C
        except TypeError as error:
            code = getattr(method, "__code__", None)
            place = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
            wanted = "step(conversations)" if name == "step" else "reset(rows, *, seeds)"
            raise EnvironmentFactoryError(
                f"env.environment: {getattr(method, '__qualname__', name)}{place} cannot be called as {wanted}: {error}"
            ) from error
