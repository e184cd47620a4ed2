"""Named conditions of a run: how they are detected in its log, and how events are collected and reported.

`Watch` looks at every logged step. `EventQueue` collects events from any thread, and `Reporter` shows them and writes
them to `events.jsonl`. Names of conditions stand in that file, in the summary and in the live view.
"""

import errno
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rl_observe.config import HealthConfig
from rl_observe.log_files import read_events
from rl_observe.run_directory import RunDirectory, RunDirectoryError
from rl_observe.samples import ScoredResponse


@dataclass(frozen=True, slots=True)
class Condition:
    """Something that may happen to a run."""

    name: str
    cause: str
    """When it occurs, or how it is detected."""
    reaction: str
    """What the run does."""


CONDITIONS = (
    Condition(
        "no_signal",
        "in `health.no_signal_batches` consecutive batches no group had rewards that differ (`groups_with_signal` is "
        "0), so nothing was learned",
        "`health.on_no_signal`: `warn` reports it once until a group differs, with two responses and their rewards; "
        "`stop` saves and ends the run with exit code 1",
    ),
    Condition(
        "reward_collapse",
        "the mean reward of `health.reward_collapse_steps` logged steps is below `health.reward_collapse_share` of the "
        "best earlier mean, and that was positive",
        "`health.on_reward_collapse`: `warn` reports it once until it recovers; `stop` saves and ends the run with "
        "exit code 1",
    ),
    Condition(
        "logp_mismatch",
        "`token_mult_prob_error` is above `health.max_token_mult_prob_error`: engine and trainer do not hold the same "
        "model",
        "`health.on_logp_mismatch`: `warn` reports it once until it recovers; `stop` saves and ends the run with exit "
        "code 1",
    ),
    Condition(
        "rollouts_failed",
        "a response could not be scored, or an environment failed or exceeded `env.timeout_s`",
        "only that rollout is dropped or gets reward 0 (`env.on_error`), and is counted; reported at the 1st, 2nd, "
        "4th, 8th ...",
    ),
)
"""The conditions that `Watch` detects."""


def conditions_table(conditions: Sequence[Condition] = CONDITIONS) -> str:
    """Return a table of conditions in Markdown."""
    rows = [f"| `{each.name}` | {each.cause} | {each.reaction} |" for each in conditions]
    return "\n".join(["| condition | cause | reaction |", "|---|---|---|", *rows])


class HealthError(RuntimeError):
    """A condition with the reaction `stop` ends the run; `condition` is its name."""

    def __init__(self, condition: str, message: str) -> None:
        super().__init__(f"{condition}: {message}")
        self.condition = condition


def name_of(error: BaseException) -> str:
    """Name the condition that ended a run: the error's own `condition`, or interrupted, disk_full or failed."""
    if isinstance(condition := getattr(error, "condition", None), str):
        return condition
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return "disk_full" if is_disk_full(error) else "failed"


def is_disk_full(error: BaseException) -> bool:
    """Return True if a full disk or quota caused `error`, also on another process that reports it as text."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in {errno.ENOSPC, errno.EDQUOT}:
            return True
        if "No space left on device" in str(cause):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One occurrence of a condition."""

    name: str
    """The name of the condition."""
    message: str
    """What happened, with its numbers."""
    reaction: str
    """What was done about it."""


