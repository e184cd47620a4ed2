"""An environment that counts its failed conversations, for a run that reports and saves their number."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from rl_algorithms.contracts import (
    Conversation,
    Environment,
    EnvironmentReturn,
    EpisodeStart,
    ResettingEnvironment,
    matches,
)

__all__ = ["CountedEnvironment", "CountedResettingEnvironment", "Judge", "counted"]


@runtime_checkable
class Judge(Environment, Protocol):
    """An environment that counts what it could not judge."""

    errors: int
    """Responses, or episodes, that could not be judged so far."""

    def check(self, columns: set[str]) -> None:
        """Refuse data without a column that the reward needs."""


def counted(environment: Environment) -> "CountedEnvironment":
    """Wrap `environment`; the result has a `reset` only if `environment` has one."""
    resets = matches(environment, ResettingEnvironment)
    return CountedResettingEnvironment(environment) if resets else CountedEnvironment(environment)


class CountedEnvironment:
    """An `Environment` that adds every conversation with `failed` set to `errors`."""

    def __init__(self, environment: Environment) -> None:
        self.inner: Any = environment
        self.errors = 0
        """Conversations that failed so far: a deadline that passed, a tool that broke."""

    def check(self, columns: set[str]) -> None:
        """Accept any columns: an episode says what it needs of its row when it starts."""

    def step(self, conversations: Sequence[Conversation]) -> Sequence[EnvironmentReturn]:
        """Step the wrapped environment and count what failed."""
        returns: Sequence[EnvironmentReturn] = self.inner.step(conversations)
        self.errors += sum(each.failed is not None for each in returns)
        return returns

    def close(self) -> None:
        """Close the wrapped environment, if it can be closed: its threads and episodes end."""
        close = getattr(self.inner, "close", None)
        if callable(close):
            close()


class CountedResettingEnvironment(CountedEnvironment):
    """A `CountedEnvironment` over one that starts its own episodes."""

    def reset(self, rows: Sequence[Mapping[str, object]], *, seeds: Sequence[int]) -> Sequence[EpisodeStart]:
        """Reset the wrapped environment."""
        starts: Sequence[EpisodeStart] = self.inner.reset(rows, seeds=seeds)
        return starts
