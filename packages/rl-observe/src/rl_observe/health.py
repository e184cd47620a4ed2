"""Named conditions of a run: how they are detected in its log, and how events are collected and reported.

`Watch` looks at every logged step. `EventQueue` collects events from any thread, and `Reporter` shows them and writes
them to `events.jsonl`. Names of conditions stand in that file, in the summary and in the live view.
"""

import errno
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rl_observe.config import HealthConfig
from rl_observe.glossary import TEXTS
from rl_observe.log_files import EventLog, read_events
from rl_observe.run_directory import RunDirectory, RunDirectoryError
from rl_observe.samples import ScoredResponse


@dataclass(frozen=True, slots=True)
class Condition:
    """Something that may happen to a run."""

    name: str
    cause: str  # when it occurs, or how it is detected
    reaction: str  # what the run does


CONDITIONS = tuple(Condition(name, **texts) for name, texts in TEXTS["conditions"].items())
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

    name: str  # the name of the condition
    message: str  # what happened, with its numbers
    reaction: str  # what was done about it
    stop: bool = False  # True if `Watch` was configured to stop the run on it


class EventQueue:
    """Thread-safe queue of events for the run log; the driver empties it after each step."""

    def __init__(self) -> None:
        self._waiting: deque[Event] = deque()  # appending and taking one are atomic

    def add(self, name: str, message: str, reaction: str) -> None:
        """Append an event."""
        self._waiting.append(Event(name=name, message=message, reaction=reaction))

    def take(self) -> list[Event]:
        """Remove and return all events, oldest first."""
        return [self._waiting.popleft() for _ in range(len(self._waiting))]


class Watch:
    """Detect conditions in what is logged. Each is reported when it begins, and again only after it was over.

    Call `observe` after every logged step. To resume a run, call `replay` with the rows logged so far.

    `no_signal` quotes responses, which the log of a step does not hold. Pass them as `samples`: a few responses of
    the step's batch with their rewards, of which the first two are quoted, or a function without arguments that
    returns them. The function is called only when the condition is reported, so that nothing is decoded otherwise.
    """

    def __init__(self, config: HealthConfig) -> None:
        self._config = config
        self._rewards: dict[str, deque[float]] = {}
        self._best_mean: dict[str, float] = {}
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
    ) -> list[Event]:
        """Process one logged step and return the conditions that begin with it.

        Args:
            stage: the stage of the step; rewards of different stages are not compared.
            values: the metrics of the step.
            errors: rollouts that could not be scored, over the whole run.
            samples: responses of this step, or a function that returns them (see the class).
        """
        config = self._config
        messages: dict[str, str] = {}  # of the conditions that hold, also those that began earlier

        without, limit = self._batches_without_signal, config.no_signal_batches
        if "groups_with_signal" in values:
            without[stage] = 0 if values["groups_with_signal"] > 0 else without.get(stage, 0) + 1
        if (count := without.get(stage, 0)) >= limit:
            messages["no_signal"] = (
                f"in {count} consecutive batches (health.no_signal_batches={limit}) all rewards of each group were "
                f"equal, so there was nothing to learn from; check that the reward function gives different rewards to "
                f"right and wrong responses, that responses have the format it looks for, and that the prompts are "
                f"neither too easy nor too hard"
            )

        if "reward" in values:
            size, share = config.reward_collapse_steps, config.reward_collapse_share
            window = self._rewards.setdefault(stage, deque(maxlen=size))
            window.append(values["reward"])
            if len(window) == size:
                mean, best = sum(window) / size, self._best_mean.get(stage, -math.inf)
                self._best_mean[stage] = max(best, mean)
                if best > 0 and not mean >= share * best:  # also if it is NaN
                    messages["reward_collapse"] = (
                        f"the mean reward of the last {size} logged steps is {mean:.4g}, below "
                        f"health.reward_collapse_share={share} of the best such mean, {best:.4g}; check the learning "
                        f"rate, the KL to the reference, and the samples in the report"
                    )

        error, most = values.get("token_mult_prob_error", 1.0), config.max_token_mult_prob_error
        # Rollouts of older weights, as asynchronous runs have them, differ by right; a NaN is never right.
        by_right = values.get("staleness", 0.0) > 0 and not math.isnan(error)
        if not error <= most and not by_right:
            messages["logp_mismatch"] = (
                f"token_mult_prob_error={error:.6g} is above health.max_token_mult_prob_error={most}: engine and "
                f"trainer do not hold the same model; check their precisions, and what the last refit verified"
            )

        begun: list[Event] = []
        for name in ("no_signal", "reward_collapse", "logp_mismatch"):
            wanted = getattr(config, f"on_{name}")
            if name not in messages:
                self._under_way.discard(name)
            elif name not in self._under_way and wanted != "ignore":
                self._under_way.add(name)
                message, stop = messages[name], wanted == "stop"
                if name == "no_signal" and samples is not None:
                    message += _quote(samples() if callable(samples) else samples)
                reaction = "the run is saved and ends" if stop else f"the run continues (health.on_{name}=warn)"
                begun.append(Event(name=name, message=message, reaction=reaction, stop=stop))

        before, self._errors = self._errors, max(errors, self._errors)
        if errors > before and errors.bit_length() > before.bit_length():  # reported at powers of two only
            message = f"{errors} rollouts of the run so far could not be scored, or their environment failed"
            reaction = "each is dropped or gets reward 0, as env.on_error says; the run continues"
            begun.append(Event(name="rollouts_failed", message=message, reaction=reaction))
        return begun

    def replay(self, rows: Sequence[Mapping[str, object]], *, errors: int) -> None:
        """Process the rows that earlier processes of the run logged, without reporting their conditions again."""
        for row in rows:
            self.observe(str(row["stage"]), {k: float(v) for k, v in row.items() if isinstance(v, int | float)})
        self._errors = errors


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


class _View(Protocol):
    def event(self, name: str, step: int | None, message: str) -> None: ...


class Reporter:
    """Show events and write them down, with `RunLog.events` and `LiveView` for example.

    If the disk refuses an event, the run continues: the view has shown it, and `unwritten` keeps the reason.
    """

    def __init__(self, events: EventLog, view: _View) -> None:
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
