"""The live view of a run: a panel that is redrawn on a terminal, aligned lines of text elsewhere."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from rl_observe.glossary import METRICS, PHASES, TEXTS, format_clock, format_duration, format_value, phase_seconds

_MIN_INTERVAL_S = 1 / 8
# The panel is drawn so rarely that drawing takes at most this share of the time.
_SHARE_OF_TIME = 0.005
# Lines where there is no terminal: frequent enough for a reader, so rare that a run of many hours makes a short file.
_LINE_INTERVAL_S = 5.0
_LINES_PER_STAGE = 10
_NUMBER_WIDTH = 9  # of the longest number, such as -0.000924


@dataclass(frozen=True, slots=True)
class StageTotal:
    """A stage of a run, announced before it starts."""

    name: str  # the name used in `update(stage, …)`
    steps: int  # the number of steps that it will take

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"stage {self.name!r} is announced with steps={self.steps}; a stage has at least 1 step")


@dataclass(slots=True)
class _Stage:
    """The progress of one stage, and its latest metrics."""

    name: str
    steps: int
    step: int = 0
    skipped: int = 0  # steps among them that changed no weights
    started_s: float = math.nan
    updated_s: float = 0.0
    values: dict[str, float] = field(default_factory=dict)  # the last value of each metric
    first: dict[str, float] = field(default_factory=dict)  # the first value of each metric
    headline: str | None = None  # the metric that `history` holds, in its finite values
    history: list[float] = field(default_factory=list)
    phase_s: dict[str, float] = field(default_factory=dict)  # total seconds of each phase
    columns: list[str] = field(default_factory=list)  # the metrics of a line of text
    line: tuple[float, int] | None = None  # when the last line was printed, and at which tenth of the stage

    @property
    def seconds_per_step(self) -> float:
        """The mean over the stage, evaluations included; NaN before the first step."""
        return (self.updated_s - self.started_s) / self.step if self.step else math.nan


class LiveView:
    """Show a run. Use it as a context manager around all of its stages.

    with LiveView("sort digits", [StageTotal("sft", 100), StageTotal("grpo", 120)]) as view:
        view.update("sft", 1, {"loss": 3.9})

    On a terminal a thread redraws the panel at most eight times a second; when the context ends the panel stays, and
    what is printed next appears below it. Elsewhere a line is printed for the first and last step of a stage, every
    evaluation, every tenth of the stage, and every 5 seconds.

    Args:
        title: the name of the run.
        stages: the stages that are known before they start, in their order.
        console: where to print; stdout by default.
        clock: returns seconds, as `time.monotonic` does.
    """

    def __init__(
        self,
        title: str,
        stages: Sequence[StageTotal] = (),
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        names = [stage.name for stage in stages]
        if len(set(names)) < len(names):
            raise ValueError(f"the names of stages must differ; got {names}")
        self._title = title
        self._console = console or Console()
        self._stages = {stage.name: _Stage(stage.name, stage.steps) for stage in stages}
        self._current: _Stage | None = None
        self._event_counts: dict[str, int] = {}
        self._last_event = ""
        self._name_width = max(map(len, names), default=0)
        self._clock, self._start_s, self._last_update_s = clock, clock(), 0.0
        # FORCE_COLOR and the like make a pipe look like a terminal. Colors may be forced; redrawing may not.
        is_terminal = self._console.is_interactive and (console is not None or sys.stdout.isatty())
        self._on_terminal = is_terminal and self._console.encoding.lower().startswith("utf")
        self._changed = True
        self._stopped = False
        self._lock = threading.Lock()
        self._finish = threading.Event()
        self._live = Live(get_renderable=self.panel, console=self._console, auto_refresh=False)
        self._thread = threading.Thread(target=self._redraw, name="live-view", daemon=True)

    def update(self, stage: str, step: int, values: Mapping[str, float], *, skipped: int = 0) -> None:
        """Show the metrics of one step. A stage that was not announced is added.

        `skipped` of the steps so far changed no weights, as when a batch had no training signal; they are counted
        apart.
        """
        now_s = self._clock() - self._start_s
        with self._lock:
            if stage not in self._stages:
                self._stages[stage] = _Stage(stage, max(1, step))
            progress = self._stages[stage]
            if math.isnan(progress.started_s):
                progress.started_s = self._last_update_s  # a stage starts where the previous one ended
            progress.step = max(progress.step, step)
            progress.steps = max(progress.steps, step)
            progress.skipped = skipped
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
            self._current, self._changed = progress, True
        if self._on_terminal:
            return

        # Is the step worth a line?
        evaluations = [name for name in TEXTS["line_evaluations"] if name in values]
        tenth = progress.step * _LINES_PER_STAGE // progress.steps
        if progress.line is not None and progress.step < progress.steps and not evaluations:
            last_s, last_tenth = progress.line
            if tenth <= last_tenth and now_s - last_s < _LINE_INTERVAL_S:
                return
        progress.line = now_s, tenth
        # The first line with columns fixes those of the stage, so that later lines are aligned with it.
        progress.columns = progress.columns or [name for name in TEXTS["line_columns"] if name in values]
        numbers = {}
        for name in (*progress.columns, *evaluations):
            value, unit = values.get(name, math.nan), METRICS[name].unit
            number = format_value(value, "score" if unit == "share" else unit) if math.isfinite(value) else "-"
            numbers[name] = number.replace(" ", "")
        count = f"{progress.step - progress.skipped:>{len(str(progress.steps))}}/{progress.steps}"
        if progress.skipped:
            count += f" (+{progress.skipped} without a signal)"
        cells = [f"{format_clock(now_s):>7}", f"{stage:<{self._name_width}}", count]
        if not values.keys().isdisjoint(progress.columns):
            labels = TEXTS["line_columns"]
            cells += [f"{labels[name]} {numbers[name]:<{_NUMBER_WIDTH}}" for name in progress.columns]
        cells += [f"{TEXTS['line_evaluations'][name]} {numbers[name]}" for name in evaluations]
        self.message("  ".join(cells).rstrip())

    def event(self, name: str, step: int | None, message: str) -> None:
        """Print a condition that occurred, and count it in the panel; may be called from any thread."""
        at_step = "" if step is None else f" at step {step}"
        with self._lock:
            self._last_event = f"last{at_step}: {message.partition(chr(10))[0]}"
            self._event_counts[name] = self._event_counts.get(name, 0) + 1
            self._changed = True
        self.message(f"{format_clock(self._clock() - self._start_s):>7}  {name}{at_step}: {message}")

    def message(self, text: str) -> None:
        """Print a line of text, on a terminal above the panel."""
        # Text is not parsed as markup, and soft_wrap keeps each line in one piece, however narrow the output is.
        self._console.print(Text(text), soft_wrap=True)

    def __enter__(self) -> Self:
        self._start_s = self._clock()
        if self._on_terminal:
            self._live.start()
            self._thread.start()
        else:
            self.message(self._title)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stopped = kind is not None
        if self._on_terminal:
            self._finish.set()
            self._thread.join()
            self._live.refresh()
            self._live.stop()
        elif kind is not None:
            self.message(f"{format_clock(self._clock() - self._start_s):>7}  stopped by {kind.__name__}")

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

    def panel(self) -> Panel:
        """Draw the panel, as wide as the terminal, at most 100 columns.

        Rows are assembled as text: rich's tables and progress bars take several times as long, during the run.
        """
        width = min(self._console.width, _MAX_WIDTH)
        inner = max(20, width - 4)
        now_s = self._clock() - self._start_s
        clock = format_clock(now_s)
        with self._lock:
            rows = self._stage_rows(inner, now_s=now_s)
            if self._current is not None:
                rows += [Text(), *self._detail_rows(self._current, inner)]
            return Panel(
                Group(*rows),
                title=Text(self._title, style="bold default"),
                title_align="left",
                subtitle=Text(f"stopped after {clock}" if self._stopped else clock, style="default"),
                subtitle_align="right",
                border_style="red" if self._stopped else _DIM,
                width=width,
            )

    def _stage_rows(self, width: int, *, now_s: float) -> list[Text]:
        stages = self._stages.values()
        if not stages:
            return []
        digits = len(str(max(stage.steps for stage in stages)))
        counts = [f"{stage.step - stage.skipped:>{digits}}/{stage.steps:<{digits}}" for stage in stages]
        if width >= _WIDTH_OF_NOTES:
            notes = [f" (+{each.skipped} without a signal)" if each.skipped else "" for each in stages]
            counts = [f"{count}{note:<{max(map(len, notes))}}" for count, note in zip(counts, notes, strict=True)]
        name_width = max(_LABEL_WIDTH - 2, *(len(stage.name) for stage in stages))
        bar_width = max(4, width - name_width - len(counts[0]) - 12 - 4)
        rows = []
        for stage, count in zip(stages, counts, strict=True):
            done = stage.step >= stage.steps
            active = stage is self._current and not done
            mark = ("✔", _GOOD) if done else ("▸", _ACCENT) if active else ("·", _DIM)
            clock = ""
            if done:
                clock = format_clock(stage.updated_s - stage.started_s)
            elif active and stage.step:
                left_s = stage.seconds_per_step * (stage.steps - stage.step) - (now_s - stage.updated_s)
                clock = f"ETA {format_clock(max(0.0, left_s))}"
            filled = round(bar_width * min(1.0, stage.step / stage.steps))
            row = Text.assemble(
                mark,
                " ",
                (f"{stage.name:<{name_width}}", "bold" if active else ""),
                ("━" * filled, _GOOD if done else _ACCENT),
                ("━" * (bar_width - filled), _DIM),
                "  ",
                count,
                (f"{clock:>12}", "" if active else _DIM),
                no_wrap=True,
                overflow="crop",
            )
            rows.append(row)
        return rows

    def _detail_rows(self, stage: _Stage, width: int) -> list[Text]:
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
            if found := [each for each in self._stages.values() if f"held_out_{name}" in each.values]:
                first, last = found[0].first[f"held_out_{name}"], found[-1].values[f"held_out_{name}"]
                held_out += [("   " if held_out else "") + label + " ", (f"{first:.3f}", _DIM), " → "]
                held_out.append((f"{last:.3f}", f"bold {_HELD_OUT}"))
        if held_out:
            rows.append(_row("held-out", *held_out))

        speed = [f"{format_value(values['tokens_per_s'], 'count')} tokens/s"] if "tokens_per_s" in values else []
        speed += [] if math.isnan(stage.seconds_per_step) else [f"{format_duration(stage.seconds_per_step)} a step"]
        if speed:
            rows.append(_row("speed", " · ".join(speed)))
        rows += _phase_rows(stage.phase_s, width - _LABEL_WIDTH)

        memory = (
            [f"{format_value(values['memory_rss_bytes'], 'bytes')} process"] if "memory_rss_bytes" in values else []
        )
        if "memory_gpu_bytes" in values:
            peak = values.get("memory_gpu_peak_bytes")
            at_most = "" if peak is None else f", at most {format_value(peak, 'bytes')}"
            memory.append(f"{format_value(values['memory_gpu_bytes'], 'bytes')} GPU{at_most}")
        if memory:
            rows.append(_row("memory", " · ".join(memory)))

        if "refit_bytes" in values:
            refit = [f"version {values['version']:.0f}"] if "version" in values else []
            refit.append(format_value(values["refit_bytes"], "bytes"))
            refit += [format_duration(values["refit_s"])] if "refit_s" in values else []
            verified = values.get("refit_verified", 0.0) >= 1
            mark = (" · ✓ verified", _GOOD) if verified else (" · not verified", _HELD_OUT)
            rows.append(_row("last refit", " · ".join(refit), *([mark] if "refit_verified" in values else [])))

        if self._event_counts:
            counts = ", ".join(f"{name} × {n}" if n > 1 else name for name, n in self._event_counts.items())
            rows.append(_row("events", (counts, f"bold {_HELD_OUT}"), f"  {self._last_event}"))
        return rows


_BLOCKS = "▁▂▃▄▅▆▇█"
_COLORS = {phase.name: phase.color for phase in PHASES}
_ACCENT, _HELD_OUT, _GOOD, _DIM = "#4c8dff", "#f0883e", "#3fb068", "bright_black"
_MAX_WIDTH = 100
_LABEL_WIDTH = 12
_WIDTH_OF_NOTES = 60  # narrower, a note beside the count would leave no room for the remaining time


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
    order = [*(name for name in _COLORS if name in phase_s), *(name for name in phase_s if name not in _COLORS)]
    bar: list[tuple[str, str]] = []
    legend: list[Text] = []
    edge, covered, used = 0, 0.0, columns
    for name in order:
        covered += phase_s[name]
        end = round(columns * covered / total)
        color = _COLORS.get(name, _DIM)
        bar.append(("█" * (end - edge), color))
        edge = end
        text = f"{name} {100 * phase_s[name] / total:.0f} %"
        if used + len(text) + 4 > columns + 2:
            legend.append(_row(""))
            used = 0
        legend[-1].append_text(Text.assemble(("■ ", color), text, "  "))
        used += len(text) + 4
    return [_row("a step", *bar), *legend]


def _row(label: str, *parts: str | tuple[str, str]) -> Text:
    return Text.assemble((f"{label:<{_LABEL_WIDTH - 1}} ", _DIM), *parts, no_wrap=True, overflow="ellipsis")
