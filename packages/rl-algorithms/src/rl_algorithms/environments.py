"""Environments: what judges an answer. Here the single-turn one that a plain reward function makes.

A reward function is anything that can be called with keyword lists, one item per answer, as in TRL:

    def reward(prompts, completions, answer, **columns) -> list[float]

`prompts` are the prompts' last messages, `completions` the answers as text; every column of the data row comes by its
own name. Arguments that the function does not name are not passed, so `**columns` is optional.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal

from rl_algorithms.contracts import Conversation, EnvironmentReturn

__all__ = ["RewardError", "RewardFunctionEnvironment"]

ALWAYS_GIVEN = ("prompts", "completions")
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class RewardError(ValueError):
    """A reward function raised or returned something that is not a finite number; the message names the sample."""


@dataclass(slots=True, kw_only=True)
class RewardFunctionEnvironment:
    """A single-turn environment made of a reward function.

    Raises, from `step`:
        RewardError: the function raised, returned another number of rewards than it got answers, or a reward that is
            not finite, unless `on_error` is `"zero"`.
    """

    reward: Callable[..., Sequence[float]]
    """The reward function. Its numbers may be Python's, numpy's or one-element tensors."""

    on_error: Literal["stop", "zero"] = "stop"
    """`"zero"` counts an answer that cannot be judged as reward 0 and adds it to `errors`."""

    errors: int = field(default=0, init=False)
    """Answers counted as 0 because they could not be judged."""

    def step(self, conversations: Sequence[Conversation]) -> list[EnvironmentReturn]:
        """Judge every answer in one call of the function; one answer at a time only where that call failed."""
        self.check(name for conversation in conversations for name in conversation.row)
        try:
            rewards = self._call(conversations)
        except Exception as error:
            if self.on_error == "stop":
                raise RewardError(self._describe(self._culprit(conversations), error)) from error
            rewards = [self._one(conversation) for conversation in conversations]
        checked = [self._finite(*pair) for pair in zip(conversations, rewards, strict=True)]
        return [EnvironmentReturn(reward=reward, terminated=True) for reward in checked]

    def check(self, columns: Iterable[str]) -> None:
        """Refuse a function that requires an argument which data rows with these columns cannot give.

        Raises:
            RewardError: it does, whatever `on_error` says: such a function could never judge anything.
        """
        given = {*columns, *ALWAYS_GIVEN}
        parameters = inspect.signature(self.reward).parameters.values()
        required = [each.name for each in parameters if each.default is each.empty and each.kind in NAMED]
        if missing := [name for name in required if name not in given]:
            name = getattr(self.reward, "__qualname__", repr(self.reward))
            raise RewardError(
                f"the reward function {name} requires {', '.join(missing)}, and the data rows have "
                f"{', '.join(sorted(given))} ({' and '.join(ALWAYS_GIVEN)} are always given)"
            )

    def _call(self, conversations: Sequence[Conversation]) -> list[Any]:
        columns: dict[str, list[object]] = {
            name: [conversation.row.get(name) for conversation in conversations]
            for name in dict.fromkeys(name for conversation in conversations for name in conversation.row)
        }
        columns["prompts"] = [conversation.messages[-1]["content"] for conversation in conversations]
        columns["completions"] = [conversation.answer for conversation in conversations]
        returned = self.reward(**{name: columns[name] for name in _accepted(self.reward, columns)})
        if isinstance(returned, Mapping | str | bytes | set) or inspect.isawaitable(returned):
            raise RewardError(
                f"it returned a {type(returned).__name__}, and must return a list with a number per answer"
            )
        rewards: list[Any] = list(returned)
        if len(rewards) != len(conversations):
            raise RewardError(f"it returned {len(rewards)} rewards for {len(conversations)} answers")
        return rewards

    def _one(self, conversation: Conversation) -> Any:
        try:
            return self._call([conversation])[0]
        except Exception:  # noqa: BLE001 - the caller asked for on_error="zero"; `errors` reports it
            return math.nan

    def _finite(self, conversation: Conversation, reward: Any) -> float:
        if math.isfinite(number := _number(reward)):
            return number
        if self.on_error == "stop":
            raise RewardError(self._describe(conversation, f"it returned {reward!r}, which is not a finite number"))
        self.errors += 1
        return 0.0

    def _culprit(self, conversations: Sequence[Conversation]) -> Conversation | None:
        for conversation in conversations:
            try:
                self._call([conversation])
            except Exception:  # noqa: BLE001 - looking for the one that fails
                return conversation
        return None

    def _describe(self, conversation: Conversation | None, error: Exception | str) -> str:
        name = getattr(self.reward, "__qualname__", repr(self.reward))
        what = error if isinstance(error, str | RewardError) else f"it raised {type(error).__name__}: {error}"
        sample = (
            "the batch as a whole, though each answer alone"
            if conversation is None
            else f"prompt {conversation.messages[-1]['content']!r}, answer {conversation.answer!r}"
        )
        return (
            f"the reward function {name} cannot judge {sample}: {what}. "
            f"Mend it, or count such answers as 0 by on_error='zero' (env.on_error in a recipe)"
        )


def _accepted(function: Callable[..., object], columns: Mapping[str, object]) -> list[str]:
    """The names in `columns` that `function` takes."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return list(columns)
    return [parameter.name for parameter in parameters if parameter.name in columns]


def _number(reward: Any) -> float:
    """The reward as a float; NaN for what is no number."""
    if not isinstance(reward, Real) and not hasattr(reward, "item"):
        return math.nan
    try:
        return float(reward)
    except (ValueError, TypeError, RuntimeError, OverflowError):  # a tensor of several elements, 10**400
        return math.nan
