"""What a run writes down as it goes: each step to the log and to the live view, phases and tokens to the totals."""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rl_launcher.interruption import Interruption
from rl_launcher.observe import LiveView, MetricsLog

__all__ = ["Recorder"]

PHASE = "phase_s/"
TOKENS = ("sampled_tokens", "trained_tokens")


class Recorder:
    """Knows how much time passed between two steps, and which of it no phase claimed: that is `other`."""

    def __init__(self, log: MetricsLog, view: LiveView, interruption: Interruption) -> None:
        self.log, self._view, self._interruption = log, view, interruption
        self._totals: dict[str, dict[str, float]] = {}
        self._claimed: dict[str, float] = defaultdict(float)
        self._last = time.perf_counter()
        self.num_tokens = 0

    def start(self) -> None:
        """Begin to count a stage's time here: what went before belongs to no step."""
        self._last = time.perf_counter()
        self._claimed.clear()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the block towards `name` in the step that is recorded next."""
        started = time.perf_counter()
        yield
        self._claimed[PHASE + name] += time.perf_counter() - started

    def step(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        """Log one step of `stage`; `step` counts the stage's own optimizer steps. Here a signal ends the run.

        Raises:
            KeyboardInterrupt: Ctrl-C or SIGTERM came since the last step.
        """
        now = time.perf_counter()
        wall, self._last = now - self._last, now
        phases = {name: value for name, value in metrics.items() if name.startswith(PHASE)}
        _add(phases, self._claimed)
        phases[PHASE + "other"] = max(0.0, wall - sum(phases.values()))
        self._claimed.clear()
        _add(self._totals.setdefault(stage, {}), phases)
        tokens = sum(int(metrics.get(name, 0)) for name in TOKENS)
        self.num_tokens += tokens
        shown = {name: value for name, value in metrics.items() if name not in TOKENS and not name.startswith(PHASE)}
        values = {**shown, "tokens_per_s": tokens / wall, **phases}
        self.log.write(stage, step, values)
        self._view.update(stage, step, values)
        self._interruption.check()

    def evaluation(self, stage: str, metrics: Mapping[str, float]) -> None:
        """Log what was measured before the first step of `stage`, as its step 0."""
        self.log.write(stage, 0, metrics)
        self._view.update(stage, 0, metrics)

    def message(self, text: str) -> None:
        """Tell the user."""
        self._view.message(text)

    def phase_share(self, stage: str) -> dict[str, float]:
        """Share of each phase in the time of a stage; they sum to 1."""
        totals = self._totals.get(stage, {})
        whole = sum(totals.values()) or 1.0
        largest_first = sorted(totals, key=totals.__getitem__, reverse=True)
        return {name.removeprefix(PHASE): totals[name] / whole for name in largest_first}


def _add(totals: dict[str, float], parts: Mapping[str, float]) -> None:
    for name, part in parts.items():
        totals[name] = totals.get(name, 0.0) + part
