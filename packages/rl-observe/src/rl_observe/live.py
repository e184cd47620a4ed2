"""The live view of a run: a panel that is redrawn on a terminal, aligned lines of text elsewhere.

`RunProgress` holds the state, `LineWriter` chooses the steps worth a line, `render` draws the panel, and `LiveView`
decides when.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from rl_observe.glossary import METRICS, PHASES, phase_seconds
from rl_observe.number_format import format_bytes, format_clock, format_count, format_duration, format_value

_MIN_INTERVAL_S = 1 / 8
# The panel is drawn so rarely that drawing takes at most this share of the time.
_SHARE_OF_TIME = 0.005


class LiveView:
    """Show a run. Use it as a context manager around all of its stages.

    with LiveView("sort digits", [StageTotal("sft", 100), StageTotal("grpo", 120)]) as view:
        view.update("sft", 1, {"loss": 3.9})

    On a terminal a thread redraws the panel at most eight times a second; when the context ends the panel stays, and
    what is printed next appears below it. Elsewhere each line is printed when its step is logged.
    """

    def __init__(self, title: str, stages: Sequence[StageTotal] = (), *, console: Console | None = None) -> None:
        self._title = title
        self._console = console or Console()
        self._progress = RunProgress(stages)
        self._lines = LineWriter([stage.name for stage in stages])
        self._lock = threading.Lock()
        self._start_s = time.monotonic()
        # FORCE_COLOR and the like make a pipe look like a terminal. Colours may be forced; redrawing may not.
        is_terminal = self._console.is_interactive and (console is not None or sys.stdout.isatty())
        self._on_terminal = is_terminal and self._console.encoding.lower().startswith("utf")
        self._changed = True
        self._stopped = False
        self._finish = threading.Event()
        self._live = Live(get_renderable=self._render, console=self._console, auto_refresh=False)
        self._thread = threading.Thread(target=self._redraw, name="live-view", daemon=True)

    def update(self, stage: str, step: int, values: Mapping[str, float], *, skipped: int = 0) -> None:
        """Show the metrics of one step. A stage that was not announced is added.

        `skipped` of the steps so far changed no weights, as when a batch had no training signal; they are counted
        apart.
        """
        now_s = self._elapsed_s()
        with self._lock:
            progress = self._progress.update(stage, step, values, now_s=now_s)
            progress.skipped = skipped
            self._changed = True
        if not self._on_terminal and (line := self._lines.line(progress, values, now_s=now_s)) is not None:
            self.message(line)

    def event(self, name: str, step: int | None, message: str) -> None:
        """Print a condition that occurred, and count it in the panel; may be called from any thread."""
        with self._lock:
            self._progress.event(name, step, message)
            self._changed = True
        self.message(f"{format_clock(self._elapsed_s()):>7}  {name}{_at_step(step)}: {message}")

    def message(self, text: str) -> None:
        """Print a line of text, on a terminal above the panel."""
        # Text is not parsed as markup, and soft_wrap keeps each line in one piece, however narrow the output is.
        self._console.print(Text(text), soft_wrap=True)

    def __enter__(self) -> Self:
        self._start_s = time.monotonic()
        if self._on_terminal:
            self._live.start()
            self._thread.start()
        else:
            self.message(self._title)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._on_terminal:
            self._finish.set()
            self._thread.join()
            self._stopped = kind is not None
            self._live.refresh()
            self._live.stop()
        elif kind is not None:
            self.message(f"{format_clock(self._elapsed_s()):>7}  stopped by {kind.__name__}")

    def _render(self) -> Panel:
        now_s, width = self._elapsed_s(), self._console.width
        with self._lock:
            return render(self._progress, title=self._title, now_s=now_s, width=width, stopped=self._stopped)

    def _redraw(self) -> None:
        interval_s = _MIN_INTERVAL_S
        drawn_s = 0.0
        while not self._finish.wait(interval_s):
            # Between updates only the clocks move, once a second.
            if not self._changed and time.monotonic() - drawn_s < 1.0:
                continue
            self._changed = False
            # The thread's own CPU time: waiting for the trainer to release the GIL costs the trainer nothing.
            before_s = time.thread_time()
            self._live.refresh()
            interval_s = max(_MIN_INTERVAL_S, (time.thread_time() - before_s) / _SHARE_OF_TIME)
            drawn_s = time.monotonic()

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._start_s


# -- The state of a run ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StageTotal:
    """A stage of a run, announced before it starts."""

    name: str
    """The name used in `update(stage, …)`."""

    steps: int
    """The number of steps that it will take."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"stage {self.name!r} is announced with steps={self.steps}; a stage has at least 1 step")


