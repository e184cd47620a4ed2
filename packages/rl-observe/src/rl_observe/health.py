"""Health conditions of a run: their names, how they are detected from logged metrics, and how they are reported.

The names stand in `events.jsonl`, in the summary and in the live view; documents take the table from here.
"""

import errno
import threading
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rl_observe import RunDirectory, RunDirectoryError, read_events
from rl_observe.config import HealthConfig

__all__ = [
    "CONDITIONS",
    "Condition",
    "Event",
    "EventQueue",
    "Events",
    "Reporter",
    "RewardWindow",
    "View",
    "Watch",
    "conditions_table",
    "count_events",
    "is_disk_full",
    "name_of",
    "reaction_to",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """Something that may happen to a run."""

    name: str
    cause: str
    """What is the case, or how it is noticed."""
    reaction: str
    """What the run does."""


CONDITIONS = (
    Condition(
        name="nonfinite_loss",
        cause="the loss of a step is NaN or infinite",
        reaction="its gradient is not applied; the run saves what it was before the step, and ends with exit code 1",
    ),
    Condition(
        name="reward_collapse",
        cause="the mean reward of `health.reward_collapse_steps` logged steps is below `health.reward_collapse_share` "
        "of the best such mean before, and that was positive",
        reaction="`health.on_reward_collapse`: told once until it recovers, or saved and ended with exit code 1",
    ),
    Condition(
        name="logp_mismatch",
        cause="`token_mult_prob_error` is above `health.max_token_mult_prob_error`: engine and trainer do not hold "
        "the same model",
        reaction="`health.on_logp_mismatch`: told once until it recovers, or saved and ended with exit code 1",
    ),
    Condition(
        name="disk_full",
        cause="the disk, or its quota, refuses a line of the log or a checkpoint",
        reaction="the run ends with exit code 1; every checkpoint that was whole is whole, and the message says what "
        "is free",
    ),
    Condition(
        name="rollouts_failed",
        cause="an answer could not be judged, or an environment failed or took longer than `env.timeout_s`",
        reaction="that rollout alone is left out, or is worth 0 (`env.on_error`), and is counted; told at the 1st, "
        "2nd, 4th, 8th ...",
    ),
    Condition(
        name="engine_restarted",
        cause="an engine died or did not answer",
        reaction="a new one takes its place and its current version of the weights; its prompts are asked again",
    ),
    Condition(
        name="engine_healed",
        cause="a restarted engine has weights again",
        reaction="it answers prompts as before",
    ),
    Condition(
        name="refit_repeated",
        cause="an engine died during a refit",
        reaction="the refit is given up everywhere, and done again with a new engine",
    ),
    Condition(
        name="engine_waits",
        cause="a restarted engine has no weights yet, since the trainer's are moving",
        reaction="the other engines go on; the next refit brings it weights",
    ),
    Condition(
        name="engine_died",
        cause="an engine died, and `policy.generation.max_restarts` are used up",
        reaction="the run saves; with `cluster.max_restarts` left, all processes start anew from there, else it ends "
        "with exit code 1",
    ),
    Condition(
        name="trainer_died",
        cause="a rank of the trainer died",
        reaction="with `cluster.max_restarts` left, all processes start anew from the last whole checkpoint; else the "
        "run ends with exit code 1",
    ),
    Condition(
        name="restarted",
        cause="the run went on by itself after it had lost a process",
        reaction="later steps than the checkpoint's are cut from the log into `*.discarded`, and taken again",
    ),
    Condition(
        name="resumed",
        cause="`rl-launcher resume`",
        reaction="as `restarted`; which keys, and which of the user's files, were changed is told",
    ),
    Condition(
        name="interrupted",
        cause="Ctrl-C or SIGTERM",
        reaction="the step at hand ends, the run saves and ends with exit code 130; a second signal ends it at once, "
        "without saving",
    ),
    Condition(
        name="must_save_by",
        cause="`checkpointing.checkpoint_must_save_by` would pass during the next step",
        reaction="the run saves and ends with exit code 75: to be resumed",
    ),
    Condition(
        name="failed",
        cause="anything else that ends a run half-way",
        reaction="the run saves what it can, and ends with exit code 1",
    ),
)


def conditions_table() -> str:
    """All conditions as a table in Markdown."""
    rows = [f"| `{each.name}` | {each.cause} | {each.reaction} |" for each in CONDITIONS]
    return "\n".join(["| condition | cause | reaction |", "|---|---|---|", *rows])


def reaction_to(name: str) -> str:
    """What the run does about a condition."""
    known = {each.name: each.reaction for each in CONDITIONS}
    return known.get(name, known["failed"])


def name_of(error: BaseException) -> str:
    """Which condition ended a run."""
    if isinstance(condition := getattr(error, "condition", None), str):
        return condition
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if is_disk_full(error):
        return "disk_full"
    # A sibling raises it as a ValueError with this text; the claim about NaN in test_health holds the two together.
    return "nonfinite_loss" if str(error).startswith("the loss of this step is ") else "failed"


def is_disk_full(error: BaseException) -> bool:
    """Whether a full disk is behind an error, or behind what another process told of one."""
    full = {errno.ENOSPC, errno.EDQUOT}
    return any(
        (isinstance(each, OSError) and each.errno in full) or "No space left on device" in str(each)
        for each in _chain(error)
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One of them."""

    name: str
    """Of a condition, as in `rl_observe.health.CONDITIONS`."""
    message: str
    """What happened, with its numbers."""
    reaction: str
    """What was done about it."""


class EventQueue:
    """A queue that parts put into and the recorder empties after each step. As safe from many threads as from one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[Event] = []

    def add(self, name: str, message: str, reaction: str) -> None:
        """Tell that something happened."""
        with self._lock:
            self._waiting.append(Event(name=name, message=message, reaction=reaction))

    def take(self) -> list[Event]:
        """All that was added since the last time, oldest first."""
        with self._lock:
            taken, self._waiting = self._waiting, []
        return taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Noticed:
    """A event, and whether it ends the run."""

    event: Event
    stop: bool


class RewardWindow:
    """The mean of the last `size` rewards against the best such mean before."""

    def __init__(self, *, size: int, share: float) -> None:
        self._share, self._size = share, size
        self._last: deque[float] = deque(maxlen=size)
        self.best = float("-inf")
        """The best mean of a full window so far."""

    def add(self, reward: float) -> float | None:
        """Take in one step's reward; return the mean of the window if it has collapsed, else None."""
        self._last.append(reward)
        if len(self._last) < self._size:
            return None
        mean = sum(self._last) / self._size
        collapsed = self.best > 0 and mean < self._share * self.best
        self.best = max(self.best, mean)
        return mean if collapsed else None


class Watch:
    """Looks at what is logged. A condition is told when it begins, and again only after it was over."""

    def __init__(self, config: HealthConfig) -> None:
        self._config = config
        self._rewards: dict[str, RewardWindow] = {}
        self._under_way: set[str] = set()
        self._errors = 0

    def observe(self, stage: str, values: Mapping[str, float], *, errors: int = 0) -> list[Noticed]:
        """Take in the figures of one step.

        Args:
            stage: whose step it is; rewards of different stages are not compared.
            values: as they are logged.
            errors: rollouts that could not be judged, over the whole run.
        """
        config = self._config
        found = [
            self._begun("reward_collapse", self._collapse(stage, values), config.on_reward_collapse),
            self._begun("logp_mismatch", self._mismatch(values), config.on_logp_mismatch),
        ]
        return [each for each in found if each is not None] + self._failed_rollouts(errors)

    def replay(self, rows: Sequence[Mapping[str, object]], *, errors: int) -> None:
        """Take in what an earlier process of the run has logged, of which it told already."""
        for row in rows:
            self.observe(str(row["stage"]), {k: float(v) for k, v in row.items() if isinstance(v, int | float)})
        self._errors = errors

    def _collapse(self, stage: str, values: Mapping[str, float]) -> str | None:
        if "reward" not in values:
            return None
        config = self._config
        window = self._rewards.setdefault(
            stage, RewardWindow(size=config.reward_collapse_steps, share=config.reward_collapse_share)
        )
        mean = window.add(values["reward"])
        if mean is None:
            return None
        return (
            f"the mean reward of the last {config.reward_collapse_steps} logged steps is {mean:.4g}, below "
            f"health.reward_collapse_share={config.reward_collapse_share} of the best such mean, {window.best:.4g}; "
            f"look at the learning rate, the samples of the report, and kl"
        )

    def _mismatch(self, values: Mapping[str, float]) -> str | None:
        error, limit = values.get("token_mult_prob_error", 1.0), self._config.max_token_mult_prob_error
        if error <= limit:
            return None
        return (
            f"token_mult_prob_error={error:.6g} is above health.max_token_mult_prob_error={limit}: engine and trainer "
            f"do not hold the same model; look at their precisions, and at what the last refit verified"
        )

    def _begun(self, name: str, message: str | None, wanted: str) -> Noticed | None:
        if message is None:
            self._under_way.discard(name)
        if message is None or name in self._under_way or wanted == "ignore":
            return None
        self._under_way.add(name)
        stop = wanted == "stop"
        reaction = "the run is saved and ends" if stop else f"none but this message (health.on_{name}=warn)"
        return Noticed(event=Event(name=name, message=message, reaction=reaction), stop=stop)

    def _failed_rollouts(self, errors: int) -> list[Noticed]:
        before, self._errors = self._errors, max(errors, self._errors)
        if errors <= before or errors.bit_length() == before.bit_length():  # told at powers of two alone
            return []
        message = f"{errors} rollouts of the run so far could not be judged, or their environment failed"
        reaction = "each costs one rollout, as env.on_error says; the run goes on"
        return [Noticed(event=Event(name="rollouts_failed", message=message, reaction=reaction), stop=False)]


class Events(Protocol):
    """What writes an event down; `rl_observe.EventLog` does."""

    def write(self, name: str, step: int | None, message: str, *, reaction: str, stage: str | None = None) -> None:
        """Append one event."""


class View(Protocol):
    """What shows an event."""

    def event(self, name: str, step: int | None, message: str) -> None:
        """Show it."""


class Reporter:
    """Tells of events. A disk that refuses an event does not end a run that goes on: the view has shown it."""

    def __init__(self, events: Events, view: View) -> None:
        self._events, self._view = events, view
        self.unwritten: list[str] = []
        """Events that the disk refused."""

    def report(
        self, name: str, message: str, *, reaction: str, stage: str | None = None, step: int | None = None
    ) -> None:
        """Show and write down one event."""
        self._view.event(name, step, f"{message}; {reaction}")
        try:
            self._events.write(name, step, message, reaction=reaction, stage=stage)
        except RunDirectoryError as error:
            self.unwritten.append(str(error))


def count_events(run: RunDirectory) -> dict[str, int]:
    """How often each condition occurred, over all processes of a run; empty where nothing happened."""
    return dict(Counter(str(event["name"]) for event in read_events(run)))
