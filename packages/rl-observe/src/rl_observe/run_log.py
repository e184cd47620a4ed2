"""Everything that a run writes while it runs: metrics, spans, events, refits, samples, trackers and profiler."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from rl_observe.config import HealthConfig, LoggerConfig
from rl_observe.glossary import PHASE_PREFIX, finite_number, phase_seconds
from rl_observe.health import EventQueue, HealthError, Reporter, Watch, count_events, name_of
from rl_observe.live import LiveView
from rl_observe.log_files import (
    TRAINER,
    EventLog,
    JsonLinesWriter,
    JsonValue,
    MetricsLog,
    RefitLog,
    SpanLog,
    read_metrics,
)
from rl_observe.profiling import Profiler, memory_metrics
from rl_observe.provenance import collect_versions
from rl_observe.redaction import Secrets, redact
from rl_observe.report import write_report
from rl_observe.run_directory import RunDirectory, write_text
from rl_observe.samples import Sample
from rl_observe.step_recorder import StepRecorder
from rl_observe.trace import write_trace
from rl_observe.trackers import Delivery, Status, enabled_trackers, start_tracker

# How long the end of a run waits for each tracker.
_FINISH_TIMEOUT_S = 90.0


class RunLog:
    """Log a run.

    As a context manager around a training loop it does everything: it records versions and settings, watches the
    metrics for unhealthy conditions, and at the end, also after an error, writes `summary.json` and `report.html`.

        with RunLog("runs/mine", recipe={"lr": 1e-3}) as log:
            for batch in batches:
                with log.phase("train"):
                    loss = train_step(batch)
                log.step(loss=loss)

    A program that watches its run and writes summary and report itself, as rl-launcher does, does not enter the
    context: it calls `step`, then `finish` or `close`.

    Args:
        run_dir: a path, at which a new run directory is created, or an open `RunDirectory`.
        config: TensorBoard, trackers, trace and profiler; by default TensorBoard only.
        recipe: the settings of the run as plain data. Credentials are removed before anything is written or sent.
        health: the conditions to watch for inside the context.
        view: a live view that shows each step and event.
        warn: called once if a tracker fails, possibly from another thread; by default the view, or stderr.
        elapsed_s: seconds that earlier processes of the run took; by default the time of the last logged step.
        rank: of this process, for the profiler's file.

    Raises:
        TrackerError: a tracker could not be started.
        RunDirectoryError: the directory cannot be created, or the disk refuses.
    """

    def __init__(
        self,
        run_dir: RunDirectory | Path | str,
        config: LoggerConfig | None = None,
        *,
        recipe: Mapping[str, object] | None = None,
        health: HealthConfig | None = None,
        view: LiveView | None = None,
        warn: Callable[[str], None] | None = None,
        elapsed_s: float | None = None,
        rank: int = 0,
    ) -> None:
        self.run = run = run_dir if isinstance(run_dir, RunDirectory) else RunDirectory.create(run_dir)
        self.secrets = Secrets.of(recipe or {})
        """The recipe's credentials, to be removed from whatever else is written."""
        self.summary: dict[str, object] = {}
        """Figures to add to `summary.json` when the context ends."""
        self._config, self._recipe = config or LoggerConfig(), redact(dict(recipe or {}))
        self._view, messages = view, view or _Stderr()
        self._health = health or HealthConfig()
        self._watch: Watch | None = None
        if elapsed_s is None:
            elapsed_s = max((finite_number(row.get("time_s")) or 0.0 for row in read_metrics(run)), default=0.0)
        self.metrics = MetricsLog(run, elapsed_s=elapsed_s, tensorboard=self._config.tensorboard_enabled)
        self.spans = SpanLog(run, elapsed_s=elapsed_s)
        """Also keeps the clock of the run."""
        self.findings = EventQueue()
        """Causes of trouble that recorded steps show; `step` reports them inside the context."""
        self.recorded_steps = StepRecorder(
            run,
            self._config.recorded_steps,
            secrets=self.secrets,
            warn=warn or messages.message,
            on_finding=lambda stage, found: self.findings.add(
                found.cause,
                f"step {found.step} of {stage}: {found.evidence}",
                f"the run continues, and the steps around it are kept; {found.remedy}",
            ),
        )
        """Records steps token by token; nothing is written unless the loop calls its `record`."""
        self.events = EventLog(run, secrets=self.secrets, on_write=self.recorded_steps.keep_around)
        self._reporter = Reporter(self.events, messages)
        self.refits = RefitLog(run)
        self.profiler = Profiler(self._config.profiler, run.profile, rank=rank)
        self._last_steps: dict[str, int] = {}
        self._phases: list[tuple[str, float, float]] = []
        self._step_start_s = self.spans.now()
        self._deliveries: dict[str, Delivery] = {}
        try:
            if trackers := enabled_trackers(self._config):
                known = json.loads(run.trackers.read_text(encoding="utf-8")) if run.trackers.exists() else {}
                for each in trackers:
                    earlier = known.get(each.name)
                    known[each.name] = start_tracker(each, self._recipe, run, known_as=earlier, secrets=self.secrets)
                write_text(run.trackers, json.dumps(known, indent=2))
                warn = warn or messages.message
                self._deliveries = {each.name: Delivery(each, warn=warn, secrets=self.secrets) for each in trackers}
        except BaseException:
            self.close()
            raise

    def step(
        self,
        stage: str = "training",
        step: int | None = None,
        values: Mapping[str, float] | None = None,
        /,
        **metrics: float,
    ) -> dict[str, float]:
        """Log one step to the files and the trackers.

        `log.step(loss=0.3)` is enough in a loop of one stage; `log.step("grpo", 7, {"reward": 0.5})` names all.

        Args:
            stage: the stage of the step.
            step: its number, from 1; one more than the stage's last step if not given.
            values: metrics by name, for names that are no identifiers such as `held_out/math`.
            **metrics: more metrics. A tensor of one element is a number too.

        Returns:
            What was logged: the metrics, the memory in use, and the seconds of each `phase` since the last step.

        Raises:
            MetricError: a metric is named `stage`, `step` or `time_s`.
            RunDirectoryError: the disk refused the line.
            HealthError: a condition with the reaction `stop` began with this step.
        """
        step = self._last_steps.get(stage, 0) + 1 if step is None else step
        self._last_steps[stage] = step
        given = {**(values or {}), **metrics}
        numbers = {name: value if isinstance(value, int) else float(value) for name, value in given.items()}
        phases, self._phases = self._phases, []
        start_s, self._step_start_s = self._step_start_s, self.spans.now()
        seconds: dict[str, float] = {}
        for name, phase_start_s, phase_end_s in phases:
            self.spans.write(name, lane=TRAINER, start_s=phase_start_s, end_s=phase_end_s, stage=stage, step=step)
            seconds[PHASE_PREFIX + name] = seconds.get(PHASE_PREFIX + name, 0.0) + phase_end_s - phase_start_s
        if phases:
            end_s = self._step_start_s
            self.spans.step(stage, step, start_s=start_s, end_s=end_s, phases={})
            seconds[PHASE_PREFIX + "other"] = max(0.0, end_s - start_s - sum(seconds.values()))
        logged = {**memory_metrics(), **seconds, **numbers}
        self.metrics.write(stage, step, logged)
        for delivery in self._deliveries.values():
            delivery.log(stage, step, logged)
        self.profiler.reached(stage, step)
        if self._view is not None:
            self._view.update(stage, step, logged)
        stop: HealthError | None = None
        for event in () if self._watch is None else self._watch.observe(stage, logged):
            self._reporter.report(event.name, event.message, reaction=event.reaction, stage=stage, step=step)
            stop = HealthError(event.name, event.message) if event.stop else stop
        if self._watch is not None:
            self._report_findings(stage, step)
        if stop is not None:
            raise stop
        return logged

    def _report_findings(self, stage: str | None, step: int | None) -> None:
        for each in self.findings.take():
            self._reporter.report(each.name, each.message, reaction=each.reaction, stage=stage, step=step)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a part of the current step, such as `train` or `evaluate`; the next `step` logs its seconds.

        Phases must not be nested: their seconds are added up.
        """
        start_s = self.spans.now()
        try:
            yield
        finally:
            self._phases.append((name, start_s, self.spans.now()))

    def write_samples(self, samples: Iterable[Sample]) -> None:
        """Append held-out responses, which the report shows side by side, before and after training.

        Raises:
            RunDirectoryError: the disk refused them.
        """
        with JsonLinesWriter(self.run.samples) as lines:
            for sample in samples:
                lines.append(sample)

    def finish(self, summary: Mapping[str, object], *, status: Status = "finished") -> dict[str, object]:
        """Close the files, send the summary to the trackers, and write the trace if the config asks for it.

        Returns:
            What to add to the summary: `trackers` with the outcome of each, or nothing if there are none.

        Raises:
            RunDirectoryError: the trace could not be written.
        """
        self.close()
        shown = self.secrets.scrub(redact(dict(summary)))
        outcomes = {
            name: delivery.finish(shown, status=status, timeout_s=_FINISH_TIMEOUT_S)
            for name, delivery in self._deliveries.items()
        }
        self._deliveries = {}
        if self._config.trace:
            write_trace(self.run)
        return {"trackers": outcomes} if outcomes else {}

    def close(self) -> None:
        """Close the files; the trackers continue until `finish`. A second call does nothing."""
        self.recorded_steps.close()
        self.metrics.close()
        self.spans.close()
        self.refits.close()
        self.profiler.close()

    def __enter__(self) -> Self:
        """Record settings and versions, and start to watch for conditions."""
        if not self.run.recipe.exists():
            write_text(self.run.recipe, json.dumps(self._recipe, indent=2, ensure_ascii=False, default=str))
        if not self.run.versions.exists():
            write_text(self.run.versions, json.dumps(collect_versions(), indent=2))
        self.run.samples.touch()  # a loop without samples lacks nothing: the report does not miss the file
        rows = read_metrics(self.run)
        self._watch = watch = Watch(self._health)
        watch.replay(rows, errors=0)
        for row in rows:
            self._last_steps[str(row["stage"])] = int(str(row["step"]))
        self._step_start_s = self.spans.now()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Write summary and report, also if one of them fails; an error that ended the run stays the one raised."""
        self.recorded_steps.close()
        self._report_findings(*next(reversed(self._last_steps.items()), (None, None)))
        ended_by = None if error is None else name_of(error)
        status: Status = "finished" if error is None else "interrupted" if ended_by == "interrupted" else "failed"
        summary = {**self._figures(ended_by), **self.summary}
        failures: list[Exception] = []
        for action in (
            lambda: summary.update(self.finish(summary, status=status)),
            lambda: write_text(self.run.summary, json.dumps(self.secrets.scrub(summary), indent=2, default=str)),
            lambda: write_report(self.run),
        ):
            try:
                action()
            except (OSError, ValueError) as failure:
                failures.append(failure)
        if error is not None:
            for each in failures:
                error.add_note(str(each))
        elif failures:
            raise failures[0]

    def _figures(self, ended_by: str | None) -> dict[str, object]:
        rows = read_metrics(self.run)
        measured: dict[str, JsonValue] = {}
        for name in dict.fromkeys(name for row in rows for name in row if name.startswith("held_out_")):
            found = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
            if "/" not in name and found:
                measured[f"{name}_before"] = found[0][1] if found[0][0] == 0 else None
                measured[f"{name}_after"] = found[-1][1]
        totals: dict[str, float] = {}
        for row in rows:
            for name, seconds in phase_seconds(row).items():
                totals[name] = totals.get(name, 0.0) + seconds
        whole = sum(totals.values()) or 1.0
        return {
            "run_dir": str(self.run.path),
            "task": self.run.path.name,
            "algorithm": rows[-1]["stage"] if rows else None,
            "interrupted": ended_by is not None,
            "ended_by": ended_by,
            "conditions": count_events(self.run),
            "steps": sum(self._last_steps.values()),
            "wall_s": round(self.spans.now(), 2),
            "phase_share": {name: round(totals[name] / whole, 4) for name in sorted(totals, key=lambda n: -totals[n])},
            **measured,
        }


class _Stderr:
    """Shows events and warnings of a run that has no live view."""

    def event(self, name: str, step: int | None, message: str) -> None:
        self.message(f"{name}{'' if step is None else f' at step {step}'}: {message}")

    def message(self, text: str) -> None:
        sys.stderr.write(f"rl-observe: {text}\n")
