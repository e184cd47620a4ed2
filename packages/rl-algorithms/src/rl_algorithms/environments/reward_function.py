"""The single-turn environment that plain reward functions make: one, or several by name and weight.

A reward function is anything that can be called with keyword lists, one item per answer, as in TRL:

    def reward(prompts, completions, answer, **columns) -> list[float]

Every column of the data row comes by its own name. Arguments that the function does not name are not passed, so
`**columns` is optional. Always there are

    prompts          text; where the data's `prompt` is messages, lists of messages
    completions      the same: the answer, and in a conversation of several turns all that came before it behind the
                     prompt. A function that `scores.takes_text` marks is always given text
    completion_ids   the newest answer's token ids, with the stop token
    trainer_state    `global_step`: optimizer steps that the weights had seen

and, for functions of TRL that log, `log_extra` and `log_metric`; what they are given is dropped. A function with verl's
arguments (`data_source`, `solution_str`, `ground_truth`, `extra_info`) is called as verl calls it (see `verl`).
Coroutine functions are awaited together. For each answer a function returns

    a number        the reward
    None            the function does not apply to this answer
    a `Score`       a number with figures for the log, or the reason why there is none

    R = sum over functions k that apply of w_k r_k

An answer to which no function applies has no reward, and is reported as failed: it is not trained on.

Every call has a deadline, `timeout_s`. On the main thread a call is interrupted at its deadline: a watching thread
sends a signal, whose handler raises inside the call. The call stays on the caller's thread, so breakpoints work,
functions may use signals themselves, and nothing is left behind. Python handles signals between two of its own
instructions: a call that hangs inside C code without returning to the interpreter is not interrupted; one that sleeps,
or waits for a lock, a process or a socket, is. On any other thread, as in asynchronous GRPO, Python cannot interrupt a
call. It then runs on a daemon thread that is abandoned at the deadline: it may go on until the process ends, and its
result is dropped.
"""

import asyncio
import contextlib
import functools
import inspect
import math
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from types import FrameType, SimpleNamespace
from typing import Any, Literal, TypeAlias

from rl_algorithms.choices import check_choices
from rl_algorithms.contracts import Conversation, Environment, EnvironmentReturn, Message, matches
from rl_algorithms.environments.executor import DeadlineExecutor, TimedOutError
from rl_algorithms.environments.scores import CannotJudgeError, Score
from rl_algorithms.environments.verl import from_compute_score

__all__ = ["RewardError", "RewardFunctionEnvironment", "RewardTimeoutError", "call_within"]

RewardFunction: TypeAlias = Callable[..., Any] | Environment
"""A function of keyword lists, or a single-turn environment that stands for one."""

ONLY = ""
"""The name of a function that is the only one: its number is the reward and has no parts."""

ALWAYS_GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

SIGNAL = signal.SIGVTALRM  # SIGALRM is what math-verify and others time themselves by
REPEAT_S = 1.0  # a call that swallowed the interruption is interrupted again
BLOCKED_S = 1.0  # grace after the deadline of coroutines, before an event loop that is blocked is interrupted
FOREVER_S = 1e9
FAST_S = 1.0  # a call for a whole batch that failed sooner is made again for every answer by itself


class RewardError(ValueError):
    """A reward function raised or returned something that is not a finite number; the message names the sample."""


class RewardTimeoutError(RewardError):
    """A reward function was still running at its deadline; the message names it, the answer and the seconds."""


