"""The environment that a recipe names.

Judges nothing itself.

Runs the user's factory once, to see what it makes; asks no policy anything.
"""

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from rl_algorithms.contracts import Conversation, Environment, EnvironmentReturn, EpisodeStart, ResettingEnvironment
from rl_algorithms.environments import (
    ConcurrentEnvironment,
    ConcurrentResettingEnvironment,
    Episode,
    EpisodeEnvironment,
    RewardFunctionEnvironment,
)
from rl_launcher.errors import Refusal
from rl_launcher.run_parts import Judge
from rl_launcher.schema import HOW_TO_JUDGE, EnvironmentConfig
from rl_launcher.user_code import load_function

__all__ = ["CountingEnvironment", "CountingResettingEnvironment", "Unjudged", "counting", "load_environment"]


class CountingEnvironment:
    """An environment whose failed rollouts are counted in `errors`."""

    def __init__(self, inner: Environment) -> None:
        self.inner: Any = inner
        self.errors = 0
        """Rollouts that failed so far: a passed deadline, a broken tool."""

    def check(self, columns: set[str]) -> None:
        """Nothing is asked of the data: what an episode needs of its row, it says itself when it begins."""

    def step(self, conversations: Sequence[Conversation]) -> Sequence[EnvironmentReturn]:
        """As the environment's."""
        returns: Sequence[EnvironmentReturn] = self.inner.step(conversations)
        self.errors += sum(each.failed is not None for each in returns)
        return returns

    def close(self) -> None:
        """End its threads and episodes, where it has any."""
        close = getattr(self.inner, "close", None)
        if callable(close):
            close()


class CountingResettingEnvironment(CountingEnvironment):
    """One that says itself how an episode begins."""

    def reset(self, rows: Sequence[Mapping[str, object]], *, seeds: Sequence[int]) -> Sequence[EpisodeStart]:
        """As the environment's."""
        starts: Sequence[EpisodeStart] = self.inner.reset(rows, seeds=seeds)
        return starts


def counting(environment: Environment) -> Judge:
    """`environment`, counted; with `reset` only if it has one."""
    resets = isinstance(environment, ResettingEnvironment)
    return CountingResettingEnvironment(environment) if resets else CountingEnvironment(environment)


EPISODE_TIMEOUT_S = 60.0


class Unjudged:
    """In the place of a judge where a recipe has none: nothing that such a run does asks it."""

    def __init__(self) -> None:
        self.errors = 0
        """Answers that could not be judged: none were to be."""

    def check(self, columns: set[str]) -> None:
        """Nothing is asked of the data."""

    def step(self, conversations: Sequence[Conversation]) -> Sequence[EnvironmentReturn]:
        """Refuse.

        Raises:
            Refusal: always.
        """
        raise Refusal(f"{len(conversations)} answers are to be judged, and env is missing; {HOW_TO_JUDGE}")


def load_environment(config: EnvironmentConfig | None) -> Judge:
    """What judges answers: a reward function, several by name, or an environment of several turns; None is nobody.

    Raises:
        ValueError: one of them is no function, cannot be made, or is no environment; `weights` names none of them.
    """
    if config is None:
        return Unjudged()
    if config.environment is not None:
        return counting(_of_several_turns(config.environment, config))
    if config.reward is not None:
        reward: Any = load_function(config.reward, wanted="a reward function (env.reward)")
    else:
        reward = {
            name: load_function(text, wanted=f"a reward function (env.rewards.{name})")
            for name, text in config.rewards.items()
        }
    return RewardFunctionEnvironment(reward=reward, weights=config.weights, on_error=config.on_error)


def _of_several_turns(text: str, config: EnvironmentConfig) -> Environment:
    if config.on_error == "zero":
        raise Refusal(
            "env.on_error=zero counts an answer as 0, and env.environment judges conversations; say stop, or fail, "
            "which leaves a conversation that broke out of training"
        )
    factory = load_function(text, wanted="a class or function that makes an environment (env.environment)")

    def make() -> Any:
        return factory(**config.options)

    try:
        first = make()
    except Exception as error:
        said = ", ".join(f"{name}={value!r}" for name, value in config.options.items())
        raise Refusal(
            f"env.environment={text}, called with env.options ({said or 'none'}), raised {type(error).__name__}: "
            f"{error}"
        ) from error
    if _is_episode(first):
        _let_go(first)
        timeout_s = EPISODE_TIMEOUT_S if config.timeout_s is None else config.timeout_s
        return EpisodeEnvironment(make, timeout_s=timeout_s, on_error=config.on_error)
    if not callable(getattr(first, "step", None)):
        raise Refusal(
            f"env.environment={text} made {type(first).__name__}, which has no step; it must be an environment (step "
            f"of conversations) or an episode (reset, step of an answer, close)"
        )
    if inspect.iscoroutinefunction(first.step):
        return _concurrent(first, config)
    if config.timeout_s is not None:
        raise Refusal(
            f"env.timeout_s={config.timeout_s} bounds one conversation, and env.environment={text} judges whole "
            f"batches at once; leave it out, or write an episode"
        )
    batch: Environment = first
    return batch


def _concurrent(environment: Any, config: EnvironmentConfig) -> Environment:
    timeout_s = EPISODE_TIMEOUT_S if config.timeout_s is None else config.timeout_s
    wrap: Any = ConcurrentResettingEnvironment if hasattr(environment, "reset") else ConcurrentEnvironment
    wrapped: Environment = wrap(environment, timeout_s=timeout_s, on_error=config.on_error)
    return wrapped


def _is_episode(made: Any) -> bool:
    """An episode is reset with one row; an environment of a batch with rows, or not at all."""
    if not isinstance(made, Episode):
        return False
    try:
        return "rows" not in inspect.signature(made.reset).parameters
    except (TypeError, ValueError):  # of a function written in C
        return True


def _let_go(episode: Episode) -> None:
    closing = episode.close()
    if inspect.iscoroutine(closing):
        asyncio.run(closing)
