"""Tools: an environment in which the policy may call Python functions before it gives its final answer.

What final answers are worth is judged by another environment. An answer with calls in it gets their results as `tool`
messages and reward 0; an answer without calls, or one beyond `max_calls`, is final.

What is whose fault: a call that cannot be read, an unknown tool, wrong arguments are the policy's, and it is told. An
exception or a deadline of the tool itself is told to it as well, or makes the rollout `failed`, as you choose.
"""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from rl_algorithms.choices import check_choice
from rl_algorithms.contracts import (
    Conversation,
    ConversationEnvironment,
    Environment,
    EnvironmentReturn,
    EpisodeStart,
    Message,
    matches,
)
from rl_algorithms.environments.executor import DeadlineExecutor, check_limits, describe, wait_for_all
from rl_algorithms.environments.tool_calls import CallFormat, MalformedCall, ToolCall, parse_tool_calls
from rl_algorithms.environments.tool_schemas import Schema, check_arguments, tool_schema

__all__ = ["Mistake", "OnToolError", "ToolEnvironment", "ToolError", "Toolbox", "prompt_messages", "tool_message"]

OnToolError: TypeAlias = Literal["tell", "fail"]
"""What becomes of a tool's own error: the policy is told, or the rollout fails."""


class ToolError(ValueError):
    """Tools that cannot be offered, or a conversation that they do not fit; the message names which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """Why a call was not made: the policy's mistake, in words for it."""

    reason: str