@dataclass(slots=True, kw_only=True)
class RewardFunctionEnvironment:
    """A single-turn environment made of reward functions; every conversation ends after one answer.

    Raises, from `step`:
        RewardTimeoutError: a function took longer than `timeout_s`, unless `on_error` says otherwise.
        RewardError: a function raised, returned another number of rewards than it got answers, or a reward that is
            neither finite nor None, unless `on_error` says otherwise; or the columns of the data do not fit.
        CannotJudgeError: a verifier can judge nothing on this machine, whatever `on_error` says.
    """

    reward: RewardFunction | Mapping[str, RewardFunction] | Sequence[RewardFunction]
    """The reward function; or several, by name or as a list under their own names, whose weighted rewards are the parts
    of the reward (`EnvironmentReturn.rewards`). Numbers may be Python's, numpy's or one-element tensors."""

    weights: Mapping[str, float] = field(default_factory=dict)
    """What the functions count for; 1 for those that are not named. At 0 a function is measured and not
    rewarded: where it fails, the metric `NAME/failed` says so, and the answer is judged without it."""

    on_error: Literal["stop", "zero", "fail"] = "stop"
    """What becomes of an answer that cannot be judged: `"zero"` counts it as reward 0, `"fail"` leaves it out of
    training and of every baseline; both add it to `errors`."""

    timeout_s: float | None = 300.0
    """Seconds that a function, plain or coroutine, may take for one batch; None waits for ever."""

    errors: int = field(default=0, init=False)
    """Answers that could not be judged, so far."""

    _functions: Mapping[str, RewardFunction] = field(default_factory=dict, init=False, repr=False, compare=False)
    """`reward` by name; a function that is the only one is called `ONLY`."""

    _checked: frozenset[str] | None = field(default=None, init=False, repr=False, compare=False)
    """The columns that `check` accepted last, so that equal ones are not checked in every step."""

    def __post_init__(self) -> None:
        check_choices(self)
        self._functions = {name: _from_verl(function) for name, function in self._named_functions().items()}
        if unknown := sorted(set(self.weights) - set(self._functions)):
            raise ValueError(
                f"weights name {', '.join(map(repr, unknown))}, and the reward functions are "
                f"{', '.join(map(repr, self._functions))}"
            )
        for name, weight in self.weights.items():
            if not math.isfinite(weight):
                raise ValueError(f"weights[{name!r}]={weight} must be finite")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ValueError(f"timeout_s={self.timeout_s} must be > 0")

    def step(self, conversations: Sequence[Conversation]) -> list[EnvironmentReturn]:
        """Judge every answer in one call of each function; one answer at a time only where that call failed fast."""
        if not conversations:
            return []
        names = frozenset(name for conversation in conversations for name in conversation.row)
        if names != self._checked:
            self.check(names)
            self._checked = names
        called = call_all(list(self._functions.values()), conversations, timeout_s=self.timeout_s)
        columns: list[list[float | None]] = []
        for function, (returned, seconds) in zip(self._functions.values(), called, strict=True):
            if isinstance(returned, Exception):
                rewards = self._one_by_one(function, returned, conversations, seconds=seconds)
            else:
                rewards = returned
            scores: list[float | None] = []
            for conversation, reward in zip(conversations, rewards, strict=True):
                if type(reward) is float and math.isfinite(reward):  # nearly always
                    scores.append(reward)
                    continue
                if reward is None or (isinstance(reward, Score) and reward.failed is not None):
                    scores.append(reward)
                    continue
                number = math.nan
                if isinstance(reward, Real) or hasattr(reward, "item"):
                    # A tensor of several elements and 10**400 are no float.
                    with contextlib.suppress(ValueError, TypeError, RuntimeError, OverflowError):
                        number = float(reward)
                if not math.isfinite(number):
                    scores.append(self._unjudged(function, conversation, reward))
                else:
                    scores.append(reward if isinstance(reward, Score) else number)
            columns.append(scores)
        return [self._return(dict(zip(self._functions, scores, strict=True))) for scores in zip(*columns, strict=True)]

    def check(self, columns: Iterable[str]) -> None:
        """Refuse a function that requires an argument which data rows with these columns cannot give.

        Raises:
            RewardError: it does, whatever `on_error` says: such a function could never judge anything. Or a column has
                the name of what is always given.
        """
        columns = {*columns}
        given = {*columns, *ALWAYS_GIVEN}
        functions = [each for each in self._functions.values() if not matches(each, Environment)]
        if functions and (taken := [name for name in ALWAYS_GIVEN if name in columns]):
            raise RewardError(
                f"the data rows have a column {taken[0]!r}, and reward functions are given something else by that "
                f"name; rename the column"
            )
        for function in functions:
            parameters = inspect.signature(function).parameters.values()
            required = [each.name for each in parameters if each.default is each.empty and each.kind in NAMED]
            if missing := [name for name in required if name not in given]:
                raise RewardError(
                    f"the reward function {name_of(function)} requires {', '.join(missing)}, and the data rows have "
                    f"{', '.join(sorted(columns)) or 'no columns'} ({', '.join(ALWAYS_GIVEN)} are always given)"
                )

    def _named_functions(self) -> Mapping[str, RewardFunction]:
        """The functions by name; refuses what is no function, and a list in which two have the same name."""
        if isinstance(self.reward, Mapping):
            given = {f"reward[{name!r}]": function for name, function in self.reward.items()}
        elif isinstance(self.reward, Sequence):
            given = {f"reward[{index}]": function for index, function in enumerate(self.reward)}
        else:
            given = {"reward": self.reward}
        if not given:
            raise RewardError(f"reward={self.reward!r} has no function; give one, or several by name")
        for place, function in given.items():
            if not callable(function) and not matches(function, Environment):
                raise RewardError(
                    f"{place} must be a function (or a list or dict of functions), found {type(function).__name__} "
                    f"{function!r:.60}"
                )
        if isinstance(self.reward, Mapping):
            return self.reward
        if not isinstance(self.reward, Sequence):
            return {ONLY: self.reward}
        names = [str(getattr(function, "__name__", type(function).__name__)) for function in self.reward]
        if twice := {name for name in names if names.count(name) > 1}:
            raise RewardError(f"reward has several functions named {', '.join(sorted(twice))}; give a dict by name")
        return dict(zip(names, self.reward, strict=True))

    def _one_by_one(
        self, function: RewardFunction, error: Exception, conversations: Sequence[Conversation], *, seconds: float
    ) -> list[Any]:
        if isinstance(error, TimedOutError):  # calling again would wait as long again, for every answer
            if self.on_error == "stop":
                raise RewardTimeoutError(self._timed_out(function, conversations)) from error
            return [error] * len(conversations)
        if seconds > FAST_S and len(conversations) > 1:
            # A slow function is not called again for every answer, to find out which of them it fails on.
            if self.on_error == "stop":
                raise RewardError(_describe(function, None, error)) from error
            return [error] * len(conversations)
        alone: list[Any] = []
        for conversation in conversations:
            ((returned, _),) = call_all([function], [conversation], timeout_s=self.timeout_s)
            if isinstance(returned, Exception) and self.on_error == "stop":
                raise RewardError(_describe(function, conversation, returned)) from returned
            alone.append(returned if isinstance(returned, Exception) else returned[0])
        if self.on_error == "stop":
            raise RewardError(_describe(function, None, error)) from error
        return alone

    def _unjudged(self, function: RewardFunction, conversation: Conversation, reward: Any) -> Score:
        """The score of an answer whose reward is no finite number, or an exception; raises by `on_error="stop"`."""
        cause = reward if isinstance(reward, Exception) else None
        what = cause if cause is not None else f"it returned {reward!r}, which is not a finite number"
        reason = _describe(function, conversation, what)
        if self.on_error == "stop":
            raise RewardError(reason) from cause
        self.errors += 1
        return Score(0.0) if self.on_error == "zero" else Score.failure(reason)

    def _timed_out(self, function: RewardFunction, conversations: Sequence[Conversation]) -> str:
        first = conversations[0]
        batch = f"a batch of {len(conversations)} answers, the first: " * (len(conversations) > 1)
        return (
            f"the reward function {name_of(function)} took longer than timeout_s={self.timeout_s:g} (env.timeout_s in "
            f"a recipe) for {batch}prompt {first.messages[-1]['content']!r}, answer {first.answer!r}. Make it faster, "
            f"raise timeout_s, or leave such answers out of training by on_error='fail' (env.on_error in a recipe)"
        )

    def _return(self, scores: Mapping[str, float | None]) -> EnvironmentReturn:
        """What the scores of one answer, by function, come to."""
        if type(alone := scores.get(ONLY)) is float and not self.weights:  # nearly always, and soon said
            return EnvironmentReturn(reward=alone, terminated=True)
        applied = {name: score for name, score in scores.items() if score is not None}
        failed = {
            name: score.failed
            for name, score in applied.items()
            if isinstance(score, Score) and score.failed is not None
        }
        measured = {name for name in scores if self.weights.get(name, 1.0) == 0.0}
        reasons = [reason for name, reason in failed.items() if name not in measured]
        if not applied or (scores.keys() > measured >= applied.keys()):
            asked = [name_of(each) for name, each in self._functions.items() if name not in measured]
            who = f"the reward function `{asked[0]}`" if len(asked) == 1 else f"each of {', '.join(asked)}"
            reasons = [f"no reward function applies to this answer: {who} returned None for it"]
        parts = {
            name: 0.0 if reasons or name not in applied else self.weights.get(name, 1.0) * applied[name]
            for name in scores
            if name not in measured
        }
        # Each function's own number, unweighted, and the figures of its score; only where it applies.
        metrics: dict[str, float] = {}
        for name, score in applied.items():
            if name != ONLY and name not in failed:
                metrics[name] = float(score)
            prefix = f"{name}/" if name != ONLY else ""
            if name in measured:
                metrics[f"{prefix}failed"] = float(name in failed)
            if isinstance(score, Score):
                metrics.update({f"{prefix}{key}": float(value) for key, value in score.metrics.items()})
        return EnvironmentReturn(
            reward=math.fsum(parts.values()),
            terminated=True,
            rewards={} if ONLY in parts else parts,
            metrics=metrics,
            failed="; ".join(reasons) or None,
        )


