"""Record each step of a run, decide when to save or stop, and write the summary.

Phases and tokens are added up from the log, so the totals include what was done before an interruption.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from rl_algorithms.stepping import PhaseTimer
from rl_launcher.build.parts import Parts
from rl_launcher.checkpoints import CheckpointManager, Progress
from rl_launcher.errors import ConditionError, user_location
from rl_launcher.run.conditions import name_of
from rl_launcher.run.evaluate import Evaluator
from rl_launcher.run.signals import Interruption
from rl_launcher.schema import Recipe
from rl_observe import LiveView, RunDirectory, RunLog, ScoredResponse, read_metrics
from rl_observe.health import Reporter, Watch, count_events

PHASE = "phase_s/"
LEARN_FROM_PAIRS = ("dpo", "orpo", "kto", "reward_model")
TOKENS = ("sampled_tokens", "trained_tokens")
TRAINER_FIGURES = {
    "mfu": "mfu",
    "padding_share": "padding_share",
    "load_balance": "load_balance",
    "peak_allocated_bytes": "memory_trainer_peak_bytes",
    "device_used_bytes": "memory_device_bytes/training",
}
"""Fields of `StepMetrics` that a step logs, and the names that they have in the log."""


class Recorder:
    """Logs steps with the time between them; time that no phase accounts for is the phase `other`."""

    def __init__(
        self,
        log: RunLog,
        view: LiveView,
        *,
        parts: Parts,
        keeper: CheckpointManager,
        watch: Watch,
        events: Reporter,
        interruption: Interruption,
        metric_name: str,
    ) -> None:
        self.log, self.keeper, self.progress = log, keeper, keeper.progress
        self._view, self._parts, self._watch, self._interruption = view, parts, watch, interruption
        self._events, self._metric_name = events, metric_name
        self._timer = PhaseTimer()
        self._last = time.perf_counter()
        self._refits = parts.weight_sync.count

    def start(self) -> None:
        """Count a stage's time from here: what went before belongs to no step."""
        self._last = time.perf_counter()
        self._timer.lap()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Count the time of the block towards `name` in the step that is recorded next."""
        return self._timer.phase(name)

    def step(
        self,
        stage: str,
        step: int,
        metrics: Mapping[str, float],
        *,
        order: Mapping[str, int] | None = None,
        state: Callable[[], Any] | None = None,
        samples: Callable[[], Sequence[ScoredResponse]] | None = None,
    ) -> None:
        """Log one step of `stage`, look for conditions, save if a checkpoint is due, and end the run if it must end.

        Args:
            stage: whose step it is.
            step: its number, from 1; a batch without a signal counts as its steps.
            metrics: what to log.
            order: the position in the prompts, if the step alone does not determine it.
            state: returns what else a checkpoint needs, as nested mappings, lists, numbers and tensors; called only
                when a checkpoint is saved.
            samples: returns two responses of this batch with their rewards, for messages about conditions.

        Raises:
            KeyboardInterrupt: Ctrl-C or SIGTERM came since the last step.
            ConditionError: a condition ends the run; it is saved.
        """
        progress, parts = self.progress, self._parts
        now = time.perf_counter()
        wall, self._last = now - self._last, now
        phases = defaultdict(float, {name: value for name, value in metrics.items() if name.startswith(PHASE)})
        for name, seconds in self._timer.lap().items():
            phases[name] += seconds
        phases[PHASE + "other"] = max(0.0, wall - sum(phases.values()))
        end_s = self.log.spans.now()
        self.log.spans.step(stage, step, start_s=end_s - wall, end_s=end_s, phases=phases)
        tokens_per_s = sum(metrics.get(name, 0) for name in TOKENS) / (wall - phases[PHASE + "evaluate"])
        figures = {**metrics, "tokens_per_s": tokens_per_s, **phases, **parts.figures()}
        if metrics.get("loss") is not None:  # otherwise the trainer's figures are those of an earlier step
            figures |= trainer_figures(parts.companions.trained.get(stage, parts.policy))
        logged = self.log.step(stage, step, figures)
        parts.reached(stage, step)
        sync = parts.weight_sync
        if sync.last is not None and sync.count != self._refits:
            self.log.refits.write(sync.last, stage=stage, step=step)
        self._refits = sync.count
        before = progress.total
        progress.reach(stage, step, parts=parts, order=order)
        self._view.update(stage, step, logged, skipped=progress.skipped)
        progress.keep_state = state
        progress.metric = logged.get(self._metric_name, progress.metric)
        self.report_events(stage, step)
        stop: ConditionError | None = None
        for event in self._watch.observe(stage, logged, errors=progress.reward_errors, samples=samples):
            self._events.report(event.name, event.message, reaction=event.reaction, stage=stage, step=step)
            if event.stop:
                stop = ConditionError(event.name, event.message)
        due = self.keeper.after_step(before=before)
        if due.end and stop is None:
            stop = ConditionError("must_save_by", "checkpointing.checkpoint_must_save_by passes during the next step")
        if due.save or stop is not None or self._interruption.heard:
            with self.phase("checkpoint"):
                self.keeper.save()
        if stop is not None:
            raise stop
        self._interruption.check()

    def evaluation(self, stage: str, metrics: Mapping[str, float]) -> None:
        """Log what was measured before the first step of `stage`, as its step 0."""
        logged = self.log.step(stage, 0, metrics)
        self.progress.metric = logged.get(self._metric_name, self.progress.metric)
        self._view.update(stage, 0, logged)

    def check(self) -> None:
        """Report events, and end the run here, between two stages, if a signal came.

        Raises:
            KeyboardInterrupt: Ctrl-C or SIGTERM came since the last step.
        """
        self.report_events()
        self._interruption.check()

    def message(self, text: str) -> None:
        """Print a line for the user."""
        self._view.message(text)

    def report_events(self, stage: str | None = None, step: int | None = None) -> None:
        """Report what happened to the parts since the last time."""
        for each in (*self._parts.events.take(), *self.log.findings.take()):
            self._events.report(each.name, each.message, reaction=each.reaction, stage=stage, step=step)


def trainer_figures(model: Any) -> dict[str, float]:
    """What the trainer measured of its last optimizer step, as it is logged; what it does not know is left out.

    model: a `TrainingBackend`, whose `metrics` this reads, or another policy that may have no such method.
    """
    if not hasattr(model, "metrics") or (measured := model.metrics(memory=False)) is None:
        return {}
    known = {name: getattr(measured, field) for field, name in TRAINER_FIGURES.items()}
    return {name: float(value) for name, value in known.items() if value is not None}


def has_trained(directory: RunDirectory, stage: str) -> bool:
    """Whether any batch of `stage` led to an optimizer step; only those log a loss."""
    return any(row["stage"] == stage and row.get("loss") is not None for row in read_metrics(directory))


def summarize(
    recipe: Recipe,
    parts: Parts,
    directory: RunDirectory,
    *,
    progress: Progress,
    after: dict[str, float] | None,
    error: BaseException | None = None,
) -> dict[str, Any]:
    """What is known at the end; for a run that ended early `after` is None and `error` is what ended it."""
    rows = read_metrics(directory)
    report = parts.weight_sync.last
    before, reached, headline = progress.before or {}, after or {}, recipe.headline
    held_out = {
        f"{name}_{when}": figures.get(name)
        for name in ("held_out_sampled", "held_out_greedy", "held_out_loss")
        for when, figures in (("before", before), ("after", reached))
    }
    failed = error is not None and not isinstance(error, KeyboardInterrupt)
    return {
        "run_dir": str(directory.path),
        "task": recipe.data.source,
        "algorithm": headline,
        "seed": recipe.seed,
        "interrupted": after is None,
        "ended_by": None if error is None else name_of(error),
        **({"error": str(error) or repr(error), "error_at": user_location(error)} if error and failed else {}),
        "conditions": count_events(directory),
        "restarts": progress.restarts,
        **held_out,
        **pair_figures(rows, ended=after is not None),
        "held_out_size": Evaluator(parts, recipe).size,
        "batches": sum(row["stage"] == headline and int(str(row["step"])) > 0 for row in rows),
        "steps": parts.policy.version + progress.reward_model_steps,
        "tokens": sum(int(_number(row, name)) for row in rows for name in TOKENS),
        "reward_errors": parts.reward_errors,
        "rows_skipped": parts.data.skipped.count,
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
    """Margin and accuracy of held-out pairs before learning from pairs, and after it if the run ended well.

    None if not measured.
    """
    figures: dict[str, float | None] = {}
    for name in ("held_out_margin", "held_out_pair_accuracy"):
        measured = [row for row in rows if row["stage"] in LEARN_FROM_PAIRS and name in row]
        figures[f"{name}_before"] = next((row[name] for row in measured if row["step"] == 0), None)
        figures[f"{name}_after"] = measured[-1][name] if ended and measured else None
    return figures


def _number(row: dict[str, Any], name: str) -> float:
    return float(row.get(name) or 0.0)