class Toolbox:
    """Functions by name, with their schemas.

    Args:
        functions: plain or coroutine functions; the results are text, or whatever JSON can express.

    Raises:
        ToolSchemaError: one cannot be described to the policy.
        ToolError: two have one name, or there is none.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        if not functions:
            raise ToolError("there are no tools; without any, use the environment that judges the answers by itself")
        self._schemas: dict[str, Schema] = {}
        self._functions: dict[str, Callable[..., Any]] = {}
        for function in functions:
            schema = tool_schema(function)
            name = schema["function"]["name"]
            if name in self._functions:
                raise ToolError(f"two tools are named {name}; a call could not tell them apart")
            self._schemas[name], self._functions[name] = schema, function

    @property
    def schemas(self) -> tuple[Schema, ...]:
        """For the chat template."""
        return tuple(self._schemas.values())

    def bind(self, call: ToolCall | MalformedCall) -> Callable[[], Any] | Mistake:
        """The function with its arguments, ready to be called, or what the policy did wrong."""
        if isinstance(call, MalformedCall):
            return Mistake(reason=f"the tool call {call.text!r} cannot be read: {call.reason}")
        if call.name not in self._functions:
            return Mistake(reason=f"there is no tool {call.name!r}; the tools are {', '.join(self._functions)}")
        if wrong := check_arguments(self._schemas[call.name], call.arguments):
            return Mistake(reason=f"{call.name} was not called: {wrong}")
        return functools.partial(self._functions[call.name], **call.arguments)


def tool_message(call: ToolCall | MalformedCall, text: str, *, max_chars: int) -> Message:
    """What a call came to, as a message; what exceeds `max_chars` is cut, and the cut is said.

    Half a character, which neither UTF-8 nor a tokenizer knows, becomes a question mark.
    """
    cut = f"\n[{len(text) - max_chars} more characters were cut]" if len(text) > max_chars else ""
    name = {"name": _whole(call.name)} if isinstance(call, ToolCall) else {}
    return {"role": "tool", **name, "content": _whole(text[:max_chars]) + cut}


def _whole(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def as_text(result: object) -> str:
    """A tool's result as text: itself, or JSON.

    Raises:
        TypeError: JSON cannot express it.
        ValueError: it contains itself.
    """
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


@dataclass(slots=True, kw_only=True)
class _Turn:
    """The calls of one answer, and what has come of them."""

    calls: tuple[ToolCall | MalformedCall, ...]
    calls_before: int
    messages: list[Message]
    mistakes: int = 0
    errors: int = 0
    failed: str | None = None

    def metrics(self) -> dict[str, float]:
        counts = {"calls": len(self.messages), "mistakes": self.mistakes, "errors": self.errors}
        return {f"tools/{name}": float(count) for name, count in counts.items()}


class ToolEnvironment:
    """An environment with tools; see the module for what is judged how.

    The calls of one answer are made one after the other, in their order; those of different conversations at the same
    time. Tools are shared by all conversations: what must be kept apart belongs into an `Episode`.

    Args:
        tools: the functions.
        reward: judges final answers; it must end after one answer. It is given the conversation as it then stands.
        max_calls: calls in a whole conversation. An answer that asks for more is final, judged, and `truncated`.
        timeout_s: the deadline of each call, in seconds.
        max_workers: how many calls are made at the same time.
        on_tool_error: `"tell"` returns a tool's exception or passed deadline to the policy; `"fail"` makes the rollout
            `failed`. Both are counted in the metric `tools/errors`.
        reward_names: the parts that `reward` names, if it does; an answer with calls in it gets 0 of each.
        call_format: how calls are written; see `tool_calls`.
        prompt_column: the column of a row with its prompt, as text or as messages.
        max_result_chars: longer results are cut, and say so.

    Raises:
        ValueError: a limit or a choice makes no sense, or a tool cannot be offered.
    """

    def __init__(
        self,
        tools: Sequence[Callable[..., Any]],
        *,
        reward: Environment,
        max_calls: int = 8,
        timeout_s: float = 30.0,
        max_workers: int = 32,
        on_tool_error: OnToolError = "tell",
        reward_names: Sequence[str] = (),
        call_format: CallFormat = "hermes",
        prompt_column: str = "prompt",
        max_result_chars: int = 10_000,
    ) -> None:
        check_choice("on_tool_error", on_tool_error, OnToolError)
        check_choice("call_format", call_format, CallFormat)
        check_limits(timeout_s=timeout_s, max_workers=max_workers)
        if max_calls < 1 or max_result_chars < 1:
            raise ValueError(f"max_calls={max_calls} and max_result_chars={max_result_chars} must both be >= 1")
        if hasattr(reward, "reset"):
            raise ToolError(
                f"{type(reward).__name__} begins episodes itself, and would never be asked to: reward must be an "
                f"environment that judges one answer"
            )
        self._toolbox, self._reward = Toolbox(tools), reward
        self._max_calls, self._timeout_s, self._fails = max_calls, timeout_s, on_tool_error == "fail"
        self._format, self._prompt_column, self._max_chars = call_format, prompt_column, max_result_chars
        self._reward_names = tuple(reward_names)
        self._executor = DeadlineExecutor(max_workers=max_workers)

    def reset(self, rows: Sequence[Mapping[str, object]], *, seeds: Sequence[int]) -> list[EpisodeStart]:
        """The row's prompt, with the tools' schemas for the chat template.

        Raises:
            ToolError: a row has no prompt in that column.
        """
        starts = []
        for row in rows:
            messages = prompt_messages(row, self._prompt_column)
            starts.append(EpisodeStart(messages=messages, tools=self._toolbox.schemas, state=0))
        return starts

    def step(self, conversations: Sequence[Conversation]) -> list[EnvironmentReturn]:
        """Make the calls of answers that have some, and have the others judged.

        Raises:
            ToolError: the environment that judges does not end the conversation, or names other rewards.
        """
        turns = [self._turn(conversation) for conversation in conversations]
        final = [self._is_final(*pair) for pair in zip(turns, conversations, strict=True)]
        called = iter(wait_for_all(self._call(turn) for turn, ends in zip(turns, final, strict=True) if not ends))
        last = [index for index, ends in enumerate(final) if ends]
        judged = iter(self._judge([conversations[index] for index in last], [turns[index] for index in last]))
        return [next(judged) if ends else next(called) for ends in final]

    def submit(self, conversation: Conversation) -> Future[EnvironmentReturn] | None:
        """Begin the calls of one answer. A final answer is begun too if `reward` can, or left to `step`."""
        turn = self._turn(conversation)
        if not self._is_final(turn, conversation):
            return self._call(turn)
        if not matches(self._reward, ConversationEnvironment):
            return None
        judging = self._reward.submit(replace(conversation, state=None))
        if judging is None:
            return None
        checked: Future[EnvironmentReturn] = Future()

        def check(judged: Future[EnvironmentReturn]) -> None:
            try:
                checked.set_result(self._checked(turn, judged.result()))
            except BaseException as error:  # noqa: BLE001 - belongs to the one who waits
                checked.set_exception(error)

        judging.add_done_callback(check)
        return checked

    def close(self) -> None:
        """End the threads that tools run on. One whose call hangs ends when that returns, or with the process."""
        self._executor.close()

    def _turn(self, conversation: Conversation) -> _Turn:
        before = conversation.state if isinstance(conversation.state, int) else 0
        calls = parse_tool_calls(conversation.answer, call_format=self._format)
        return _Turn(calls=calls, calls_before=before, messages=[])

    def _is_final(self, turn: _Turn, conversation: Conversation) -> bool:
        # An answer that the token limit cut off ends its conversation: nobody would read the results.
        return not turn.calls or conversation.truncated or self._exceeds(turn)

    def _exceeds(self, turn: _Turn) -> bool:
        return turn.calls_before + len(turn.calls) > self._max_calls

    def _call(self, turn: _Turn) -> Future[EnvironmentReturn]:
        """Make the calls of an answer, one after the other."""

        async def make_calls() -> EnvironmentReturn:
            for call in turn.calls:
                bound = self._toolbox.bind(call)
                if isinstance(bound, Mistake):
                    turn.mistakes += 1
                    text = f"error: {bound.reason}"
                else:
                    assert isinstance(call, ToolCall)
                    outcome = await self._executor.call(bound, timeout_s=self._timeout_s)
                    try:
                        text = as_text(outcome.result())
                    except Exception as error:  # noqa: BLE001 - whatever a tool raises is told, or fails the rollout
                        turn.errors += 1
                        text = f"error: {call.name} failed: {describe(error)}"
                        if self._fails:
                            turn.failed = f"the tool {call.name} failed: {describe(error)}"
                turn.messages.append(tool_message(call, text, max_chars=self._max_chars))
                if turn.failed is not None:
                    break
            return self._continue(turn)

        return self._executor.spawn(make_calls(), timeout_s=self._timeout_s)

    def _continue(self, turn: _Turn) -> EnvironmentReturn:
        ended = turn.failed is not None
        return EnvironmentReturn(
            reward=0.0,
            terminated=ended,
            observations=() if ended else tuple(turn.messages),
            rewards=dict.fromkeys(self._reward_names, 0.0),
            metrics=turn.metrics(),
            state=None if ended else turn.calls_before + len(turn.calls),
            failed=turn.failed,
        )

    def _judge(self, conversations: Sequence[Conversation], turns: Sequence[_Turn]) -> list[EnvironmentReturn]:
        if not conversations:
            return []
        judged = self._reward.step([replace(conversation, state=None) for conversation in conversations])
        return [self._checked(*pair) for pair in zip(turns, judged, strict=True)]

    def _checked(self, turn: _Turn, result: EnvironmentReturn) -> EnvironmentReturn:
        if not result.terminated:
            raise ToolError(f"{type(self._reward).__name__} must end after one answer, and did not terminate")
        if result.failed is None and {*result.rewards} != {*self._reward_names}:
            raise ToolError(
                f"{type(self._reward).__name__} names the rewards {sorted(result.rewards)}, and answers with calls "
                f"must name the same; give reward_names={sorted(result.rewards)}, not {sorted(self._reward_names)}"
            )
        metrics = {**turn.metrics(), **result.metrics}
        return replace(result, truncated=result.truncated or self._exceeds(turn), metrics=metrics)


def prompt_messages(row: Mapping[str, object], column: str) -> tuple[Message, ...]:
    """A row's prompt as messages; text is what a user says.

    Raises:
        ToolError: the row has no such column, or it is neither text nor messages.
    """
    prompt = row.get(column)
    if isinstance(prompt, str):
        return ({"role": "user", "content": prompt},)
    if isinstance(prompt, list | tuple) and prompt and all(isinstance(message, Mapping) for message in prompt):
        return tuple(dict(message) for message in prompt)
    raise ToolError(
        f"the row {dict(row)!r:.200} has no prompt in the column {column!r}, as text or messages; name the column "
        f"that has it by prompt_column"
    )
