"""Record each step of a run, decide when to save or stop, and write the summary.

After each step it also looks whether something is wrong, whether to save, and whether to end.

Phases and tokens are added up from the log, so that they count what was done before an interruption too.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from rl_algorithms.phases import PhaseTimer
from rl_launcher.checkpoints import Keeper, Progress
from rl_launcher.errors import ConditionError
from rl_launcher.run.evaluate import Evaluator
from rl_launcher.run.signals import Interruption
from rl_launcher.run_parts import Parts
from rl_launcher.schema import Recipe
from rl_observe import LiveView, RunDirectory, RunLog, Sample, read_metrics
from rl_observe.health import Reporter, Watch, count_events

__all__ = ["PHASE", "TOKENS", "Recorder", "summarize"]

PHASE = "phase_s/"
TOKENS = ("sampled_tokens", "trained_tokens")


class Recorder:
    """Knows how much time passed between two steps, and which of it no phase claimed: that is `other`."""

    def __init__(
        self,
        log: RunLog,
        view: LiveView,
        *,
        parts: Parts,
        keeper: Keeper,
        watch: Watch,
        events: Reporter,
        interruption: Interruption,
        metric_name: str,
    ) -> None:
        self.log, self.events, self.keeper, self.progress = log, events, keeper, keeper.progress
        self._view, self._parts, self._watch, self._interruption = view, parts, watch, interruption
        self._metric_name = metric_name
        self._timer = PhaseTimer()
        self._last = time.perf_counter()
        self._refits = parts.weight_sync.count

    def start(self) -> None:
        """Begin to count a stage's time here: what went before belongs to no step."""
        self._last = time.perf_counter()
        self._timer.lap()

    def begin(self, stage: str, taken: int) -> None:
        """Say that a stage begins, or goes on after `taken` steps: its next one may be recorded by profilers."""
        self.log.profiler.reached(stage, taken)
        self._parts.reached(stage, taken)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Count the time of the block towards `name` in the step that is recorded next."""
        return self._timer.phase(name)

    def keep(self, tensors: dict[str, Tensor]) -> None:
        """Put into every checkpoint of this stage what the stage made at its start and cannot make again."""
        self.progress.tensors = tensors

    def step(
        self,
        stage: str,
        step: int,
        metrics: Mapping[str, float],
        *,
        order: Mapping[str, int] | None = None,
        state: Callable[[], Any] | None = None,
    ) -> None:
        """Log one step of `stage`; `step` counts the stage's own optimizer steps. Here a run saves, and may end.

        Args:
            stage: whose step it is.
            step: its number, from 1.
            metrics: what to log.
            order: where the prompts stand, where the step alone does not say.
            state: gives what else a run must have to go on, as nested mappings, lists, numbers and tensors; it is
                asked only when a checkpoint is saved.

        Raises:
            KeyboardInterrupt: Ctrl-C or SIGTERM came since the last step.
            ConditionError: a condition ends the run; it is saved.
        """
        logged = self.log.step(stage, step, {**self._with_times(stage, step, metrics), **self._parts.figures()})
        self._parts.reached(stage, step)
        self._view.update(stage, step, logged)
        self._note_refit(stage, step)
        before = self.progress.total
        self.progress.reach(stage, step, parts=self._parts, order=order)
        self.progress.keep_state = state
        self._note_metric(logged)
        self._look_and_save(stage, step, logged, before=before)

    def evaluation(self, stage: str, metrics: Mapping[str, float]) -> None:
        """Log what was measured before the first step of `stage`, as its step 0."""
        logged = self.log.step(stage, 0, metrics)
        self._note_metric(logged)
        self._view.update(stage, 0, logged)

    def write_samples(self, samples: list[Sample]) -> None:
        """Keep a few answers for the report."""
        self.log.write_samples(samples)

    def check(self) -> None:
        """Between stages, too, a signal ends the run.

        Raises:
            KeyboardInterrupt: Ctrl-C or SIGTERM came since the last step.
        """
        self.report_events()
        self._interruption.check()

    def message(self, text: str) -> None:
        """Tell the user."""
        self._view.message(text)

    def report_events(self, stage: str | None = None, step: int | None = None) -> None:
        """Tell what happened to the parts since the last time."""
        for each in self._parts.events.take():
            self.events.report(each.name, each.message, reaction=each.reaction, stage=stage, step=step)

    def _with_times(self, stage: str, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        now = time.perf_counter()
        wall, self._last = now - self._last, now
        phases = defaultdict(float, {name: value for name, value in metrics.items() if name.startswith(PHASE)})
        for name, seconds in self._timer.lap().items():
            phases[name] += seconds
        phases[PHASE + "other"] = max(0.0, wall - sum(phases.values()))
        end_s = self.log.spans.now()
        self.log.spans.step(stage, step, start_s=end_s - wall, end_s=end_s, phases=phases)
        tokens = sum(metrics.get(name, 0) for name in TOKENS)
        return {**metrics, "tokens_per_s": tokens / (wall - phases[PHASE + "evaluate"]), **phases}

    def _note_refit(self, stage: str, step: int) -> None:
        report, count = self._parts.weight_sync.last, self._parts.weight_sync.count
        if report is not None and count != self._refits:
            self.log.refits.write(report, stage=stage, step=step)
        self._refits = count

    def _note_metric(self, values: Mapping[str, float]) -> None:
        self.progress.metric = values.get(self._metric_name, self.progress.metric)

    def _look_and_save(self, stage: str, step: int, values: Mapping[str, float], *, before: int) -> None:
        self.report_events(stage, step)
        stop: ConditionError | None = None
        for noticed in self._watch.observe(stage, values, errors=self.progress.reward_errors):
            told = noticed.event
            self.events.report(told.name, told.message, reaction=told.reaction, stage=stage, step=step)
            if noticed.stop:
                stop = ConditionError(told.name, told.message)
        due = self.keeper.after_step(before=before)
        if due.end and stop is None:
            stop = ConditionError("must_save_by", "checkpointing.checkpoint_must_save_by passes during the next step")
        if due.save or stop is not None or self._interruption.heard:
            with self.phase("checkpoint"):
                self.keeper.save()
        if stop is not None:
            raise stop
        self._interruption.check()


def summarize(
    recipe: Recipe,
    parts: Parts,
    directory: RunDirectory,
    *,
    progress: Progress,
    after: dict[str, float] | None,
    ended_by: str | None = None,
) -> dict[str, Any]:
    """What is known at the end; `after` is None for a run that ended early, `ended_by` the condition that ended it."""
    rows = read_metrics(directory)
    report = parts.weight_sync.last
    before, headline = progress.before or {}, recipe.headline
    reached = after or {}
    return {
        "run_dir": str(directory.path),
        "task": recipe.data.source,
        "algorithm": headline,
        "seed": recipe.seed,
        "interrupted": after is None,
        "ended_by": ended_by,
        "conditions": count_events(directory),
        "restarts": progress.restarts,
        "held_out_sampled_before": before.get("held_out_sampled"),
        "held_out_sampled_after": reached.get("held_out_sampled"),
        "held_out_greedy_before": before.get("held_out_greedy"),
        "held_out_greedy_after": reached.get("held_out_greedy"),
        "held_out_loss_before": before.get("held_out_loss"),
        "held_out_loss_after": reached.get("held_out_loss"),
        **pair_figures(rows, ended=after is not None),
        "held_out_size": Evaluator(parts, recipe).size,
        "steps": parts.policy.version,
        "tokens": sum(int(_number(row, name)) for row in rows for name in TOKENS),
        "reward_errors": parts.environment.errors,
        "rows_skipped": parts.skipped.count,
        "phase_share": phase_share([row for row in rows if row["stage"] == headline]),
        "wall_s": round(progress.wall_s, 2),
        "refit": report
        and {
            "count": parts.weight_sync.count,
            "tensors": report.tensors,
            "bytes": report.bytes,
            "digest": report.digest,
            "version": report.version,
        },
    }


def phase_share(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Share of each phase in the time of these log lines, the largest first; they sum to 1."""
    totals: dict[str, float] = {}
    for row in rows:
        for name in row:
            if name.startswith(PHASE):
                totals[name] = totals.get(name, 0.0) + _number(row, name)
    whole = sum(totals.values()) or 1.0
    largest_first = sorted(totals, key=totals.__getitem__, reverse=True)
    return {name.removeprefix(PHASE): round(totals[name] / whole, 4) for name in largest_first}


def pair_figures(rows: list[dict[str, Any]], *, ended: bool) -> dict[str, float | None]:
    """Margin and accuracy of held-out pairs before DPO and, where it came to its end, after; None: not measured."""
    figures: dict[str, float | None] = {}
    for name in ("held_out_margin", "held_out_pair_accuracy"):
        measured = [row for row in rows if row["stage"] == "dpo" and name in row]
        figures[f"{name}_before"] = next((row[name] for row in measured if row["step"] == 0), None)
        figures[f"{name}_after"] = measured[-1][name] if ended and measured else None
    return figures


def _number(row: dict[str, Any], name: str) -> float:
    return float(row.get(name) or 0.0)