def _describe(function: RewardFunction, conversation: Conversation | None, error: Exception | str) -> str:
    what = error if isinstance(error, str | RewardError) else f"it raised {type(error).__name__}: {error}"
    sample = (
        "the batch as a whole, though each answer alone"
        if conversation is None
        else f"prompt {conversation.messages[-1]['content']!r}, answer {conversation.answer!r}"
    )
    return (
        f"the reward function {name_of(function)} cannot judge {sample}: {what}. "
        f"Mend it, or count such answers as 0 by on_error='zero' (env.on_error in a recipe), or leave them out of "
        f"training by 'fail'"
    )


def name_of(function: RewardFunction) -> str:
    """What the user calls this function."""
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def call_all(
    functions: Sequence[RewardFunction],
    conversations: Sequence[Conversation],
    *,
    timeout_s: float | None,
) -> list[tuple[list[Any] | Exception, float]]:
    """Call each function once for all conversations.

    Plain functions run one after another; then all coroutines at once. Each call has `timeout_s` seconds.

    Returns:
        For each function a list with an item per conversation, or what it raised (`TimedOutError` at its deadline), and
        how many seconds it took; coroutines, together.

    Raises:
        CannotJudgeError: a function did.
    """
    names = dict.fromkeys(name for conversation in conversations for name in conversation.row)
    columns: dict[str, list[object]] = {
        name: [conversation.row.get(name) for conversation in conversations] for name in names
    }
    state = SimpleNamespace(global_step=max(conversation.version for conversation in conversations))
    given: dict[str, Any] = {
        **columns,
        "completion_ids": [list(conversation.tokens) for conversation in conversations],
        "trainer_state": state,
        "log_extra": lambda *_: None,
        "log_metric": lambda *_: None,
    }
    as_text = {
        "prompts": [conversation.messages[-1]["content"] for conversation in conversations],
        "completions": [conversation.answer for conversation in conversations],
    }
    # As TRL has it: messages where the data's prompts are messages.
    conversational = any(isinstance(prompt, list | tuple) for prompt in columns.get("prompt", ()))
    split = [_prompt_and_completion(conversation) for conversation in conversations] if conversational else []
    as_messages = {"prompts": [prompt for prompt, _ in split], "completions": [said for _, said in split]}
    returned: list[Any] = []  # of each function the rewards as a list, what it raised, or what has to be awaited
    seconds: list[float] = []
    for function in functions:
        begun = time.monotonic()

        def call(function: RewardFunction = function) -> Any:
            if matches(function, Environment):
                return _judged(function, conversations)
            parameters = inspect.signature(function).parameters.values()
            named = {**given, **(as_messages if conversational and not _takes_text(function) else as_text)}
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
                named = {each.name: named[each.name] for each in parameters if each.name in named}
            rewards = function(**named)
            return rewards if inspect.isawaitable(rewards) else _listed(rewards, len(conversations))

        try:
            returned.append(call_within(call, timeout_s=timeout_s))
        except CannotJudgeError:
            raise
        except Exception as error:  # noqa: BLE001 - the caller decides what becomes of it
            returned.append(error)
        except SystemExit as error:  # would end the run without a message
            ended = RewardError(f"it raised SystemExit({error})")
            ended.__cause__ = error
            returned.append(ended)
        seconds.append(time.monotonic() - begun)
    waiting = {index: item for index, item in enumerate(returned) if inspect.isawaitable(item)}
    if waiting:
        begun = time.monotonic()
        try:
            awaited = _run(_together(list(waiting.values()), timeout_s), timeout_s)
        except TimedOutError as error:  # one of them blocks the event loop that they share
            awaited = [error] * len(waiting)
        for index, item in zip(waiting, awaited, strict=True):
            returned[index] = _listed(item, len(conversations))
            seconds[index] += time.monotonic() - begun
    return list(zip(returned, seconds, strict=True))


