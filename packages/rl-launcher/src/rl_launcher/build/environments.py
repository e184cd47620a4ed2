"""The environment that a recipe names in `env`, or that is given as Python objects."""

from collections.abc import Sequence

from rl_algorithms.contracts import Conversation, EnvironmentReturn
from rl_algorithms.environments import EnvironmentFactoryError
from rl_algorithms.environments.counted_environment import Judge
from rl_launcher.errors import Refusal
from rl_launcher.schema import HOW_TO_JUDGE, EnvironmentConfig
from rl_launcher.user_code import NO_OBJECTS, Objects, load_function

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
    reward, made, name = objects.reward, objects.environment, ""
    if reward is not None and made is not None:
        raise Refusal("reward and environment are both given, and one of them scores a response; leave one out")
    if made is not None:
        if not callable(made):
            raise Refusal(
                f"environment must be a class or function that makes an environment, found an object of type "
                f"{type(made).__name__}; give its class, or lambda: environment"
            )
        name = f"environment={getattr(made, '__qualname__', type(made).__name__)}"
    elif reward is None and config is None:
        return NoEnvironment()
    elif reward is None and config is not None and config.environment is not None:
        name = f"env.environment={config.environment}"
        wanted = "a class or function that makes an environment (env.environment)"
        made = load_function(config.environment, wanted=wanted)
    elif reward is None and config is not None:
        if config.reward is not None:
            reward = load_function(config.reward, wanted="a reward function (env.reward)")
        else:
            reward = {
                key: load_function(text, wanted=f"a reward function (env.rewards.{key})")
                for key, text in config.rewards.items()
            }
    options = config or DEFAULTS
    try:
        return options.of_rewards(reward) if made is None else options.of_factory(made, name=name)
    except EnvironmentFactoryError as error:
        raise Refusal(str(error)) from error


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
