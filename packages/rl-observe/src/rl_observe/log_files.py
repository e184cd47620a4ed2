"""The log files of a run, one JSON object per line: metrics, spans, events and refits, and how they are read back.

    metrics.jsonl  {"stage": "grpo", "step": 7, "time_s": 3.25, "reward": 0.5, "phase_s/generate": 0.11}
    spans.jsonl    {"name": "generate", "lane": "trainer", "start_s": 1.25, "end_s": 1.75, "stage": "grpo", …}
    events.jsonl   {"time": "2026-11-22T09:30:00.000+00:00", "stage": "grpo", "step": 14, "name": "engine_died", …}

Seconds count from the start of the run, over all processes that have worked on it. A killed process loses no complete
line, and a torn line costs only itself. Whatever opens or writes a file raises `RunDirectoryError` if the disk refuses.
"""

from __future__ import annotations

import functools
import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, Protocol, Self, TypeAlias, TypeVar

from rl_observe.glossary import PHASE_PREFIX, phase_seconds
from rl_observe.redaction import Secrets
from rl_observe.run_directory import RunDirectory, RunDirectoryError, describe

if TYPE_CHECKING:
    from torch.utils.tensorboard import FileWriter

P = ParamSpec("P")
T = TypeVar("T")
JsonValue: TypeAlias = "str | float | bool | list[JsonValue] | dict[str, JsonValue] | None"
"""A value that JSON can hold."""
Row: TypeAlias = dict[str, JsonValue]
"""One line of a log file."""

TRAINER = "trainer"
"""The lane of the thread that drives the run."""

_RESERVED = ("stage", "step", "time_s")


class Closing:
    """A context manager that calls `close` on exit."""

    def close(self) -> None:
        """Release what is held; a second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MetricError(ValueError):
    """A metric has a name that the log reserves for itself."""


class MetricsLog(Closing):
    """Write `metrics.jsonl` and, if `tensorboard`, the same scalars as TensorBoard events.

    with MetricsLog(run) as log:
        log.write("grpo", 1, {"reward": 0.3, "phase_s/generate": 0.11})

    `elapsed_s` is what earlier processes of the run took.
    """

    def __init__(self, run: RunDirectory, *, elapsed_s: float = 0.0, tensorboard: bool = True) -> None:
        self._start = time.monotonic() - elapsed_s
        self._lines = JsonLinesWriter(run.metrics)
        self._tensorboard: FileWriter | None = None
        if tensorboard:
            # Here, not at the top: TensorBoard and torch take seconds to import, which reading a log should not pay.
            from torch.utils.tensorboard import FileWriter

            self._tensorboard = FileWriter(str(run.tensorboard))

    def write(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Append one line `{"stage", "step", "time_s", **values}`, and the scalars `stage/name` at `step`.

        A value that is not finite is null in the line, and left out of TensorBoard, which would draw it as zero. When
        the call returns, the line has left this process.

        Raises:
            MetricError: a value is named `stage`, `step` or `time_s`.
        """
        if clashes := sorted(set(values) & set(_RESERVED)):
            raise MetricError(
                f"metrics of stage {stage!r} at step {step} are named {', '.join(clashes)}, which the log itself "
                f"writes ({', '.join(_RESERVED)}); rename them"
            )
        numbers = {name: value if isinstance(value, int) else float(value) for name, value in values.items()}
        time_s = round(time.monotonic() - self._start, 4)
        self._lines.append({"stage": stage, "step": step, "time_s": time_s, **numbers})
        if self._tensorboard is None:
            return
        from tensorboard.compat.proto.summary_pb2 import Summary

        finite = [(name, value) for name, value in numbers.items() if math.isfinite(value)]
        # One event for all scalars of a step is many times faster than one `SummaryWriter.add_scalar` each.
        scalars = [Summary.Value(tag=f"{stage}/{name}", simple_value=value) for name, value in finite]
        self._tensorboard.add_summary(Summary(value=scalars), step)

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        self._lines.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None


