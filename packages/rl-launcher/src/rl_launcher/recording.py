"""What a run writes down as it goes: each step to the log and to the live view, and how far it has come."""

import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager

from rl_algorithms.phases import PhaseTimer
from rl_launcher.building import Parts
from rl_launcher.interruption import Interruption
from rl_launcher.observe import LiveView, MetricsLog
from rl_launcher.progress import Progress

__all__ = ["PHASE", "TOKENS", "Recorder"]

PHASE = "phase_s/"
TOKENS = ("sampled_tokens", "trained_tokens")


class Recorder:
    """Knows how much time passed between two steps, and which of it no phase claimed: that is `other`."""

    def __init__(
        self, log: MetricsLog, view: LiveView, *, parts: Parts, progress: Progress, interruption: Interruption
    ) -> None:
        self.log, self.progress = log, progress
        self._view, self._parts, self._interruption = view, parts, interruption
        self._timer = PhaseTimer()
        self._last = time.perf_counter()

    def start(self) -> None:
        """Begin to count a stage's time here: what went before belongs to no step."""
        self._last = time.perf_counter()
        self._timer.lap()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Count the time of the block towards `name` in the step that is recorded next."""
        return self._timer.phase(name)

    def step(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        """Log one step of `stage`; `step` counts the stage's own optimizer steps. Here a signal ends the run.

        Raises:
            KeyboardInterrupt: Ctrl-C or SIGTERM came since the last step.
        """
        now = time.perf_counter()
        wall, self._last = now - self._last, now
        phases = defaultdict(float, {name: value for name, value in metrics.items() if name.startswith(PHASE)})
        for name, seconds in self._timer.lap().items():
            phases[name] += seconds
        phases[PHASE + "other"] = max(0.0, wall - sum(phases.values()))
        tokens = sum(metrics.get(name, 0) for name in TOKENS)
        values = {**metrics, "tokens_per_s": tokens / (wall - phases[PHASE + "evaluate"]), **phases}
        self.log.write(stage, step, values)
        self._view.update(stage, step, values)
        self.progress.reach(stage, step, parts=self._parts)
        self._interruption.check()

    def evaluation(self, stage: str, metrics: Mapping[str, float]) -> None:
        """Log what was measured before the first step of `stage`, as its step 0."""
        self.log.write(stage, 0, metrics)
        self._view.update(stage, 0, metrics)

    def check(self) -> None:
        """Between stages, too, a signal ends the run.

        Raises:
            KeyboardInterrupt: Ctrl-C or SIGTERM came since the last step.
        """
        self._interruption.check()

    def message(self, text: str) -> None:
        """Tell the user."""
        self._view.message(text)
