"""The environment that a recipe names in `env`, or that is given as Python objects."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rl_algorithms.contracts import Conversation, EnvironmentReturn
from rl_algorithms.environments import (
    EnvironmentFactoryError,
    RewardFunctionEnvironment,
    counted,
    environment_from,
)
from rl_launcher.errors import Refusal
from rl_launcher.run_parts import Judge
from rl_launcher.schema import HOW_TO_JUDGE, EnvironmentConfig
from rl_launcher.user_code import NO_OBJECTS, Objects, load_function

__all__ = ["NoEnvironment", "load_environment"]


DEFAULTS = EnvironmentConfig(reward="given:object")
"""Whose options apply to Python objects in a recipe without `env`."""


def load_environment(config: EnvironmentConfig | None, objects: Objects = NO_OBJECTS) -> Judge:
    """Make the environment: reward functions, or an environment of several turns.

    Args:
        config: the recipe's `env`; None without one.
        objects: `reward` (a function, or a list or dict of functions) replaces `env.reward` and `env.rewards`;
            `environment` (a class or function that makes one) replaces `env.environment`. The other keys of `env`
            apply to them too.

    Raises:
        ValueError: a reward is not a function, an environment cannot be made or is none, or `env.weights` has a name
            that no reward has.
    """
    options = config or DEFAULTS
    if objects.reward is not None and objects.environment is not None:
        raise Refusal("reward and environment are both given, and one of them scores a response; leave one out")
    if objects.environment is not None:
        made = objects.environment
        if not callable(made):
            raise Refusal(
                f"environment must be a class or function that makes an environment, found an object of type "
                f"{type(made).__name__}; give its class, or lambda: environment"
            )
        return _of_several_turns(made, f"environment={getattr(made, '__qualname__', type(made).__name__)}", options)
    if objects.reward is not None:
        return _of_rewards(objects.reward, options)
    if config is None:
        return NoEnvironment()
    if config.environment is not None:
        wanted = "a class or function that makes an environment (env.environment)"
        factory = load_function(config.environment, wanted=wanted)
        return _of_several_turns(factory, f"env.environment={config.environment}", config)
    if config.reward is not None:
        return _of_rewards(load_function(config.reward, wanted="a reward function (env.reward)"), config)
    functions = {
        name: load_function(text, wanted=f"a reward function (env.rewards.{name})")
        for name, text in config.rewards.items()
    }
    return _of_rewards(functions, config)


def _of_rewards(reward: Any, options: EnvironmentConfig) -> Judge:
    limit = {} if options.timeout_s is None else {"timeout_s": options.timeout_s}
    return RewardFunctionEnvironment(reward=reward, weights=options.weights, on_error=options.on_error, **limit)


def _of_several_turns(factory: Callable[..., Any], name: str, options: EnvironmentConfig) -> Judge:
    if options.on_error == "zero":
        raise Refusal(
            f"env.on_error=zero scores a response as 0, and {name} scores conversations; set stop, or fail, which "
            f"leaves a conversation that failed out of training"
        )
    if options.options:
        given = ", ".join(f"{key}={value!r}" for key, value in options.options.items())
        name = f"{name}, called with env.options ({given}),"
    try:
        environment = environment_from(
            partial(factory, **options.options), name=name, timeout_s=options.timeout_s, on_error=options.on_error
        )
    except EnvironmentFactoryError as error:
        raise Refusal(str(error)) from error
    return counted(environment)


class NoEnvironment:
    """Stands in where a recipe has no `env`; such a run scores nothing."""

    def __init__(self) -> None:
        self.errors = 0
        """Always 0: nothing is scored."""

    def check(self, columns: set[str]) -> None:
        """Accept any columns."""

    def step(self, conversations: Sequence[Conversation]) -> Sequence[EnvironmentReturn]:
        """Refuse.

        Raises:
            Refusal: always.
        """
        raise Refusal(f"{len(conversations)} responses are to be scored, and env is missing; {HOW_TO_JUDGE}")
