"""The tasks of verifiers (its v1 API) as an environment. Needs `rl-algorithms[verifiers]` (verifiers 0.4, Python 3.11).

    environment = VerifiersEnvironment(taskset.take(1000))
    rows = environment.rows()           # prompts for the data set; the environment knows them again by their key

Carries tasks that are asked once and judged by `@reward` and `@metric` functions or plugged judges over the trace of
that one answer. Does not carry what verifiers drives itself through a model endpoint: environments with a `run` of
their own (several agents, users, games), tool servers, containers, `@stop` conditions, and scoring that needs a
runtime. Each is refused by name.
"""

import inspect
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rl_algorithms.contracts import Conversation, EnvironmentReturn, Message
from rl_algorithms.environments.adapters.optional import AdapterError, require
from rl_algorithms.environments.asynchronous import ConcurrentEnvironment

__all__ = ["VerifiersEnvironment"]

KEY = "verifiers_key"


class VerifiersEnvironment:
    """A single-turn environment made of a taskset.

    Named rewards come with their weights as `rewards`; the reward is their sum.

    Args:
        taskset: a `verifiers.v1.Taskset`; one without end must be bounded by `take`.
        max_concurrency: how many answers are judged at the same time.
        timeout_s: the deadline of each, in seconds. One that is over it is `failed`.
        on_error: `"stop"` raises what scoring raises, naming the row; `"fail"` makes it the failure of one rollout.

    Raises:
        AdapterError: verifiers is missing, or a task is one that cannot be carried.
    """

    def __init__(
        self,
        taskset: Any,
        *,
        max_concurrency: int = 64,
        timeout_s: float = 60.0,
        on_error: Literal["stop", "fail"] = "stop",
    ) -> None:
        self._vf = require("verifiers.v1", extra="verifiers")
        _check_taskset(self._vf, taskset)
        self._tasks: dict[str, Any] = {}
        for task in taskset:
            _check_task(self._vf, task)
            if task.key in self._tasks:
                raise AdapterError(f"{_name(task)} has the key of another task, {task.key!r}; keys must be unique")
            self._tasks[task.key] = task
        scorer = _Scorer(self._vf, self._tasks)
        self._judge = ConcurrentEnvironment(
            scorer, max_concurrency=max_concurrency, timeout_s=timeout_s, on_error=on_error
        )

    def rows(self) -> list[dict[str, object]]:
        """A row for each task: its prompt as messages, and the key by which its answers are judged."""
        return [{"prompt": _prompt(task), KEY: key} for key, task in self._tasks.items()]

    def step(self, conversations: Sequence[Conversation]) -> list[EnvironmentReturn]:
        """Judge every answer as its task does.

        Raises:
            AdapterError: a row is not one of `rows`.
            AsyncEnvironmentError: scoring raised, and `on_error` is `"stop"`.
        """
        for conversation in conversations:
            if conversation.row.get(KEY) not in self._tasks:
                raise AdapterError(
                    f"the row {dict(conversation.row)!r:.200} has no {KEY} of this taskset; make the data from rows()"
                )
        return self._judge.step(conversations)

    def close(self) -> None:
        """End the event loop that scores."""
        self._judge.close()


class _Scorer:
    def __init__(self, vf: Any, tasks: Mapping[str, Any]) -> None:
        self._vf, self._tasks = vf, tasks

    async def step(self, conversation: Conversation) -> EnvironmentReturn:
        task = self._tasks[str(conversation.row[KEY])]
        trace = _trace(self._vf, task, conversation)
        await task.score(trace)
        unscored = [name for name, reward in {**trace.rewards, **trace.metrics}.items() if reward is None]
        if unscored:
            return EnvironmentReturn(reward=0.0, terminated=True, failed=f"verifiers did not score {unscored[0]}")
        rewards = {name: float(reward.value) for name, reward in trace.rewards.items()}
        metrics = {name: float(value) for name, value in trace.metrics.items()}
        return EnvironmentReturn(reward=math.fsum(rewards.values()), terminated=True, rewards=rewards, metrics=metrics)


def _trace(vf: Any, task: Any, conversation: Conversation) -> Any:
    """What verifiers would have recorded, had it asked the policy itself."""
    answer = vf.AssistantMessage(content=conversation.answer)
    messages = [*_messages(vf, task), answer]
    last = len(messages) - 1
    trace = vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
    )
    trace.nodes = [
        vf.MessageNode(parent=index - 1 if index else None, message=message, sampled=index == last)
        for index, message in enumerate(messages)
    ]
    trace.calls = [vf.ModelCall(node=last, finish_reason="length" if conversation.truncated else "stop")]
    trace.ok = True
    trace.stop("agent_completed")
    return trace


def _messages(vf: Any, task: Any) -> list[Any]:
    data = task.data
    system = [] if data.system_prompt is None else [vf.SystemMessage(content=data.system_prompt)]
    said = [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else list(data.prompt)
    return [*system, *said]


def _prompt(task: Any) -> list[Message]:
    data = task.data
    system = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    if isinstance(data.prompt, str):
        return [*system, {"role": "user", "content": data.prompt}]
    return [*system, *(json.loads(message.model_dump_json(exclude_none=True)) for message in data.prompt)]


def _check_taskset(vf: Any, taskset: Any) -> None:
    if not isinstance(taskset, vf.Taskset):
        raise AdapterError(f"a {type(taskset).__name__} is no verifiers.v1.Taskset; give the taskset, not an Env")
    name = type(taskset).__name__
    if not taskset.bounded:
        raise AdapterError(f"{name} never ends; bound it, by .take(1000) say")
    driver = vf.environment_class(taskset.config.id)
    if driver is not vf.SingleAgentEnv:
        raise AdapterError(f"{name} comes with {driver.__name__}, whose run() drives a model endpoint itself")
    if type(taskset).toolsets(taskset.config):
        raise AdapterError(f"{name} has toolsets, which are MCP servers; use ToolEnvironment with plain functions")


def _check_task(vf: Any, task: Any) -> None:
    kind, data = type(task), task.data
    hooks = {attr: task.hooks(attr) for attr in ("reward", "metric", "stop")}
    judges = task.plugged_judges()
    scoring = [*hooks["reward"], *hooks["metric"], *(judge.score for judge in judges)]
    content = [] if isinstance(data.prompt, str) or data.prompt is None else [each.content for each in data.prompt]
    overridden = [name for name in ("setup", "finalize") if getattr(kind, name) is not getattr(vf.Task, name)]
    refusals = {
        "no prompt: the user opens the conversation": data.prompt is None,
        "a prompt that is not text alone": any(not isinstance(each, str) for each in content),
        "a container (NEEDS_CONTAINER or image)": kind.NEEDS_CONTAINER or data.image is not None,
        "toolsets, which are MCP servers": bool(kind.toolsets(task.config)),
        f"a {' and a '.join(overridden)} of its own, which need a runtime": bool(overridden),
        "@stop conditions, which are for several turns": bool(hooks["stop"]),
        "scoring functions that need a runtime": any(map(_needs_runtime, scoring)),
        "neither @reward functions nor judges": not hooks["reward"] and not judges,
    }
    if found := [what for what, holds in refusals.items() if holds]:
        raise AdapterError(f"{_name(task)} has {found[0]}; that cannot be carried")


def _needs_runtime(function: Any) -> bool:
    parameter = inspect.signature(function).parameters.get("runtime")
    return parameter is not None and parameter.default is parameter.empty


def _name(task: Any) -> str:
    return f"the task {task.data.name or task.data.idx} ({type(task).__name__})"