class EventLog:
    """Write `events.jsonl`, from any thread. The file appears with the first event; most runs have none.

    Credentials in `secrets` are removed from every message. `on_write` is called with stage and step of each event.
    """

    def __init__(
        self,
        run: RunDirectory,
        *,
        secrets: Secrets | None = None,
        on_write: Callable[[str | None, int | None], object] = lambda *_: None,
    ) -> None:
        self._run, self._secrets, self._on_write = run, secrets or Secrets(), on_write

    def write(self, name: str, step: int | None, message: str, *, reaction: str, stage: str | None = None) -> None:
        """Append one event: the condition's name, such as `engine_died`, what happened, and what was done about it.

        `step` is the optimizer step of `stage` at which it occurred, if it belongs to one.
        """
        moment = datetime.now(UTC).isoformat(timespec="milliseconds")
        row = {"name": name, "message": message, "reaction": reaction}
        with JsonLinesWriter(self._run.events) as lines:
            lines.append({"time": moment, "stage": stage, "step": step, **self._secrets.scrub(row)})
        self._on_write(stage, step)


class RefitFigures(Protocol):
    """The part of a refit's report that is logged; `rl_refit.RefitReport` has it."""

    @property
    def version(self) -> int:
        """Optimizer steps that the weights have seen."""

    @property
    def bytes(self) -> int:
        """Bytes received by the engine."""

    @property
    def tensors(self) -> int:
        """Tensors updated."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds per phase of the refit."""

    @property
    def verified(self) -> str:
        """What was compared by digest on both sides, or "nothing"."""

    @property
    def digest(self) -> str | None:
        """The digest of everything compared, in hex."""


class RefitLog(Closing):
    """Write `refits.jsonl`. The file appears with the first refit; a run without an engine has none."""

    def __init__(self, run: RunDirectory) -> None:
        self._path = run.refits
        self._lines: JsonLinesWriter | None = None

    def write(self, report: RefitFigures, *, stage: str | None = None, step: int | None = None) -> None:
        """Append one refit that was committed; of several replicas, with the `versions` that each now has."""
        row = {name: getattr(report, name) for name in ("version", "bytes", "tensors", "verified", "digest")}
        if (versions := getattr(report, "versions", None)) is not None:  # only a report of replicas has them
            row["versions"] = dict(versions)
        seconds = {phase: round(value, 6) for phase, value in report.seconds.items()}
        if self._lines is None:
            self._lines = JsonLinesWriter(self._path)
        self._lines.append({"stage": stage, "step": step, **row, "seconds": seconds})

    def close(self) -> None:
        """Close the file; a second call does nothing, and another `write` opens it again."""
        if self._lines is not None:
            self._lines.close()
            self._lines = None


