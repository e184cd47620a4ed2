"""Make the environment that a recipe names, or that is given as Python objects.

The user's factory is run once when the environment is made, to see which kind it makes.
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

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
from rl_launcher.user_code import NO_OBJECTS, Objects, load_function

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


def load_environment(config: EnvironmentConfig | None, objects: Objects = NO_OBJECTS) -> Judge:
    """The environment that scores responses: reward functions, or an environment of several turns.

    Args:
        config: the recipe's `env`; None without one.
        objects: `reward` (a function, or a list or dict of functions) replaces `env.reward` and `env.rewards`;
            `environment` (a class or function that makes one) replaces `env.environment`. The other keys of `env`
            apply to them too.

    Raises:
        ValueError: a reward is not a function, an environment cannot be made or is none, or `env.weights` has a name
            that no reward has.
    """
    if objects.reward is not None and objects.environment is not None:
        raise Refusal("reward and environment are both given, and one of them scores a response; leave one out")
    if objects.environment is not None:
        if not callable(objects.environment):
            raise Refusal(
                f"environment must be a class or function that makes an environment, found an object of type "
                f"{type(objects.environment).__name__}; give its class, or lambda: environment"
            )
        name = f"environment={getattr(objects.environment, '__qualname__', type(objects.environment).__name__)}"
        return counting(_of_several_turns(objects.environment, name, config or _Defaults()))
    if objects.reward is not None:
        return _of_rewards(_reward_functions(objects.reward), config or _Defaults())
    if config is None:
        return Unjudged()
    if config.environment is not None:
        factory = load_function(
            config.environment, wanted="a class or function that makes an environment (env.environment)"
        )
        return counting(_of_several_turns(factory, f"env.environment={config.environment}", config))
    if config.reward is not None:
        return _of_rewards(load_function(config.reward, wanted="a reward function (env.reward)"), config)
    return _of_rewards(
        {
            name: load_function(text, wanted=f"a reward function (env.rewards.{name})")
            for name, text in config.rewards.items()
        },
        config,
    )


@dataclass(frozen=True, slots=True)
class _Defaults:
    """What applies to Python objects where the recipe has no `env`."""

    weights: Mapping[str, float] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None
    on_error: Literal["stop", "zero", "fail"] = "stop"


def _of_rewards(reward: Any, config: EnvironmentConfig | _Defaults) -> Judge:
    return RewardFunctionEnvironment(reward=reward, weights=config.weights, on_error=config.on_error)


def _reward_functions(reward: Any) -> Any:
    """One function as it is; several by name, those of a list by their own names."""
    if isinstance(reward, Mapping):
        named = [(str(name), function) for name, function in reward.items()]
    elif isinstance(reward, list | tuple):
        named = [(getattr(each, "__name__", type(each).__name__), each) for each in reward]
    else:
        named = [("", reward)]
    for index, (name, function) in enumerate(named):
        if not callable(function) and not isinstance(function, Environment):
            which = f"[{name!r}]" if isinstance(reward, Mapping) else f"[{index}]" * (reward is not function)
            raise Refusal(
                f"reward{which} must be a function (or a list or dict of functions), found {type(function).__name__} "
                f"{function!r:.60}"
            )
    names = [name for name, _ in named]
    if not named:
        raise Refusal(f"reward={reward!r} has no function; give one, or several")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise Refusal(f"reward has several functions named {', '.join(twice)}; give a dict, name -> function")
    return reward if names == [""] and not isinstance(reward, Mapping) else dict(named)


def _of_several_turns(factory: Callable[..., Any], name: str, config: EnvironmentConfig | _Defaults) -> Environment:
    if config.on_error == "zero":
        raise Refusal(
            f"env.on_error=zero scores a response as 0, and {name} scores conversations; set stop, or fail, which "
            f"leaves a conversation that failed out of training"
        )

    def make() -> Any:
        return factory(**config.options)

    try:
        first = make()
    except Exception as error:
        said = ", ".join(f"{key}={value!r}" for key, value in config.options.items())
        raise Refusal(
            f"{name}, called with env.options ({said or 'none'}), raised {type(error).__name__}: {error}"
        ) from error
    if _is_episode(first):
        _let_go(first)
        timeout_s = EPISODE_TIMEOUT_S if config.timeout_s is None else config.timeout_s
        return EpisodeEnvironment(make, timeout_s=timeout_s, on_error=config.on_error)
    if not callable(getattr(first, "step", None)):
        raise Refusal(
            f"{name} made {type(first).__name__}, which has no step; it must be an environment (step of conversations) "
            f"or an episode (reset, step of a response, close)"
        )
    if inspect.iscoroutinefunction(first.step):
        return _concurrent(first, config)
    if config.timeout_s is not None:
        raise Refusal(
            f"env.timeout_s={config.timeout_s} limits one conversation, and {name} scores whole batches at once; leave "
            f"it out, or write an episode"
        )
    batch: Environment = first
    return batch


def _concurrent(environment: Any, config: EnvironmentConfig | _Defaults) -> Environment:
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