class EventQueue:
    """Thread-safe queue of events for the run log; the driver empties it after each step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[Event] = []

    def add(self, name: str, message: str, reaction: str) -> None:
        """Append an event."""
        with self._lock:
            self._waiting.append(Event(name=name, message=message, reaction=reaction))

    def take(self) -> list[Event]:
        """Remove and return all events, oldest first."""
        with self._lock:
            taken, self._waiting = self._waiting, []
        return taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Noticed:
    """An event that `Watch` found, and whether the run should stop."""

    event: Event
    stop: bool


class Watch:
    """Detect conditions in what is logged. Each is reported when it begins, and again only after it was over.

    Call `observe` after every logged step. To resume a run, call `replay` with the rows logged so far.

    `no_signal` quotes responses, which the log of a step does not hold. Pass them as `samples`: a few responses of
    the step's batch with their rewards, of which the first two are quoted, or a function without arguments that
    returns them. The function is called only when the condition is reported, so that nothing is decoded otherwise.
    """

    def __init__(self, config: HealthConfig) -> None:
        self._config = config
        self._rewards: dict[str, _RewardWindow] = {}
        self._batches_without_signal: dict[str, int] = {}
        self._under_way: set[str] = set()
        self._errors = 0

    def observe(
        self,
        stage: str,
        values: Mapping[str, float],
        *,
        errors: int = 0,
        samples: Sequence[ScoredResponse] | Callable[[], Sequence[ScoredResponse]] | None = None,
    ) -> list[Noticed]:
        """Process one logged step and return the conditions that begin with it.

        Args:
            stage: the stage of the step; rewards of different stages are not compared.
            values: the metrics of the step.
            errors: rollouts that could not be scored, over the whole run.
            samples: responses of this step, or a function that returns them (see the class).
        """
        config = self._config
        found = [
            self._begun("no_signal", self._no_signal(stage, values), config.on_no_signal),
            self._begun("reward_collapse", self._collapse(stage, values), config.on_reward_collapse),
            self._begun("logp_mismatch", self._mismatch(values), config.on_logp_mismatch),
            self._failed_rollouts(errors),
        ]
        noticed = [each for each in found if each is not None]
        if samples is not None and noticed and noticed[0].event.name == "no_signal":
            event = noticed[0].event
            quoted = _quote(samples() if callable(samples) else samples)
            event = Event(name=event.name, message=event.message + quoted, reaction=event.reaction)
            noticed[0] = Noticed(event=event, stop=noticed[0].stop)
        return noticed

    def replay(self, rows: Sequence[Mapping[str, object]], *, errors: int) -> None:
        """Process the rows that earlier processes of the run logged, without reporting their conditions again."""
        for row in rows:
            self.observe(str(row["stage"]), {k: float(v) for k, v in row.items() if isinstance(v, int | float)})
        self._errors = errors

    def _no_signal(self, stage: str, values: Mapping[str, float]) -> str | None:
        counts = self._batches_without_signal
        if "groups_with_signal" in values:
            counts[stage] = 0 if values["groups_with_signal"] > 0 else counts.get(stage, 0) + 1
        count, limit = counts.get(stage, 0), self._config.no_signal_batches
        if count < limit:
            return None
        return (
            f"in {count} consecutive batches (health.no_signal_batches={limit}) all rewards of each group were equal, "
            f"so there was nothing to learn from; check that the reward function gives different rewards to right and "
            f"wrong responses, that responses have the format it looks for, and that the prompts are neither too easy "
            f"nor too hard"
        )

    def _collapse(self, stage: str, values: Mapping[str, float]) -> str | None:
        if "reward" not in values:
            return None
        config = self._config
        window = self._rewards.setdefault(stage, _RewardWindow(config.reward_collapse_steps))
        earlier_best, mean = window.best, window.add(values["reward"])
        if mean is None or earlier_best <= 0 or mean >= config.reward_collapse_share * earlier_best:
            return None
        return (
            f"the mean reward of the last {config.reward_collapse_steps} logged steps is {mean:.4g}, below "
            f"health.reward_collapse_share={config.reward_collapse_share} of the best such mean, {earlier_best:.4g}; "
            f"check the learning rate, the KL to the reference, and the samples in the report"
        )

    def _mismatch(self, values: Mapping[str, float]) -> str | None:
        error, limit = values.get("token_mult_prob_error", 1.0), self._config.max_token_mult_prob_error
        if error <= limit:
            return None
        return (
            f"token_mult_prob_error={error:.6g} is above health.max_token_mult_prob_error={limit}: engine and trainer "
            f"do not hold the same model; check their precisions, and what the last refit verified"
        )

    def _begun(self, name: str, message: str | None, wanted: str) -> Noticed | None:
        if message is None:
            self._under_way.discard(name)
        if message is None or name in self._under_way or wanted == "ignore":
            return None
        self._under_way.add(name)
        stop = wanted == "stop"
        reaction = "the run is saved and ends" if stop else f"the run continues (health.on_{name}=warn)"
        return Noticed(event=Event(name=name, message=message, reaction=reaction), stop=stop)

    def _failed_rollouts(self, errors: int) -> Noticed | None:
        before, self._errors = self._errors, max(errors, self._errors)
        if errors <= before or errors.bit_length() == before.bit_length():  # reported at powers of two only
            return None
        message = f"{errors} rollouts of the run so far could not be scored, or their environment failed"
        reaction = "each is dropped or gets reward 0, as env.on_error says; the run continues"
        return Noticed(event=Event(name="rollouts_failed", message=message, reaction=reaction), stop=False)


class _RewardWindow:
    """The mean of the last `size` rewards, and the best such mean so far."""

    def __init__(self, size: int) -> None:
        self._last: deque[float] = deque(maxlen=size)
        self.best = float("-inf")

    def add(self, reward: float) -> float | None:
        """Add one step's reward; return the mean of the window, or None until it is full."""
        self._last.append(reward)
        if len(self._last) < (self._last.maxlen or 0):
            return None
        mean = sum(self._last) / len(self._last)
        self.best = max(self.best, mean)
        return mean


def _quote(samples: Sequence[ScoredResponse]) -> str:
    """Quote the first two responses, each cut to one line."""

    def cut(text: str, size: int) -> str:
        line = " ".join(text.split())
        return repr(line if len(line) <= size else line[: size - 1] + "…")

    quotes = [
        f"{cut(each['response'], 160)} to the prompt {cut(each['prompt'], 80)} got reward {each['reward']}"
        for each in samples[:2]
    ]
    return f". For example, the response {'; and '.join(quotes)}" if quotes else ""


class _EventWriter(Protocol):
    def write(self, name: str, step: int | None, message: str, *, reaction: str, stage: str | None = None) -> None: ...


class _View(Protocol):
    def event(self, name: str, step: int | None, message: str) -> None: ...


class Reporter:
    """Show events and write them down, with `RunLog.events` and `LiveView` for example.

    If the disk refuses an event, the run continues: the view has shown it, and `unwritten` keeps the reason.
    """

    def __init__(self, events: _EventWriter, view: _View) -> None:
        self._events, self._view = events, view
        self.unwritten: list[str] = []
        """Why events could not be written, one entry per event."""

    def report(
        self, name: str, message: str, *, reaction: str, stage: str | None = None, step: int | None = None
    ) -> None:
        """Show and write one event."""
        self._view.event(name, step, f"{message}; {reaction}")
        try:
            self._events.write(name, step, message, reaction=reaction, stage=stage)
        except RunDirectoryError as error:
            self.unwritten.append(str(error))


def count_events(run: RunDirectory) -> dict[str, int]:
    """Count how often each condition occurred, over all processes of a run."""
    return dict(Counter(str(event["name"]) for event in read_events(run)))