def _takes_text(function: RewardFunction) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return bool(getattr(function, "takes_text", False))


def _prompt_and_completion(conversation: Conversation) -> tuple[list[Message], list[Message]]:
    """The conversation's messages before the policy's first answer, and all from there on."""
    answers = [place for place, each in enumerate(conversation.messages) if each["role"] == "assistant"]
    start = answers[-conversation.turn] if conversation.turn else len(conversation.messages)
    newest = {"role": "assistant", "content": conversation.answer}
    return list(conversation.messages[:start]), [*conversation.messages[start:], newest]


def _from_verl(function: RewardFunction) -> RewardFunction:
    """A function with verl's arguments as a reward function; any other as it is."""
    if matches(function, Environment):
        return function
    try:
        names = {*inspect.signature(function).parameters}
    except (TypeError, ValueError):  # written in C
        return function
    return from_compute_score(function) if {"data_source", "solution_str", "ground_truth"} <= names else function


def _judged(environment: Environment, conversations: Sequence[Conversation]) -> list[Score]:
    returns = environment.step(conversations)
    if open_ended := sum(not item.terminated for item in returns):
        raise RewardError(
            f"it did not end {open_ended} of {len(returns)} conversations; only a single-turn environment can be a part"
        )
    return [Score(item.reward, metrics=item.metrics, failed=item.failed) for item in returns]