@dataclass(slots=True)
class StageProgress:
    """The progress of one stage, and its latest metrics."""

    name: str
    steps: int
    step: int = 0
    skipped: int = 0
    """Steps among them that changed no weights."""
    started_s: float | None = None
    updated_s: float = 0.0
    values: dict[str, float] = field(default_factory=dict)
    """The last value of each metric."""
    first: dict[str, float] = field(default_factory=dict)
    """The first value of each metric."""
    headline: str | None = None
    """The metric that `history` holds."""
    history: list[float] = field(default_factory=list)
    """The finite values of `headline`."""
    phase_s: dict[str, float] = field(default_factory=dict)
    """Total seconds of each phase."""

    @property
    def done(self) -> bool:
        """True once every announced step has been taken."""
        return self.step >= self.steps

    @property
    def elapsed_s(self) -> float:
        """Seconds from the stage's start to its last update."""
        return 0.0 if self.started_s is None else self.updated_s - self.started_s

    @property
    def seconds_per_step(self) -> float:
        """The mean over the stage, evaluations included; NaN before the first step."""
        return self.elapsed_s / self.step if self.step else math.nan

    @property
    def remaining_s(self) -> float:
        """Estimated seconds to the end of the stage; NaN before the first step."""
        return self.seconds_per_step * max(0, self.steps - self.step)


class RunProgress:
    """All stages of a run, the announced ones first, and the conditions that occurred."""

    def __init__(self, stages: Sequence[StageTotal]) -> None:
        names = [stage.name for stage in stages]
        if len(set(names)) < len(names):
            raise ValueError(f"the names of stages must differ; got {names}")
        self.stages = {stage.name: StageProgress(stage.name, stage.steps) for stage in stages}
        self.current: StageProgress | None = None
        self.last_event: str | None = None
        self.event_counts: dict[str, int] = {}
        self._last_update_s = 0.0

    def update(self, stage: str, step: int, values: Mapping[str, float], *, now_s: float) -> StageProgress:
        """Add the metrics of one step, `now_s` seconds after the start of the run.

        A stage starts at the last update of the previous stage. A stage that was not announced is added.
        """
        progress = self.stages.setdefault(stage, StageProgress(stage, max(1, step)))
        if progress.started_s is None:
            progress.started_s = self._last_update_s
        progress.step = max(progress.step, step)
        progress.steps = max(progress.steps, step)
        progress.updated_s = self._last_update_s = now_s
        for name, value in values.items():
            if math.isfinite(value):
                progress.first.setdefault(name, value)
                progress.values[name] = value
        for name, seconds in phase_seconds(values).items():
            progress.phase_s[name] = progress.phase_s.get(name, 0.0) + seconds
        if progress.headline is None:
            progress.headline = next((name for name in ("reward", "margin", "loss") if name in values), None)
        if progress.headline is not None and math.isfinite(value := values.get(progress.headline, math.nan)):
            progress.history.append(value)
        self.current = progress
        return progress

    def event(self, name: str, step: int | None, message: str) -> None:
        """Add a condition that occurred."""
        self.last_event = f"last{_at_step(step)}: {message.partition(chr(10))[0]}"
        self.event_counts[name] = self.event_counts.get(name, 0) + 1


def _at_step(step: int | None) -> str:
    return "" if step is None else f" at step {step}"


# -- Lines, where there is no terminal ------------------------------------------------------------

