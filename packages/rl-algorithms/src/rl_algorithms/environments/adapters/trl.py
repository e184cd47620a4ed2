"""TRL's environments (`environment_factory`) as episodes. Needs no package: they are plain objects.

    EpisodeEnvironment(lambda: TrlEpisode(MyEnvironment()))

As TRL has it: `reset(**row)` may return text that is appended to the prompt, every other public method is a tool, plain
or a coroutine, and `get_reward()` judges when the policy stops calling. Does not carry environments without
`get_reward` (their reward functions look into the environments of a batch), or observations with images.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rl_algorithms.contracts import EnvironmentReturn, EpisodeStart, Message
from rl_algorithms.environments.adapters.optional import AdapterError
from rl_algorithms.environments.executor import DeadlineExecutor, describe
from rl_algorithms.environments.tool_calls import CallFormat, MalformedCall, ToolCall, parse_tool_calls
from rl_algorithms.environments.tools import Mistake, Toolbox, as_text, prompt_messages, tool_message

__all__ = ["TrlEpisode"]


class TrlEpisode:
    """One episode of an object of TRL's shape.

    What a tool raises is told to the policy, as in TRL, and counted in the metric `tools/errors`.

    Args:
        environment: the object, used for this episode alone.
        max_calls: calls in the whole episode. An answer that asks for more ends it, judged and `truncated`.
        timeout_s: the deadline of a coroutine, in seconds; for plain methods that of the `EpisodeEnvironment` stands.
        call_format: how calls are written; see `tool_calls`.
        prompt_column: the column of a row with its prompt; a row may do without if `reset` returns text.
        max_result_chars: longer results are cut, and say so.

    Raises:
        AdapterError: it has no `reset` or no `get_reward`.
        ToolError: it has no tools.
        ToolSchemaError: one of them cannot be described to the policy.
    """

    def __init__(
        self,
        environment: Any,
        *,
        max_calls: int = 8,
        timeout_s: float = 60.0,
        call_format: CallFormat = "hermes",
        prompt_column: str = "prompt",
        max_result_chars: int = 10_000,
    ) -> None:
        name = type(environment).__name__
        # On the class: looking at the object would run its properties.
        methods = [method for method, _ in inspect.getmembers(type(environment), inspect.isfunction)]
        if "reset" not in methods:
            raise AdapterError(f"{name} has no method reset, so no episode of it can begin")
        if "get_reward" not in methods:
            raise AdapterError(
                f"{name} has no method get_reward; reward functions that look at environments= cannot be carried, "
                f"so let the environment judge itself"
            )
        tools = [each for each in methods if each not in ("reset", "get_reward") and not each.startswith("_")]
        self._environment, self._toolbox = environment, Toolbox([getattr(environment, each) for each in tools])
        self._max_calls, self._num_calls, self._timeout_s = max_calls, 0, timeout_s
        self._format, self._prompt_column, self._max_chars = call_format, prompt_column, max_result_chars

    def reset(self, *, seed: int, row: Mapping[str, object]) -> EpisodeStart:
        """Begin. TRL's environments take no seed: whatever they say here must follow from the row.

        Raises:
            AdapterError: `reset` returned neither text nor None.
            ToolError: there is no prompt, and `reset` returned no text.
        """
        said = self._wait(functools.partial(self._environment.reset, **row))
        if said is not None and not isinstance(said, str):
            raise AdapterError(f"reset returned a {type(said).__name__}, and only text (or None) can be carried")
        if said is not None and self._prompt_column not in row:
            return EpisodeStart(messages=({"role": "user", "content": said},), tools=self._toolbox.schemas)
        *before, last = prompt_messages(row, self._prompt_column)
        last = {**last, "content": last["content"] + (said or "")}
        return EpisodeStart(messages=(*before, last), tools=self._toolbox.schemas)

    def step(self, answer: str) -> EnvironmentReturn:
        """Make the calls of an answer, one after the other; have one without calls judged."""
        calls = parse_tool_calls(answer, call_format=self._format)
        exceeds = self._num_calls + len(calls) > self._max_calls
        if not calls or exceeds:
            reward = float(self._wait(self._environment.get_reward))
            return EnvironmentReturn(reward=reward, terminated=True, truncated=exceeds, metrics=_metrics(0, 0, 0))
        self._num_calls += len(calls)
        messages, kinds = zip(*map(self._call, calls), strict=True)
        metrics = _metrics(len(calls), kinds.count("mistake"), kinds.count("error"))
        return EnvironmentReturn(reward=0.0, terminated=False, observations=messages, metrics=metrics)

    def close(self) -> None:
        """There is nothing to let go of: TRL's environments are not closed."""

    def _call(self, call: ToolCall | MalformedCall) -> tuple[Message, str]:
        bound = self._toolbox.bind(call)
        if isinstance(bound, Mistake):
            return tool_message(call, f"error: {bound.reason}", max_chars=self._max_chars), "mistake"
        try:
            text, kind = as_text(self._wait(bound)), "result"
        except Exception as error:  # noqa: BLE001 - whatever a tool raises is told
            text, kind = f"error: {describe(error)}", "error"
        return tool_message(call, text, max_chars=self._max_chars), kind

    def _wait(self, call: Callable[[], Any]) -> Any:
        if not inspect.iscoroutinefunction(call):
            return call()
        return _executor().run([call], timeout_s=self._timeout_s)[0].result()


@functools.cache
def _executor() -> DeadlineExecutor:
    """One for all episodes of the process, so that a client that they share stays with one loop."""
    return DeadlineExecutor(max_workers=1024)  # the episodes' own threads are the bound


def _metrics(calls: int, mistakes: int, errors: int) -> dict[str, float]:
    return {"tools/calls": float(calls), "tools/mistakes": float(mistakes), "tools/errors": float(errors)}
