"""The environment that a recipe names: a judge made of reward functions, or one of several turns.

Runs the user's factory once, to see what it makes; asks no policy anything.
"""

import asyncio
import inspect
from collections.abc import Sequence
from typing import Any

from rl_algorithms.contracts import Conversation, Environment, EnvironmentReturn
from rl_algorithms.environments import (
    ConcurrentEnvironment,
    ConcurrentResettingEnvironment,
    Episode,
    EpisodeEnvironment,
    RewardFunctionEnvironment,
)
from rl_launcher.errors import LauncherError
from rl_launcher.parts import Judge
from rl_launcher.recipe_schema import HOW_TO_JUDGE, EnvironmentConfig
from rl_launcher.turns import counting
from rl_launcher.user_code import load_function

__all__ = ["Unjudged", "load_environment"]

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
            LauncherError: always.
        """
        raise LauncherError(f"{len(conversations)} answers are to be judged, and env is missing; {HOW_TO_JUDGE}")


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
        raise LauncherError(
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
        raise LauncherError(
            f"env.environment={text}, called with env.options ({said or 'none'}), raised {type(error).__name__}: "
            f"{error}"
        ) from error
    if _is_episode(first):
        _let_go(first)
        timeout_s = EPISODE_TIMEOUT_S if config.timeout_s is None else config.timeout_s
        return EpisodeEnvironment(make, timeout_s=timeout_s, on_error=config.on_error)
    if not callable(getattr(first, "step", None)):
        raise LauncherError(
            f"env.environment={text} made {type(first).__name__}, which has no step; it must be an environment (step "
            f"of conversations) or an episode (reset, step of an answer, close)"
        )
    if inspect.iscoroutinefunction(first.step):
        return _concurrent(first, config)
    if config.timeout_s is not None:
        raise LauncherError(
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