# Frequent enough for a reader, rare enough that a run of many hours makes a short file.
_LINE_INTERVAL_S = 5.0
_LINES_PER_STAGE = 10
# The width of the longest number, such as -0.000924.
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
    """Choose and format lines: the first and last step of a stage, every evaluation, every tenth, every 5 seconds."""

    def __init__(self, stage_names: Sequence[str]) -> None:
        self._name_width = max((len(name) for name in stage_names), default=0)
        self._columns: dict[str, list[str]] = {}
        self._last: dict[str, tuple[float, int]] = {}

    def line(self, progress: StageProgress, values: Mapping[str, float], *, now_s: float) -> str | None:
        """Return the line for one update, or None if it is not worth a line."""
        tenth = progress.step * _LINES_PER_STAGE // progress.steps
        evaluations = [f"{label} {_number(name, values)}" for name, label in _EVALUATIONS.items() if name in values]
        if progress.name in self._last and not progress.done and not evaluations:
            last_s, last_tenth = self._last[progress.name]
            if tenth <= last_tenth and now_s - last_s < _LINE_INTERVAL_S:
                return None
        self._last[progress.name] = now_s, tenth
        # The first line with columns fixes those of the stage, so that later lines are aligned with it.
        if not self._columns.get(progress.name):
            self._columns[progress.name] = [name for name in _COLUMNS if name in values]
        columns = self._columns[progress.name]
        cells = [f"{_COLUMNS[name]} {_number(name, values):<{_NUMBER_WIDTH}}" for name in columns]
        count = f"{progress.step - progress.skipped:>{len(str(progress.steps))}}/{progress.steps}"
        if progress.skipped:
            count += f" (+{progress.skipped} without a signal)"
        shown = [] if values.keys().isdisjoint(columns) else cells
        start = [f"{format_clock(now_s):>7}", f"{progress.name:<{self._name_width}}", count]
        return "  ".join([*start, *shown, *evaluations]).rstrip()


def _number(name: str, values: Mapping[str, float]) -> str:
    value = values.get(name, math.nan)
    if not math.isfinite(value):
        return "-"
    unit = METRICS[name].unit
    return format_value(value, "score" if unit == "share" else unit).replace(" ", "")


# -- The panel, on a terminal ---------------------------------------------------------------------

_BLOCKS = "▁▂▃▄▅▆▇█"
_COLOURS = {phase.name: phase.colour for phase in PHASES}
_ACCENT, _HELD_OUT, _GOOD, _DIM = "#4c8dff", "#f0883e", "#3fb068", "bright_black"
_MAX_WIDTH = 100
_LABEL_WIDTH = 12


def render(progress: RunProgress, *, title: str, now_s: float, width: int, stopped: bool = False) -> Panel:
    """Draw the panel.

    Rows are assembled as text: rich's tables and progress bars take several times as long, during the run.

    Args:
        progress: the state to draw.
        title: the name of the run.
        now_s: seconds since the start of the run.
        width: columns of the terminal; the panel takes at most 100.
        stopped: True if the run ended before its last step.
    """
    width = min(width, _MAX_WIDTH)
    inner = max(20, width - 4)
    rows = [_stage_row(stage, progress, now_s=now_s, width=inner) for stage in progress.stages.values()]
    if progress.current is not None:
        rows += [Text(), *_detail_rows(progress, progress.current, inner)]
    clock = format_clock(now_s)
    return Panel(
        Group(*rows),
        title=Text(title, style="bold default"),
        title_align="left",
        subtitle=Text(f"stopped after {clock}" if stopped else clock, style="default"),
        subtitle_align="right",
        border_style="red" if stopped else _DIM,
        width=width,
    )


def _stage_row(stage: StageProgress, progress: RunProgress, *, now_s: float, width: int) -> Text:
    active = stage is progress.current and not stage.done
    mark = ("✔", _GOOD) if stage.done else ("▸", _ACCENT) if active else ("·", _DIM)
    digits = len(str(max(other.steps for other in progress.stages.values())))
    count = f"{stage.step - stage.skipped:>{digits}}/{stage.steps:<{digits}}"
    clock = ""
    if stage.done:
        clock = format_clock(stage.elapsed_s)
    elif active and not math.isnan(stage.remaining_s):
        clock = f"ETA {format_clock(max(0.0, stage.remaining_s - (now_s - stage.updated_s)))}"
    name_width = max(_LABEL_WIDTH - 2, *(len(other.name) for other in progress.stages.values()))
    bar_width = max(4, width - name_width - len(count) - 12 - 4)
    filled = round(bar_width * min(1.0, stage.step / stage.steps))
    return Text.assemble(
        mark,
        " ",
        (f"{stage.name:<{name_width}}", "bold" if active else ""),
        ("━" * filled, _GOOD if stage.done else _ACCENT),
        ("━" * (bar_width - filled), _DIM),
        "  ",
        count,
        (f"{clock:>12}", "" if active else _DIM),
        no_wrap=True,
        overflow="crop",
    )


