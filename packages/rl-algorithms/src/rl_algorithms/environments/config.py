"""The configuration of what scores responses, and the environment that it describes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

from rl_algorithms.choices import check_fields
from rl_algorithms.environments.counted_environment import CountedEnvironment, counted
from rl_algorithms.environments.factory import EnvironmentFactoryError, environment_from
from rl_algorithms.environments.reward_function import RewardFunctionEnvironment

__all__ = ["EnvironmentConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentConfig:
    """What gives a response its reward."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid"}

    reward: str | None = None
    """`package.module:function` or `file.py:function`. It is called with keyword lists, `prompts`, `completions` and
    every column of the data, and returns one number for each response."""

    rewards: dict[str, str] = field(default_factory=dict)
    """Several such functions by name, instead of `reward`. Their weighted sum is the reward, and each is logged."""

    weights: dict[str, float] = field(default_factory=dict)
    """Weight of each of `rewards` in the sum; 1 for those not named, and 0 logs a reward without using it. If each
    reward is normalized separately, `grpo.objective.advantage.reward_weights` weights the normalized ones."""

    environment: str | None = None
    """`package.module:name` or `file.py:name` of a class or function that makes a multi-turn environment: a
    `rl_algorithms.contracts.Environment`, or an episode as in `rl_algorithms.environments.games`. Instead of a reward;
    `grpo.max_turns` bounds the number of responses."""

    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for `environment`."""

    timeout_s: float | None = None
    """Deadline in seconds for one call of a reward function, or for an environment's reply to one response. A call that
    misses it is handled as `on_error` says; other rollouts are not affected. Null takes the default: 300 for reward
    functions, 60 for environments."""

    on_error: Literal["stop", "zero", "fail"] = "stop"
    """What to do with a response for which the function raises or returns NaN. `stop` ends the run; `zero` gives it
    the reward 0; `fail` leaves it out of training and of every baseline. The last two log how many there were."""

    def __post_init__(self) -> None:
        given = [name for name in ("reward", "rewards", "environment") if getattr(self, name)]
        if len(given) != 1:
            found = ", ".join(f"{name}={getattr(self, name)}" for name in given) or "none of them"
            raise ValueError(
                f"{found}: a response gets its reward from one of `reward`, a function, `rewards`, several by name, "
                f"and `environment`, of several turns; give one, and set the others to null or {{}}"
            )
        if self.environment is None and self.options:
            raise ValueError("options are the arguments of an environment, and env.environment names none")
        check_fields(self, above={"timeout_s": 0})
        if unknown := sorted(set(self.weights) - set(self.rewards)):
            raise ValueError(
                f"weights names {', '.join(unknown)}, and the rewards are {', '.join(self.rewards) or 'not named'}"
            )

    def of_rewards(self, reward: Any) -> RewardFunctionEnvironment:
        """The environment of one turn that `reward` makes: a function, or several by name.

        Raises:
            ValueError: a reward is not a function, or `weights` has a name that no reward has.
        """
        limit = {} if self.timeout_s is None else {"timeout_s": self.timeout_s}
        return RewardFunctionEnvironment(reward=reward, weights=self.weights, on_error=self.on_error, **limit)

    def of_factory(self, factory: Callable[..., Any], *, name: str) -> CountedEnvironment:
        """The environment that `factory`, called with `options`, makes; error messages call it `name`.

        Raises:
            EnvironmentFactoryError: it makes no environment, or `on_error` is for single responses.
        """
        if self.on_error == "zero":
            raise EnvironmentFactoryError(
                f"env.on_error=zero scores a response as 0, and {name} scores conversations; set stop, or fail, which "
                f"leaves a conversation that failed out of training"
            )
        if self.options:
            given = ", ".join(f"{key}={value!r}" for key, value in self.options.items())
            name = f"{name}, called with env.options ({given}),"
        made = partial(factory, **self.options)
        return counted(environment_from(made, name=name, timeout_s=self.timeout_s, on_error=self.on_error))
