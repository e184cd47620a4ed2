"""A run as plain, aligned lines, for a file, a pipe or a continuous-integration log.

It chooses which steps are worth a line and writes them in ASCII, without colour. It does not know where they go.
"""

from __future__ import annotations

import math

from rl_launcher.observe.figures import format_clock, format_value
from rl_launcher.observe.glossary import METRICS
from rl_launcher.observe.live.progress import StageProgress

__all__ = ["LineWriter"]

# Nobody reads a line more often than this, and a run of many hours still fits into a file.
_LINE_INTERVAL_S = 5.0
_LINES_A_STAGE = 10

# Of the longest, such as -0.000924.
_NUMBER_WIDTH = 9

_COLUMNS = {
    "reward": "reward",
    "loss": "loss",
    "margin": "margin",
    "pair_accuracy": "pairs right",
    "groups_with_signal": "groups with signal",
    "entropy": "entropy",
    "grad_norm": "grad norm",
    "tokens_per_s": "tokens/s",
}
_EVALUATIONS = {
    "held_out_sampled": "held-out sampled",
    "held_out_greedy": "held-out greedy",
    "held_out_loss": "held-out loss",
    "held_out_margin": "held-out margin",
    "held_out_pair_accuracy": "held-out pairs right",
}


class LineWriter:
    """Turns updates into lines: the first and last of a stage, every evaluation, and some between."""

    def __init__(self, stage_names: list[str]) -> None:
        self._name_width = max((len(name) for name in stage_names), default=0)
        self._columns: dict[str, list[str]] = {}
        self._last_line_s: dict[str, float] = {}
        self._last_tenth: dict[str, int] = {}

    def line(self, progress: StageProgress, values: dict[str, float], *, now_s: float) -> str | None:
        """Write the line of one update, or return None if it is not worth one."""
        if not self._is_worth_a_line(progress, values, now_s):
            return None
        self._last_line_s[progress.name] = now_s
        self._last_tenth[progress.name] = _tenth(progress)
        # The columns of a stage are those of its first line with any: later lines stay aligned with it.
        if not self._columns.get(progress.name):
            self._columns[progress.name] = [name for name in _COLUMNS if name in values]
        columns = self._columns[progress.name]
        cells = [
            f"{format_clock(now_s):>7}",
            f"{progress.name:<{self._name_width}}",
            f"{progress.step:>{len(str(progress.steps))}}/{progress.steps}",
            *(
                f"{_COLUMNS[name]} {_number(name, values.get(name)):<{_NUMBER_WIDTH}}"
                for name in columns
                if not values.keys().isdisjoint(columns)
            ),
            *(f"{label} {_number(name, values[name])}" for name, label in _EVALUATIONS.items() if name in values),
        ]
        return "  ".join(cells).rstrip()

    def _is_worth_a_line(self, progress: StageProgress, values: dict[str, float], now_s: float) -> bool:
        last_s = self._last_line_s.get(progress.name)
        return (
            last_s is None
            or progress.done
            or any(name in values for name in _EVALUATIONS)
            or _tenth(progress) > self._last_tenth[progress.name]
            or now_s - last_s >= _LINE_INTERVAL_S
        )


def _tenth(progress: StageProgress) -> int:
    return progress.step * _LINES_A_STAGE // progress.steps


def _number(name: str, value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    unit = METRICS[name].unit
    return format_value(value, "score" if unit == "share" else unit).replace(" ", "")
