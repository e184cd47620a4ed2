"""An environment of several turns, as a run holds it: what failed is counted, and it is closed with the run.

Judges nothing itself.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rl_algorithms.contracts import Conversation, Environment, EnvironmentReturn, EpisodeStart, ResettingEnvironment
from rl_launcher.parts import Judge

__all__ = ["CountingEnvironment", "CountingResettingEnvironment", "counting"]


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