def _detail_rows(progress: RunProgress, stage: StageProgress, width: int) -> list[Text]:
    values, rows = stage.values, []
    if stage.headline is not None and stage.history:
        metric = METRICS[stage.headline]
        number = format_value(stage.history[-1], metric.unit)
        curve = resampled(stage.history, max(8, width - _LABEL_WIDTH - len(number) - 2))
        low, high = min(curve), max(curve)
        scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
        blocks = "".join(_BLOCKS[round((value - low) * scale)] for value in curve)
        rows.append(_row(metric.label, (blocks, _ACCENT), "  ", (number, "bold")))

    held_out: list[str | tuple[str, str]] = []
    labels = {"sampled": "sampled", "greedy": "greedy", "loss": "loss", "pair_accuracy": "pairs right"}
    for name, label in labels.items():
        if found := [each for each in progress.stages.values() if f"held_out_{name}" in each.values]:
            first, last = found[0].first[f"held_out_{name}"], found[-1].values[f"held_out_{name}"]
            held_out += [("   " if held_out else "") + label + " ", (f"{first:.3f}", _DIM), " → "]
            held_out.append((f"{last:.3f}", f"bold {_HELD_OUT}"))
    if held_out:
        rows.append(_row("held-out", *held_out))

    speed = [f"{format_count(values['tokens_per_s'])} tokens/s"] if "tokens_per_s" in values else []
    speed += [] if math.isnan(stage.seconds_per_step) else [f"{format_duration(stage.seconds_per_step)} a step"]
    if speed:
        rows.append(_row("speed", " · ".join(speed)))
    rows += _phase_rows(stage.phase_s, width - _LABEL_WIDTH)

    memory = [f"{format_bytes(values['memory_rss_bytes'])} process"] if "memory_rss_bytes" in values else []
    if "memory_gpu_bytes" in values:
        peak = values.get("memory_gpu_peak_bytes")
        at_most = "" if peak is None else f", at most {format_bytes(peak)}"
        memory.append(f"{format_bytes(values['memory_gpu_bytes'])} GPU{at_most}")
    if memory:
        rows.append(_row("memory", " · ".join(memory)))

    if "refit_bytes" in values:
        refit = [f"version {values['version']:.0f}"] if "version" in values else []
        refit.append(format_bytes(values["refit_bytes"]))
        refit += [format_duration(values["refit_s"])] if "refit_s" in values else []
        verified = values.get("refit_verified", 0.0) >= 1
        mark = (" · ✓ verified", _GOOD) if verified else (" · not verified", _HELD_OUT)
        rows.append(_row("last refit", " · ".join(refit), *([mark] if "refit_verified" in values else [])))

    if progress.last_event is not None:
        counts = ", ".join(f"{name} × {n}" if n > 1 else name for name, n in progress.event_counts.items())
        rows.append(_row("events", (counts, f"bold {_HELD_OUT}"), f"  {progress.last_event}"))
    return rows


def resampled(values: Sequence[float], width: int) -> Sequence[float]:
    """Average the values so that at most `width` means remain, oldest first."""
    if len(values) <= width:
        return values
    edges = [round(index * len(values) / width) for index in range(width + 1)]
    return [sum(values[low:high]) / (high - low) for low, high in pairwise(edges)]


def _phase_rows(phase_s: Mapping[str, float], columns: int) -> list[Text]:
    """Draw one bar divided as the time was, and its legend on as many rows as it needs."""
    total = sum(phase_s.values())
    if total <= 0:
        return []
    order = [*(name for name in _COLOURS if name in phase_s), *(name for name in phase_s if name not in _COLOURS)]
    bar: list[tuple[str, str]] = []
    legend: list[Text] = []
    edge, covered, used = 0, 0.0, columns
    for name in order:
        covered += phase_s[name]
        end = round(columns * covered / total)
        colour = _COLOURS.get(name, _DIM)
        bar.append(("█" * (end - edge), colour))
        edge = end
        text = f"{name} {100 * phase_s[name] / total:.0f} %"
        if used + len(text) + 4 > columns + 2:
            legend.append(_row(""))
            used = 0
        legend[-1].append_text(Text.assemble(("■ ", colour), text, "  "))
        used += len(text) + 4
    return [_row("a step", *bar), *legend]


def _row(label: str, *parts: str | tuple[str, str]) -> Text:
    return Text.assemble((f"{label:<{_LABEL_WIDTH - 1}} ", _DIM), *parts, no_wrap=True, overflow="ellipsis")
