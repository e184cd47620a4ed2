"""OpenEnv's environments as episodes, through their clients. Needs `rl-algorithms[openenv]` (openenv-core 0.3).

    def connect():
        client = GenericEnvClient(base_url="http://localhost:8000")
        return OpenEnvEpisode(client, action=lambda answer: {"message": answer}, text=lambda seen: seen["echo"])

    EpisodeEnvironment(connect)

A client is a session of its own at the server, over one websocket; all of them share the event loop of the
`EpisodeEnvironment`. Its `max_workers` bounds the calls in flight; the server must admit as many sessions as a batch
has rollouts. Does not carry clients in production mode (MCP over HTTP has neither reward nor end), or the synchronous
wrapper, which would keep a thread for each.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl_algorithms.contracts import EnvironmentReturn, EpisodeStart
from rl_algorithms.environments.adapters.optional import AdapterError

__all__ = ["OpenEnvEpisode"]


class OpenEnvEpisode:
    """One episode of an OpenEnv server.

    Args:
        client: an asynchronous `EnvClient`, used for this episode alone and closed after it.
        action: makes of an answer what the client's `step` takes: a dict for a `GenericEnvClient`, else its action.
        text: makes text of an observation.
        prompt: what stands before the first observation.
        reset_columns: columns of the row that are handed to `reset`, besides the seed.

    Raises:
        AdapterError: the client is one that cannot be carried.
    """

    def __init__(
        self,
        client: Any,
        *,
        action: Callable[[str], Any],
        text: Callable[[Any], str],
        prompt: str = "",
        reset_columns: Sequence[str] = (),
    ) -> None:
        name = type(client).__name__
        if not (inspect.iscoroutinefunction(client.reset) and inspect.iscoroutinefunction(client.step)):
            raise AdapterError(f"{name} is synchronous; give the asynchronous client, without .sync()")
        if getattr(client, "_mode", "simulation") != "simulation":
            raise AdapterError(f"{name} is in production mode, which says neither rewards nor ends; use 'simulation'")
        self._client, self._action, self._text = client, action, text
        self._prompt, self._reset_columns = prompt, tuple(reset_columns)

    async def reset(self, *, seed: int, row: Mapping[str, object]) -> EpisodeStart:
        """Begin, with the seed of the group.

        Raises:
            AdapterError: the episode is over before it began.
        """
        result = await self._client.reset(seed=seed, **{name: row[name] for name in self._reset_columns})
        if result.done:
            raise AdapterError("the server's reset returned done=True: there is nothing to answer")
        return EpisodeStart(messages=({"role": "user", "content": self._prompt + self._text(result.observation)},))

    async def step(self, answer: str) -> EnvironmentReturn:
        """Act.

        Raises:
            AdapterError: the episode ended without a reward. On the way there, none counts as 0.
        """
        result = await self._client.step(self._action(answer))
        if result.done and result.reward is None:
            raise AdapterError("the server ended the episode with reward=None, and nothing can be learnt from that")
        return EnvironmentReturn(
            reward=0.0 if result.reward is None else float(result.reward),
            terminated=bool(result.done),
            observations=() if result.done else ({"role": "user", "content": self._text(result.observation)},),
        )

    async def close(self) -> None:
        """Close the session, and the container where the client started one."""
        await self._client.close()
