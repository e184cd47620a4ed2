"""The single-turn environment that plain reward functions make: one, or several by name and weight.

A reward function is anything that can be called with keyword lists, one item per answer, as in TRL:

    def reward(prompts, completions, answer, **columns) -> list[float]

`prompts` are the prompts' last messages, `completions` the answers as text; every column of the data row comes by its
own name. Arguments that the function does not name are not passed, so `**columns` is optional. Coroutine functions are
awaited together. For each answer a function returns

    a number        the reward
    None            the function does not apply to this answer
    a `Score`       a number with figures for the log, or the reason why there is none

    R = sum over functions k that apply of w_k r_k

An answer to which no function applies has no reward, and is reported as failed: it is not trained on.

Every call has a deadline, `timeout_s`. On the main thread a plain function is interrupted at its deadline, wherever it
sleeps or waits, and ends. On other threads, as in asynchronous GRPO, Python cannot interrupt it: it is abandoned on a
daemon thread, where it may go on until the process ends; see `rl_algorithms.environments.interruption`.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal, TypeAlias

from rl_algorithms.choices import check_choices
from rl_algorithms.contracts import Conversation, Environment, EnvironmentReturn
from rl_algorithms.environments.calling import ALWAYS_GIVEN, NAMED, RewardError, call_all, name_of
from rl_algorithms.environments.deadlines import TimedOutError
from rl_algorithms.environments.scores import Score

__all__ = ["RewardError", "RewardFunctionEnvironment", "RewardTimeoutError"]


class RewardTimeoutError(RewardError):
    """A reward function was still running at its deadline; the message names it, the answer and the seconds."""


RewardFunction: TypeAlias = Callable[..., Any] | Environment
"""A function of keyword lists, or a single-turn environment that stands for one."""

ONLY = ""
"""The name of a function that is the only one: its number is the reward and has no parts."""


@dataclass(slots=True, kw_only=True)
class RewardFunctionEnvironment:
    """A single-turn environment made of reward functions; every conversation ends after one answer.

    Raises, from `step`:
        RewardTimeoutError: a function took longer than `timeout_s`, unless `on_error` says otherwise.
        RewardError: a function raised, returned another number of rewards than it got answers, or a reward that is
            neither finite nor None, unless `on_error` says otherwise; or the columns of the data do not fit.
        CannotJudgeError: a verifier can judge nothing on this machine, whatever `on_error` says.
    """

    reward: RewardFunction | Mapping[str, RewardFunction] | Sequence[RewardFunction]
    """The reward function; or several, by name or as a list under their own names, whose weighted rewards are the parts
    of the reward (`EnvironmentReturn.rewards`). Numbers may be Python's, numpy's or one-element tensors."""

    weights: Mapping[str, float] = field(default_factory=dict)
    """What the functions count for; 1 for those that are not named. At 0 a function is measured and not
    rewarded: where it fails, the metric `NAME/failed` says so, and the answer is judged without it."""

    on_error: Literal["stop", "zero", "fail"] = "stop"
    """What becomes of an answer that cannot be judged: `"zero"` counts it as reward 0, `"fail"` leaves it out of
    training and of every baseline; both add it to `errors`."""

    timeout_s: float | None = 300.0
    """Seconds that a function, plain or coroutine, may take for one batch; None waits for ever."""

    errors: int = field(default=0, init=False)
    """Answers that could not be judged, so far."""

    def __post_init__(self) -> None:
        check_choices(self)
        self._check_functions()
        if unknown := sorted(set(self.weights) - set(self._functions())):
            raise ValueError(
                f"weights name {', '.join(map(repr, unknown))}, and the reward functions are "
                f"{', '.join(map(repr, self._functions()))}"
            )
        for name, weight in self.weights.items():
            if not math.isfinite(weight):
                raise ValueError(f"weights[{name!r}]={weight} must be finite")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ValueError(f"timeout_s={self.timeout_s} must be > 0")

    def step(self, conversations: Sequence[Conversation]) -> list[EnvironmentReturn]:
        """Judge every answer in one call of each function; one answer at a time only where that call failed."""
        if not conversations:
            return []
        self.check(name for conversation in conversations for name in conversation.row)
        functions = self._functions()
        called = call_all(list(functions.values()), conversations, timeout_s=self.timeout_s)
        columns = [
            self._settled(function, returned, conversations)
            for function, returned in zip(functions.values(), called, strict=True)
        ]
        return [self._return(dict(zip(functions, scores, strict=True))) for scores in zip(*columns, strict=True)]

    def check(self, columns: Iterable[str]) -> None:
        """Refuse a function that requires an argument which data rows with these columns cannot give.

        Raises:
            RewardError: it does, whatever `on_error` says: such a function could never judge anything. Or a column has
                the name of what is always given.
        """
        columns = {*columns}
        given = {*columns, *ALWAYS_GIVEN}
        functions = [each for each in self._functions().values() if not isinstance(each, Environment)]
        if functions and (taken := [name for name in ALWAYS_GIVEN if name in columns]):
            raise RewardError(
                f"the data rows have a column {taken[0]!r}, and reward functions are given something else by that "
                f"name; rename the column"
            )
        for function in functions:
            parameters = inspect.signature(function).parameters.values()
            required = [each.name for each in parameters if each.default is each.empty and each.kind in NAMED]
            if missing := [name for name in required if name not in given]:
                raise RewardError(
                    f"the reward function {name_of(function)} requires {', '.join(missing)}, and the data rows have "
                    f"{', '.join(sorted(given))} ({' and '.join(ALWAYS_GIVEN)} are always given)"
                )

    def _functions(self) -> Mapping[str, RewardFunction]:
        if isinstance(self.reward, Mapping):
            return self.reward
        if isinstance(self.reward, Sequence):
            return {_short_name(function): function for function in self.reward}
        return {ONLY: self.reward}

    def _check_functions(self) -> None:
        """Refuse what is no function, and a list in which two have the same name."""
        if isinstance(self.reward, Mapping):
            given = {f"reward[{name!r}]": function for name, function in self.reward.items()}
        elif isinstance(self.reward, Sequence):
            given = {f"reward[{index}]": function for index, function in enumerate(self.reward)}
        else:
            given = {"reward": self.reward}
        if not given:
            raise RewardError(f"reward={self.reward!r} has no function; give one, or several by name")
        for place, function in given.items():
            if not callable(function) and not isinstance(function, Environment):
                raise RewardError(
                    f"{place} must be a function (or a list or dict of functions), found {type(function).__name__} "
                    f"{function!r:.60}"
                )
        names = [_short_name(function) for function in given.values()]
        if not isinstance(self.reward, Mapping) and (twice := {name for name in names if names.count(name) > 1}):
            raise RewardError(f"reward has several functions named {', '.join(sorted(twice))}; give a dict by name")

    def _settled(
        self,
        function: RewardFunction,
        returned: list[Any] | Exception,
        conversations: Sequence[Conversation],
    ) -> list[Score | None]:
        """One score per answer, whatever the function did."""
        if isinstance(returned, Exception):
            returned = self._one_by_one(function, returned, conversations)
        return [self._score(function, *pair) for pair in zip(conversations, returned, strict=True)]

    def _one_by_one(
        self, function: RewardFunction, error: Exception, conversations: Sequence[Conversation]
    ) -> list[Any]:
        if isinstance(error, TimedOutError):  # calling again would wait as long again, for every answer
            if self.on_error == "stop":
                raise RewardTimeoutError(self._timed_out(function, conversations)) from error
            return [error] * len(conversations)
        alone: list[Any] = []
        for conversation in conversations:
            (returned,) = call_all([function], [conversation], timeout_s=self.timeout_s)
            if isinstance(returned, Exception) and self.on_error == "stop":
                raise RewardError(_describe(function, conversation, returned)) from returned
            alone.append(returned if isinstance(returned, Exception) else returned[0])
        if self.on_error == "stop":
            raise RewardError(_describe(function, None, error)) from error
        return alone

    def _score(self, function: RewardFunction, conversation: Conversation, reward: Any) -> Score | None:
        if reward is None:
            return None
        if isinstance(reward, Score) and reward.failed is not None:
            return reward
        if math.isfinite(number := _number(reward)):
            return reward if isinstance(reward, Score) else Score(number)
        cause = reward if isinstance(reward, Exception) else None
        what = cause if cause is not None else f"it returned {reward!r}, which is not a finite number"
        reason = _describe(function, conversation, what)
        if self.on_error == "stop":
            raise RewardError(reason) from cause
        self.errors += 1
        return Score(0.0) if self.on_error == "zero" else Score.failure(reason)

    def _timed_out(self, function: RewardFunction, conversations: Sequence[Conversation]) -> str:
        first = conversations[0]
        batch = f"a batch of {len(conversations)} answers, the first: " * (len(conversations) > 1)
        return (
            f"the reward function {name_of(function)} took longer than timeout_s={self.timeout_s:g} (env.timeout_s in "
            f"a recipe) for {batch}prompt {first.messages[-1]['content']!r}, answer {first.answer!r}. Make it faster, "
            f"raise timeout_s, or leave such answers out of training by on_error='fail' (env.on_error in a recipe)"
        )

    def _return(self, scores: Mapping[str, Score | None]) -> EnvironmentReturn:
        applied = {name: score for name, score in scores.items() if score is not None}
        measured = {name for name in scores if self.weights.get(name, 1.0) == 0.0}
        reasons = [score.failed for name, score in applied.items() if score.failed is not None and name not in measured]
        if not applied or (scores.keys() > measured >= applied.keys()):
            asked = [name_of(each) for name, each in self._functions().items() if name not in measured]
            who = f"the reward function `{asked[0]}`" if len(asked) == 1 else f"each of {', '.join(asked)}"
            reasons = [f"no reward function applies to this answer: {who} returned None for it"]
        parts = {
            name: 0.0 if reasons or name not in applied else self.weights.get(name, 1.0) * applied[name]
            for name in scores
            if name not in measured
        }
        return EnvironmentReturn(
            reward=math.fsum(parts.values()),
            terminated=True,
            rewards={} if ONLY in parts else parts,
            metrics=_metrics(applied, measured),
            failed="; ".join(reasons) or None,
        )


def _short_name(function: RewardFunction) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _metrics(applied: Mapping[str, Score], measured: AbstractSet[str]) -> dict[str, float]:
    """Each function's own number, unweighted, and what it says besides; only where it applies."""
    metrics: dict[str, float] = {}
    for name, score in applied.items():
        if name != ONLY and score.failed is None:
            metrics[name] = float(score)
        prefix = f"{name}/" if name != ONLY else ""
        if name in measured:
            metrics[f"{prefix}failed"] = float(score.failed is not None)
        metrics.update({f"{prefix}{key}": float(value) for key, value in score.metrics.items()})
    return metrics


def _describe(function: RewardFunction, conversation: Conversation | None, error: Exception | str) -> str:
    what = error if isinstance(error, str | RewardError) else f"it raised {type(error).__name__}: {error}"
    sample = (
        "the batch as a whole, though each answer alone"
        if conversation is None
        else f"prompt {conversation.messages[-1]['content']!r}, answer {conversation.answer!r}"
    )
    return (
        f"the reward function {name_of(function)} cannot judge {sample}: {what}. "
        f"Mend it, or count such answers as 0 by on_error='zero' (env.on_error in a recipe), or leave them out of "
        f"training by 'fail'"
    )


def _number(reward: Any) -> float:
    """The reward as a float; NaN for what is no number."""
    if not isinstance(reward, Real) and not hasattr(reward, "item"):
        return math.nan
    try:
        return float(reward)
    except (ValueError, TypeError, RuntimeError, OverflowError):  # a tensor of several elements, 10**400
        return math.nan
