"""All that a run writes down as it goes, behind one door: figures, spans, events, refits, trackers, profiler, memory.

It knows where each goes. It does not know what is trained, nor when a step ends; whoever drives the run says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rl_observe.log_files import EventLog, MetricsLog, RefitLog, Sample, SpanLog
from rl_observe.profiling import Profiler, memory_metrics
from rl_observe.redaction import Secrets, redact
from rl_observe.run_directory import RunDirectory
from rl_observe.trace import write_trace
from rl_observe.trackers import Delivery, enabled_trackers, start_tracker
from rl_observe.trackers.base import Status

if TYPE_CHECKING:
    from rl_observe.config import LoggerConfig

__all__ = ["RunLog"]

# What a tracker may take at the very end, all of them one after another.
_FINISH_TIMEOUT_S = 90.0


class RunLog:
    """Log a run. Use it as a context manager, around all of its stages; then `finish` it.

    with RunLog(run, logger, recipe=plain_recipe, warn=view.message) as log:
        log.step("grpo", 1, {"reward": 0.3, "phase_s/generate": 0.11})
    log.finish(summary, status="finished")

    Args:
        run: where to.
        config: what is wanted besides the files that are always written.
        recipe: resolved and plain, as written by the user: credentials are taken out here.
        warn: is told, once, of a tracker that fails. May be called from another thread.
        elapsed_s: seconds that the run took in earlier processes.
        rank: of this process, for the profiler's file.

    Raises:
        TrackerError: a tracker could not be started; nothing has been trained then.
        RunDirectoryError: the disk refuses.
    """

    def __init__(
        self,
        run: RunDirectory,
        config: LoggerConfig,
        *,
        recipe: Mapping[str, object],
        warn: Callable[[str], None],
        elapsed_s: float = 0.0,
        rank: int = 0,
    ) -> None:
        self._run, self._config = run, config
        self.secrets = Secrets.of(recipe)
        """The recipe's credentials, to be taken out of whatever else is written."""
        self.metrics = MetricsLog(run, elapsed_s=elapsed_s, tensorboard=config.tensorboard_enabled)
        """The figures of each step."""
        self.spans = SpanLog(run, elapsed_s=elapsed_s)
        """What was done when."""
        self.events = EventLog(run, secrets=self.secrets)
        """Conditions that occurred."""
        self.refits = RefitLog(run)
        """The refits."""
        self.profiler = Profiler(config.profiler, run.profile, rank=rank)
        """Records steps operator by operator."""
        try:
            self._deliveries = self._start(redact(recipe), warn)
        except BaseException:
            self.close()
            raise

    def step(self, stage: str, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Log one step to the files and the trackers, and return what was logged: `values` and the memory in use.

        Raises:
            MetricError: a value is named like a field of the log's own.
            RunDirectoryError: the disk refused the line.
        """
        logged = {**memory_metrics(), **values}
        self.metrics.write(stage, step, logged)
        for delivery in self._deliveries.values():
            delivery.log(stage, step, logged)
        self.profiler.reached(stage, step)
        return logged

    def write_samples(self, samples: Iterable[Sample]) -> None:
        """Append held-out answers.

        Raises:
            RunDirectoryError: the disk refused them.
        """
        self.metrics.write_samples(samples)

    def finish(self, summary: Mapping[str, object], *, status: Status) -> dict[str, object]:
        """Give the trackers the summary, and write the trace if the recipe asks for it.

        Returns:
            What to add to the summary: `trackers`, with what became of each; nothing where there are none.

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
            write_trace(self._run)
        return {"trackers": outcomes} if outcomes else {}

    def close(self) -> None:
        """Close the files; the trackers go on until `finish`. A second time does nothing."""
        self.metrics.close()
        self.spans.close()
        self.profiler.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, recipe: Mapping[str, object], warn: Callable[[str], None]) -> dict[str, Delivery]:
        trackers = enabled_trackers(self._config)
        known = _known(self._run) if trackers else {}
        for tracker in trackers:
            earlier = known.get(tracker.name)
            known[tracker.name] = start_tracker(tracker, recipe, self._run, known_as=earlier, secrets=self.secrets)
        if trackers:
            self._run.trackers.write_text(json.dumps(known, indent=2), encoding="utf-8")
        return {tracker.name: Delivery(tracker, warn=warn, secrets=self.secrets) for tracker in trackers}


def _known(run: RunDirectory) -> dict[str, str]:
    try:
        known = json.loads(run.trackers.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return {str(name): str(value) for name, value in known.items()}
