"""What an episode's author may return, made one: text or messages, a tuple of gymnasium's shape or ours.

Whatever cannot be carried is refused by name.
"""

import inspect
import math
from dataclasses import replace
from typing import Any

from rl_algorithms.contracts import EnvironmentReturn, EpisodeStart, Message

__all__ = ["EpisodeError", "as_return", "as_start", "shape_of"]

CARRIED_INFO = frozenset({"rewards", "metrics"})


class EpisodeError(ValueError):
    """An episode raised or returned something that makes no sense; the message names the row."""


def as_start(value: object) -> EpisodeStart:
    """What `reset` returned, as a start.

    Raises:
        EpisodeError: it is none.
    """
    if not isinstance(value, EpisodeStart):
        value = EpisodeStart(messages=_as_messages(value, what="reset"))
    if not value.messages:
        raise EpisodeError("reset returned no message, and the policy needs one to answer")
    if value.state is not None:
        raise EpisodeError("reset returned a state, and an episode keeps its state itself")
    return value


def as_return(value: Any) -> EnvironmentReturn:
    """What `step` returned, checked; without observations where it ended.

    Raises:
        EpisodeError: it makes no sense.
    """
    if isinstance(value, tuple) and len(value) == 5:
        value = _from_gymnasium(value)
    if not isinstance(value, EnvironmentReturn):
        raise EpisodeError(
            f"step returned {shape_of(value)}, and must return an EnvironmentReturn or "
            f"(observations, reward, terminated, truncated, info)"
        )
    if value.state is not None:
        raise EpisodeError("step returned a state, and an episode keeps its state itself")
    if value.failed is not None:
        return value
    if not math.isfinite(value.reward):
        raise EpisodeError(f"step returned reward={value.reward}, which is not finite")
    if value.terminated or value.truncated:
        return replace(value, observations=())
    if not value.observations:
        raise EpisodeError("step neither ended the episode nor returned an observation for the policy to answer")
    return value


def _from_gymnasium(value: tuple[Any, ...]) -> EnvironmentReturn:
    observations, reward, terminated, truncated, info = value
    if unknown := sorted(set(info) - CARRIED_INFO):
        raise EpisodeError(
            f"step returned info[{unknown[0]!r}], and only info['rewards'] and info['metrics'] are carried; "
            f"put numbers for the log into the latter"
        )
    ended = bool(terminated or truncated)
    return EnvironmentReturn(
        reward=float(reward),
        terminated=bool(terminated),
        truncated=bool(truncated),
        observations=() if ended else _as_messages(observations, what="step"),
        rewards={name: float(value) for name, value in info.get("rewards", {}).items()},
        metrics={name: float(value) for name, value in info.get("metrics", {}).items()},
    )


def _as_messages(value: object, *, what: str) -> tuple[Message, ...]:
    if isinstance(value, str):
        return ({"role": "user", "content": value},)
    messages = tuple(value) if isinstance(value, list | tuple) else ()
    if not messages or not all(isinstance(each, dict) and "role" in each for each in messages):
        coroutine = "; a coroutine function must be a method of its own" if inspect.isawaitable(value) else ""
        raise EpisodeError(
            f"{what} returned {shape_of(value)}, which is neither text nor a list of messages{coroutine}"
        )
    return messages


def shape_of(value: object) -> str:
    """A value in few words, for messages."""
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"{value!r:.80}" if value is None or isinstance(value, int | float) else f"a {type(value).__name__}"
