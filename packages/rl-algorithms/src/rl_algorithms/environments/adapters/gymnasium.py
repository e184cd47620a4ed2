"""Gymnasium's environments as episodes. Needs `rl-algorithms[gymnasium]` (1.x).

    EpisodeEnvironment(lambda: GymnasiumEpisode(gymnasium.make("FrozenLake-v1"), prompt="0 is left, ... "))

Carries what can be said in text: `Text` and `Discrete` spaces as they are, any other with functions of yours. Does not
carry vector environments (the batch is made by `EpisodeEnvironment`), rendering, or `info`, of which `metrics` picks
numbers for the log.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl_algorithms.contracts import EnvironmentReturn, EpisodeStart
from rl_algorithms.environments.adapters.optional import AdapterError, require

__all__ = ["GymnasiumEpisode"]


class GymnasiumEpisode:
    """One episode of a gymnasium environment.

    An answer that is no action is the policy's mistake: it is told which actions there are, gets `invalid_reward`, and
    the environment does not move. Bound the turns of a conversation where that might go on for ever.

    Args:
        env: an environment, used for this episode alone and closed after it.
        prompt: what stands before the first observation.
        action: makes an action of an answer, or raises ValueError. Without one, answers to a `Text` space are actions
            as they are, and those to a `Discrete` space are whole numbers.
        text: makes text of an observation. Without one, the observations of `Text` and `Discrete` spaces are text.
        metrics: picks numbers for the log from the `info` of a step.
        option_columns: columns of the row that become `options` of `reset`.
        invalid_reward: of an answer that is no action.

    Raises:
        AdapterError: gymnasium is missing, or the environment is one that cannot be carried.
    """

    def __init__(
        self,
        env: Any,
        *,
        prompt: str = "",
        action: Callable[[str], object] | None = None,
        text: Callable[[Any], str] | None = None,
        metrics: Callable[[Mapping[str, Any]], Mapping[str, float]] | None = None,
        option_columns: Sequence[str] = (),
        invalid_reward: float = 0.0,
    ) -> None:
        gymnasium = require("gymnasium", extra="gymnasium")
        if not isinstance(env, gymnasium.Env):
            raise AdapterError(
                f"{type(env).__name__} is no gymnasium.Env; a vector environment is a batch of its own: give one "
                f"of its parts, and EpisodeEnvironment makes the batch"
            )
        spaces = gymnasium.spaces
        if action is None:
            action = _default(env.action_space, {spaces.Text: str, spaces.Discrete: int}, argument="action")
        if text is None:
            text = _default(env.observation_space, {spaces.Text: str, spaces.Discrete: str}, argument="text")
        self._env, self._prompt, self._action, self._text = env, prompt, action, text
        self._metrics, self._option_columns, self._invalid_reward = metrics, tuple(option_columns), invalid_reward

    def reset(self, *, seed: int, row: Mapping[str, object]) -> EpisodeStart:
        """Begin, with the seed of the group."""
        options = {name: row[name] for name in self._option_columns}
        observation, _ = self._env.reset(seed=seed, options=options or None)
        return EpisodeStart(messages=({"role": "user", "content": self._prompt + self._text(observation)},))

    def step(self, answer: str) -> EnvironmentReturn:
        """Act."""
        space = self._env.action_space
        try:
            action = self._action(answer)
        except ValueError:
            action = None
        if action is None or not space.contains(action):
            told = {"role": "user", "content": f"{answer[:100]!r} is no action; the actions are {space}."}
            return EnvironmentReturn(reward=self._invalid_reward, terminated=False, observations=(told,))
        observation, reward, terminated, truncated, info = self._env.step(action)
        ended = bool(terminated or truncated)
        picked = {} if self._metrics is None else self._metrics(info)
        return EnvironmentReturn(
            reward=float(reward),
            terminated=bool(terminated),
            truncated=bool(truncated),
            observations=() if ended else ({"role": "user", "content": self._text(observation)},),
            metrics={name: float(value) for name, value in picked.items()},
        )

    def close(self) -> None:
        """Close the environment."""
        self._env.close()


def _default(space: Any, known: Mapping[type, Callable[[Any], Any]], *, argument: str) -> Callable[[Any], Any]:
    for kind, convert in known.items():
        if isinstance(space, kind):
            return convert
    raise AdapterError(
        f"the space {space} is neither Text nor Discrete, so nobody knows how to say it; give {argument}=, a function "
        f"that {'makes an action of an answer' if argument == 'action' else 'makes text of an observation'}"
    )
