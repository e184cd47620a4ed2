"""The files of the log: metrics, samples, events, refits and spans, one JSON object a line, and how they are read back.

It does not know what a metric means; `glossary` does. The trainer chooses when to log.

{"time": "2026-11-22T09:30:00+00:00", "stage": "grpo", "step": 14,
 "name": "engine_died", "message": "engine 1 ...", "reaction": "restarted"}        (on one line)

It does not know which conditions there are.

    {"name": "generate", "lane": "trainer", "start_s": 1.25, "end_s": 1.75, "stage": "grpo", "step": 7, "laid": false}

It knows clocks and threads. It does not know what the names mean. Seconds count from the start of the run, over all
processes that have carried it on.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Literal, NotRequired, ParamSpec, Protocol, Self, TypedDict, TypeVar

from rl_observe.glossary import PHASE_PREFIX, phase_seconds
from rl_observe.json_lines import JsonLinesWriter, JsonValue, read_json_lines
from rl_observe.redaction import Secrets
from rl_observe.run_directory import RunDirectory

if TYPE_CHECKING:
    from torch.utils.tensorboard import FileWriter

__all__ = [
    "TRAINER",
    "EventLog",
    "MetricError",
    "MetricsLog",
    "RefitFigures",
    "RefitLog",
    "Sample",
    "SampleTokens",
    "SpanLog",
    "read_events",
    "read_metrics",
    "read_refits",
    "read_spans",
]

_OURS = ("stage", "step", "time_s")


class MetricError(ValueError):
    """A metric that cannot be logged under the name it was given."""


class SampleTokens(TypedDict):
    """A conversation as the trainer sees it; the lists have one entry a token."""

    pieces: list[str]
    """The text of each token; together they are the text of all. "" where a letter ends in a later token."""
    logp: list[float | None]
    """The engine's log-probability of the tokens that it sampled; None for all others."""
    trained: list[bool]
    """Whether the loss looks at the token: not at prompts, observations, or what was left out."""
    turns: list[int]
    """Which answer of the conversation the token belongs to, from 0; -1 for what the policy did not say."""


class Sample(TypedDict):
    """One held-out answer."""

    when: Literal["before", "after"]
    """Before or after the training of `stage`."""
    stage: str
    """The stage whose training lies between before and after."""
    prompt: str
    """What was asked; it pairs an answer from before with the one from after."""
    expected: str | None
    """The right answer, where there is one."""
    response: str
    """What the policy answered."""
    reward: float | None
    """What the environment gave for it; 1 or more counts as right. None where nobody judges."""
    truncated: bool
    """Whether the answer ended at the token limit and not with a stop token."""
    tokens: NotRequired[SampleTokens]
    """The whole conversation token by token, of the few answers that are kept so; `token_sample` makes it."""