class SpanLog(Closing):
    """Write `spans.jsonl`, from any thread, and keep the run's clock.

    `elapsed_s` is what earlier processes of the run took.
    """

    def __init__(self, run: RunDirectory, *, elapsed_s: float = 0.0) -> None:
        self._lines = JsonLinesWriter(run.spans)
        self._start_s = time.monotonic() - elapsed_s
        self._main = threading.get_ident()
        self._measured = 0

    def now(self) -> float:
        """Return the seconds since the start of the run."""
        return time.monotonic() - self._start_s

    def write(
        self,
        name: str,
        *,
        lane: str,
        start_s: float,
        end_s: float,
        stage: str | None = None,
        step: int | None = None,
        laid: bool = False,
    ) -> None:
        """Append one span that was measured elsewhere, in seconds since the start of the run.

        `laid` marks a span of which only the length was measured.
        """
        if end_s < start_s:
            raise ValueError(f"span {name!r} in lane {lane!r} ends at {end_s} s, before it starts at {start_s} s")
        if lane == TRAINER:
            self._measured += 1
        row = {"name": name.removeprefix(PHASE_PREFIX), "lane": lane, "stage": stage, "step": step, "laid": laid}
        self._lines.append({**row, "start_s": round(start_s, 6), "end_s": round(end_s, 6)})

    @contextmanager
    def span(
        self, name: str, *, lane: str | None = None, stage: str | None = None, step: int | None = None
    ) -> Iterator[None]:
        """Write the time that the block took, also if it raises. The default lane is that of the current thread."""
        lane = lane or (TRAINER if threading.get_ident() == self._main else threading.current_thread().name)
        start_s = self.now()
        try:
            yield
        finally:
            self.write(name, lane=lane, start_s=start_s, end_s=self.now(), stage=stage, step=step)

    def timed(self, name: str, function: Callable[P, T]) -> Callable[P, T]:
        """Wrap `function` so that each call is a span in the lane of the calling thread."""

        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> T:
            with self.span(name):
                return function(*args, **kwargs)

        return called

    def step(self, stage: str, step: int, *, start_s: float, end_s: float, phases: Mapping[str, float]) -> None:
        """Write a step of the trainer, and its phases if no span of the trainer was written during it.

        In that case `phases` (seconds by `phase_s/...`) are laid end to end in their usual order: the lengths are
        measured, the positions are not, and the spans are marked `laid`.
        """
        measured = self._measured
        self.write("step", lane=TRAINER, start_s=start_s, end_s=end_s, stage=stage, step=step)
        at = start_s
        for name, seconds in {} if measured else phase_seconds(phases).items():
            if name != "other" and seconds > 0:
                until = min(end_s, at + seconds)
                self.write(name, lane=TRAINER, start_s=at, end_s=until, stage=stage, step=step, laid=True)
                at = until
        self._measured = 0  # the spans written here are no measurements of the next step

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._lines.close()


def read_metrics(run: RunDirectory) -> list[Row]:
    """Read the logged steps in their order; [] if nothing was logged yet. Torn lines are skipped."""
    return _rows(run.metrics)


def read_events(run: RunDirectory) -> list[Row]:
    """Read the events in their order; [] if there were none."""
    return _rows(run.events)


def read_refits(run: RunDirectory) -> list[Row]:
    """Read the refits in their order; [] if there were none."""
    return _rows(run.refits)


def read_spans(run: RunDirectory) -> list[Row]:
    """Read the spans in the order in which they ended; [] if there were none."""
    return _rows(run.spans)


def _rows(path: Path) -> list[Row]:
    return read_json_lines(path)[0] if path.exists() else []


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


class JsonLinesWriter(Closing):
    """Append rows to a file, from any thread. When `append` returns, the operating system has the line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        try:
            self._file = path.open("ab", buffering=0)
            # Start a new line after a torn one; appended to it, the next object would be torn as well.
            if self._file.tell():
                with path.open("rb") as file:
                    file.seek(-1, 2)
                    if file.read(1) != b"\n":
                        self._file.write(b"\n")
        except OSError as error:
            raise RunDirectoryError(f"{path} cannot be opened for writing: {describe(error)}") from error

    def append(self, row: Mapping[str, object]) -> None:
        """Write one object as one line; a number that is not finite becomes null. Earlier lines stay complete."""
        try:
            line = _ENCODER.encode(row)
        except (TypeError, ValueError):  # a number that is not finite, or a mapping that is no dict
            line = _ENCODER.encode(_finite(row))
        data = (line + "\n").encode()
        try:
            with self._lock:
                while data:  # an unbuffered write may write less than it was given
                    data = data[self._file.write(data) :]
        except OSError as error:
            raise RunDirectoryError(
                f"{self._path} cannot be written: {describe(error)}; all earlier lines are complete"
            ) from error

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def read_json_lines(path: Path) -> tuple[list[Row], int]:
    """Read every line that is a JSON object, and count those that are not, such as one that a killed run left torn.

    Raises:
        OSError: the file cannot be read.
    """
    rows: list[Row] = []
    unreadable = 0
    with path.open("rb") as lines:
        for line in lines:
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if isinstance(row, dict):
                rows.append(row)
            else:
                unreadable += 1
    return rows, unreadable


def flat(data: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the leaves of nested plain data by dotted key; a list is one leaf."""
    for name, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