def _listed(returned: Any, number: int) -> list[Any] | Exception:
    """What a function returned as a list with `number` items, or the error that says why it is none."""
    if isinstance(returned, Exception):
        return returned
    if isinstance(returned, Mapping | str | bytes | set):
        return RewardError(f"it returned a {type(returned).__name__}, and must return a list with a number per answer")
    try:
        rewards: list[Any] = list(returned)
    except Exception as error:  # noqa: BLE001 - a lazy sequence may raise what it likes
        return error
    if len(rewards) != number:
        return RewardError(f"it returned {len(rewards)} rewards for {number} answers")
    return rewards


async def _together(waiting: Sequence[Awaitable[Any]], timeout_s: float | None) -> list[Any]:
    async def bounded(item: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                return await item
        except TimeoutError as error:
            if deadline.expired():
                raise TimedOutError(f"it ran longer than timeout_s={timeout_s:g}") from error
            raise  # the function's own, of a request of its for example

    returned = await asyncio.gather(*map(bounded, waiting), return_exceptions=True)
    for each in returned:
        if isinstance(each, BaseException) and not isinstance(each, Exception | asyncio.CancelledError):
            raise each  # an interruption of all of them
    # A cancellation is no Exception, and would be taken for what the function returned.
    return [
        RewardError("it cancelled itself") if isinstance(each, asyncio.CancelledError) else each for each in returned
    ]


def _run(coroutine: Coroutine[Any, Any, list[Any]], timeout_s: float | None) -> list[Any]:
    """Run `coroutine`; a coroutine function that blocks the event loop ends it a second after the deadline of all."""
    limit = None if timeout_s is None else timeout_s + BLOCKED_S
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        returned: list[Any] = call_within(lambda: asyncio.run(coroutine), timeout_s=limit)
        return returned
    # The thread of a notebook runs a loop already, and a loop cannot be entered twice.
    rewards: list[Any] = _on_another_thread(lambda: asyncio.run(coroutine), timeout_s=limit or FOREVER_S)
    return rewards


def call_within(call: Callable[[], Any], *, timeout_s: float | None) -> Any:
    """Call `call` and return what it returns.

    A debugger that is tracing the call suspends the deadline.

    Args:
        call: takes no arguments.
        timeout_s: seconds; None waits for ever.

    Raises:
        TimedOutError: it was still running after `timeout_s`. On the main thread the cause, `__cause__`, has the frames
            in which it was interrupted.
        Exception: whatever the call raised.
    """
    if timeout_s is None:
        return call()
    interruptible = threading.current_thread() is threading.main_thread()
    if interruptible:
        # The handler is installed once and stays: a signal may still be on its way when a call has returned.
        current = signal.getsignal(SIGNAL)
        if current == signal.SIG_DFL:
            signal.signal(SIGNAL, _interrupt)
        interruptible = current in {signal.SIG_DFL, _interrupt}  # somebody else's handler is left alone
    if not interruptible:
        return _on_another_thread(call, timeout_s=timeout_s)
    deadline = _Deadline(at=time.monotonic() + timeout_s)
    # The signal may come between any two calls, so also in what begins and ends the deadline: both are inside `try`,
    # and storing `returned` comes first afterwards, which no signal can interrupt.
    try:
        _deadlines.append(deadline)
        threading.Thread(target=deadline.watch, name="rl-reward-deadline", daemon=True).start()
        return call()
    except _InterruptedCall as interruption:
        if interruption.deadline is not deadline:  # of a call around this one
            raise
        deadline.returned = True
        raise TimedOutError(f"it ran longer than timeout_s={timeout_s:g}") from interruption
    finally:
        deadline.returned = True
        deadline.over.set()
        _deadlines[:] = [each for each in _deadlines if not each.returned]


def _on_another_thread(call: Callable[[], Any], *, timeout_s: float) -> Any:
    return _executor().run([call], timeout_s=timeout_s)[0].result()


@functools.cache
def _executor() -> DeadlineExecutor:
    return DeadlineExecutor(max_workers=10_000)  # each caller waits for its one call: there are no more than callers


@dataclass(eq=False, kw_only=True)
class _Deadline:
    """When a call of the main thread is interrupted."""

    at: float
    """In seconds of `time.monotonic`."""

    returned: bool = False
    """Whether the call has returned: it is not interrupted any more."""

    over: threading.Event = field(default_factory=threading.Event)
    """Set when the call has returned, so that `watch` need not wait for the deadline."""

    def watch(self) -> None:
        """Interrupt the main thread at the deadline, and again until the call is over."""
        wait_s = self.at - time.monotonic()
        while not self.over.wait(max(0.0, wait_s)) and not self.returned:
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, SIGNAL)
            wait_s = REPEAT_S


class _InterruptedCall(BaseException):  # no Exception: `except Exception` in a reward function must not swallow it
    def __init__(self, deadline: _Deadline) -> None:
        super().__init__("interrupted at its deadline")
        self.deadline = deadline


_deadlines: list[_Deadline] = []
"""Of the calls that the main thread is in, the outermost first."""


def _interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - signal's signature
    if sys.gettrace() is not None:  # somebody is at a breakpoint
        return
    now = time.monotonic()
    for deadline in _deadlines:
        if now >= deadline.at and not deadline.returned:
            raise _InterruptedCall(deadline)