class MetricsLog:
    """Log a run. Use it as a context manager, around all of its stages.

    with MetricsLog(run) as log:
        log.write("grpo", 1, {"reward": 0.3, "phase_s/generate": 0.11})
    """

    def __init__(self, run: RunDirectory, *, elapsed_s: float = 0.0, tensorboard: bool = True) -> None:
        self._run = run
        self._has_tensorboard = tensorboard
        self._start = time.monotonic() - elapsed_s
        self._lines = JsonLinesWriter(run.metrics)
        self._tensorboard: FileWriter | None = None

    def write(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Append one line `{"stage", "step", "time_s", **values}` and the scalars `stage/name` at `step`.

        `time_s` counts seconds since the log was opened, on top of `elapsed_s`. The line is out of this process when
        the call returns. A value that is not finite is null in the line, and absent from TensorBoard, which would draw
        it as zero.

        Raises:
            MetricError: a value is named like a field of the log's own.
            RunDirectoryError: the disk refused the line.
        """
        clashes = sorted(set(values) & set(_OURS))
        if clashes:
            raise MetricError(
                f"metrics of stage {stage!r} at step {step} are named {', '.join(clashes)}, which the log itself "
                f"writes ({', '.join(_OURS)}); name them otherwise"
            )
        numbers = {name: value if isinstance(value, int) else float(value) for name, value in values.items()}
        row: dict[str, JsonValue] = {
            "stage": stage,
            "step": step,
            "time_s": round(time.monotonic() - self._start, 4),
            **numbers,
        }
        self._lines.append(row)
        if self._has_tensorboard:
            self._write_scalars(f"{stage}/", step, numbers)

    def write_samples(self, samples: Iterable[Sample]) -> None:
        """Append held-out answers.

        Raises:
            RunDirectoryError: the disk refused them.
        """
        with JsonLinesWriter(self._run.samples) as lines:
            for sample in samples:
                lines.append(sample)

    def close(self) -> None:
        """Close the files; a second time does nothing."""
        self._lines.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write_scalars(self, prefix: str, step: int, values: Mapping[str, float]) -> None:
        # TensorBoard takes a second to import, which reading a run should not pay.
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import FileWriter

        if self._tensorboard is None:
            self._tensorboard = FileWriter(str(self._run.tensorboard))
        finite = [(name, value) for name, value in values.items() if math.isfinite(value)]
        # One event for all scalars of a step: many times as fast as one `SummaryWriter.add_scalar` each.
        scalars = [Summary.Value(tag=prefix + name, simple_value=value) for name, value in finite]
        self._tensorboard.add_summary(Summary(value=scalars), step)


def read_metrics(run: RunDirectory) -> list[dict[str, JsonValue]]:
    """Read the lines of a run in the order in which they were written; [] where nothing was logged yet.

    A torn line is left out; `json_lines.read_json_lines` counts those.
    """
    return read_json_lines(run.metrics).rows if run.metrics.exists() else []


class EventLog:
    """Write events, from any thread. The file is made with the first one: most runs have none.

    Args:
        run: whose events they are.
        secrets: what their messages must not hold.
    """

    def __init__(self, run: RunDirectory, *, secrets: Secrets | None = None) -> None:
        self._run, self._secrets = run, secrets or Secrets()
        self.count = 0
        """Events that this process has written."""

    def write(self, name: str, step: int | None, message: str, *, reaction: str, stage: str | None = None) -> None:
        """Append one event.

        Args:
            name: of the condition, as `engine_died`.
            step: the stage's optimizer step in which it came up, if it belongs to one.
            message: what happened, with its numbers.
            reaction: what was done about it.
            stage: the stage of `step`.

        Raises:
            RunDirectoryError: the disk refused it.
        """
        moment = datetime.now(UTC).isoformat(timespec="milliseconds")
        row = {"name": name, "message": message, "reaction": reaction}
        with JsonLinesWriter(self._run.events) as lines:
            lines.append({"time": moment, "stage": stage, "step": step, **self._secrets.scrub(row)})
        self.count += 1


def read_events(run: RunDirectory) -> list[dict[str, JsonValue]]:
    """The events of a run in the order in which they were written; [] where nothing happened."""
    return read_json_lines(run.events).rows if run.events.exists() else []


class RefitFigures(Protocol):
    """What is kept of a refit; `rl_refit.RefitReport` matches."""

    @property
    def version(self) -> int:
        """Optimizer steps that the weights have seen."""

    @property
    def bytes(self) -> int:
        """Bytes that arrived."""

    @property
    def tensors(self) -> int:
        """Tensors fed."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds by phase."""

    @property
    def verified(self) -> str:
        """What was digested on both sides; "nothing" where nothing was."""

    @property
    def digest(self) -> str | None:
        """Of all that was digested, in hex."""


class RefitLog:
    """Write the refits of a run, one line each."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run

    def write(self, report: RefitFigures, *, stage: str | None = None, step: int | None = None) -> None:
        """Append one refit that was committed.

        Raises:
            RunDirectoryError: the disk refused it.
        """
        row = {
            "stage": stage,
            "step": step,
            "version": report.version,
            "bytes": report.bytes,
            "tensors": report.tensors,
            "seconds": {phase: round(seconds, 6) for phase, seconds in report.seconds.items()},
            "verified": report.verified,
            "digest": report.digest,
        }
        with JsonLinesWriter(self._run.refits) as lines:
            lines.append(row)


def read_refits(run: RunDirectory) -> list[dict[str, JsonValue]]:
    """The refits of a run in their order; [] where none was logged."""
    return read_json_lines(run.refits).rows if run.refits.exists() else []


P = ParamSpec("P")
T = TypeVar("T")

TRAINER = "trainer"
"""The lane of the thread that drives the run."""

_NOT_DRAWN = "other"


class SpanLog:
    """Write spans, from any thread. Use it as the run's one clock.

    Args:
        run: whose spans they are.
        elapsed_s: seconds that the run took in earlier processes.
    """

    def __init__(self, run: RunDirectory, *, elapsed_s: float = 0.0) -> None:
        self._lines = JsonLinesWriter(run.spans)
        self._start_s = time.monotonic() - elapsed_s
        self._start_unix_s = time.time() - elapsed_s
        self._main = threading.get_ident()
        self._measured = 0

    def now(self) -> float:
        """Seconds since the run's start."""
        return time.monotonic() - self._start_s

    def since_start(self, unix_s: float) -> float:
        """Seconds since the run's start at a moment that another process took with `time.time()`.

        As exact as the clocks of the two machines agree.
        """
        return unix_s - self._start_unix_s

    def write(
        self, name: str, *, lane: str, start_s: float, end_s: float, stage: str | None = None, step: int | None = None
    ) -> None:
        """Append one span that was measured elsewhere, in seconds since the run's start.

        Raises:
            RunDirectoryError: the disk refused it.
        """
        if lane == TRAINER:
            self._measured += 1
        self._append(name, lane=lane, start_s=start_s, end_s=end_s, stage=stage, step=step, laid=False)

    @contextmanager
    def span(
        self, name: str, *, lane: str | None = None, stage: str | None = None, step: int | None = None
    ) -> Iterator[None]:
        """Write the time of the block, also if it raises; the lane is the thread's unless it is given."""
        start_s = self.now()
        try:
            yield
        finally:
            self.write(name, lane=lane or self._lane(), start_s=start_s, end_s=self.now(), stage=stage, step=step)

    def timed(self, name: str, function: Callable[P, T]) -> Callable[P, T]:
        """The same function, each of its calls a span in the lane of the thread that calls it."""

        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> T:
            with self.span(name):
                return function(*args, **kwargs)

        return called

    def step(self, stage: str, step: int, *, start_s: float, end_s: float, phases: Mapping[str, float]) -> None:
        """Write a step of the trainer, and its phases where nothing inside it was measured.

        Then `phases`, seconds by `phase_s/...`, are laid end to end in the order in which a step goes through them:
        their lengths are measured, their places are not, and the spans say so (`laid`).

        Raises:
            RunDirectoryError: the disk refused them.
        """
        self._append("step", lane=TRAINER, start_s=start_s, end_s=end_s, stage=stage, step=step, laid=False)
        measured, self._measured = self._measured, 0
        if measured:
            return
        at = start_s
        for name, seconds in phase_seconds(phases).items():
            if name != _NOT_DRAWN and seconds > 0:
                until = min(end_s, at + seconds)
                self._append(name, lane=TRAINER, start_s=at, end_s=until, stage=stage, step=step, laid=True)
                at = until

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        self._lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lane(self) -> str:
        return TRAINER if threading.get_ident() == self._main else threading.current_thread().name

    def _append(
        self, name: str, *, lane: str, start_s: float, end_s: float, stage: str | None, step: int | None, laid: bool
    ) -> None:
        if end_s < start_s:
            raise ValueError(f"span {name!r} in lane {lane!r} ends at {end_s} s, before it starts at {start_s} s")
        row = {"name": name.removeprefix(PHASE_PREFIX), "lane": lane, "stage": stage, "step": step, "laid": laid}
        self._lines.append({**row, "start_s": round(start_s, 6), "end_s": round(end_s, 6)})


def read_spans(run: RunDirectory) -> list[dict[str, JsonValue]]:
    """The spans of a run in the order in which they ended; [] where none were logged."""
    return read_json_lines(run.spans).rows if run.spans.exists() else []
