"""The live view of a run: a panel on a terminal, aligned lines elsewhere.

It does not know how it is shown: `panel` and `lines` read it.

It chooses which steps are worth a line and writes them in ASCII, without colour. It does not know where they go.

It knows when to draw and how much time that may take. What is drawn is in `panel` and `lines`.

It draws a `RunProgress` and knows nothing else. Lines are assembled by hand, since tables and progress bars of the
terminal library take several times as long and a panel is drawn while the run computes.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from rl_observe.glossary import METRICS, PHASES, phase_seconds
from rl_observe.number_format import format_bytes, format_clock, format_count, format_duration, format_value

__all__ = ["Event", "LineWriter", "LiveView", "RunProgress", "StageProgress", "StageTotal", "Trace", "render"]

# A panel is never wider, so that a longer history could not be seen.
_TRACE_CAPACITY = 512


@dataclass(frozen=True, slots=True)
class StageTotal:
    """One stage of a run, as announced before it starts."""

    name: str
    """As in `update(stage, …)`."""

    steps: int
    """Steps that it will take."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"stage {self.name!r} is announced with steps={self.steps}; a stage has at least 1 step")


class Trace:
    """The history of one metric, in at most so many means over equally many steps."""

    def __init__(self) -> None:
        self.means: list[float] = []
        self.last = math.nan
        self._pending: list[float] = []
        self._stride = 1

    def append(self, value: float) -> None:
        """Add the next step's value; one that is not finite is passed over."""
        if not math.isfinite(value):
            return
        self.last = value
        self._pending.append(value)
        if len(self._pending) < self._stride:
            return
        self.means.append(sum(self._pending) / self._stride)
        self._pending.clear()
        if len(self.means) == _TRACE_CAPACITY:
            self.means = [(left + right) / 2 for left, right in zip(self.means[::2], self.means[1::2], strict=True)]
            self._stride *= 2

    def resampled(self, width: int) -> list[float]:
        """The whole history as at most `width` means, oldest first."""
        values = self.means or ([self.last] if math.isfinite(self.last) else [])
        if len(values) <= width:
            return values
        edges = [round(index * len(values) / width) for index in range(width + 1)]
        return [sum(values[low:high]) / (high - low) for low, high in pairwise(edges)]


@dataclass(slots=True)
class StageProgress:
    """One stage: how far it is, and what it measured."""

    name: str
    steps: int
    step: int = 0
    started_s: float | None = None
    updated_s: float = 0.0
    values: dict[str, float] = field(default_factory=dict)
    """The last value of each metric that the stage has logged."""
    first: dict[str, float] = field(default_factory=dict)
    """The first one."""
    headline: str | None = None
    """The metric that `trace` follows."""
    trace: Trace = field(default_factory=Trace)
    phase_s: dict[str, float] = field(default_factory=dict)
    """Seconds of each phase, over the logged steps so far."""

    @property
    def done(self) -> bool:
        """Whether every announced step has been taken."""
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
        """Seconds to the end of the stage at the mean speed so far; NaN before the first step."""
        return self.seconds_per_step * max(0, self.steps - self.step)


@dataclass(frozen=True, slots=True)
class Event:
    """A condition that came up."""

    name: str
    step: int | None
    message: str


class RunProgress:
    """All stages of a run, the announced ones first."""

    def __init__(self, stages: Sequence[StageTotal]) -> None:
        names = [stage.name for stage in stages]
        if len(set(names)) < len(names):
            raise ValueError(f"stages are told apart by their names, which must differ; got {names}")
        self.stages = {stage.name: StageProgress(stage.name, stage.steps) for stage in stages}
        self.current: StageProgress | None = None
        self.last_event: Event | None = None
        self.event_counts: dict[str, int] = {}
        self._last_update_s = 0.0

    def update(self, stage: str, step: int, values: Mapping[str, float], *, now_s: float) -> StageProgress:
        """Take in what one step logged, `now_s` seconds after the run's start.

        A stage starts when the one before it made its last update. One that was not announced is added.
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
        progress.headline = progress.headline or _headline(values)
        if progress.headline is not None and progress.headline in values:
            progress.trace.append(values[progress.headline])
        self.current = progress
        return progress

    def event(self, event: Event) -> None:
        """Take in a condition that came up."""
        self.last_event = event
        self.event_counts[event.name] = self.event_counts.get(event.name, 0) + 1

    def held_out(self, name: str) -> tuple[float, float] | None:
        """The first and the last value of a held-out metric over the whole run, or None where it has none."""
        found = [stage for stage in self.stages.values() if name in stage.values]
        return (found[0].first[name], found[-1].values[name]) if found else None


def _headline(values: Mapping[str, float]) -> str | None:
    return next((name for name in ("reward", "margin", "loss") if name in values), None)


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


_SHORTEST_INTERVAL_S = 1 / 8
# A panel is drawn so seldom that drawing takes at most this share of the time.
_SHARE_OF_TIME = 0.005


class LiveView:
    """Show a run. Use it as a context manager around all of its stages.

    with LiveView("sort digits", [StageTotal("sft", 100), StageTotal("grpo", 120)]) as view:
        view.update("sft", 1, {"loss": 3.9})

    On a terminal the panel is redrawn at most eight times a second by a thread of its own; when the context ends it
    stays, and what is printed next appears below it. Elsewhere each line is printed when its step is logged.
    """

    def __init__(self, title: str, stages: Sequence[StageTotal], *, console: Console | None = None) -> None:
        self._title = title
        self._console = console or Console()
        self._progress = RunProgress(stages)
        self._lines = LineWriter([stage.name for stage in stages])
        self._lock = threading.Lock()
        self._start_s = time.monotonic()
        self._on_terminal = _can_redraw(self._console, given=console is not None)
        self._changed = True
        self._stopped = False
        self._finish = threading.Event()
        self._live = Live(get_renderable=self._render, console=self._console, auto_refresh=False)
        self._thread = threading.Thread(target=self._redraw, name="live-view", daemon=True)

    def update(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Take in what one step logged. A stage that was not announced is added."""
        now_s = self._elapsed_s()
        with self._lock:
            progress = self._progress.update(stage, step, values, now_s=now_s)
            self._changed = True
        if not self._on_terminal:
            line = self._lines.line(progress, dict(values), now_s=now_s)
            if line is not None:
                self._print(line)

    def event(self, name: str, step: int | None, message: str) -> None:
        """Print a condition that came up, and count it in the panel; may be called from any thread."""
        with self._lock:
            self._progress.event(Event(name, step, message))
            self._changed = True
        place = "" if step is None else f" at step {step}"
        self._print(f"{format_clock(self._elapsed_s()):>7}  {name}{place}: {message}")

    def message(self, text: str) -> None:
        """Print a line of text, on a terminal above the panel."""
        self._print(text)

    def __enter__(self) -> Self:
        self._start_s = time.monotonic()
        if self._on_terminal:
            self._live.start()
            self._thread.start()
        else:
            self._print(self._title)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._on_terminal:
            self._finish.set()
            self._thread.join()
            self._stopped = kind is not None
            self._live.refresh()
            self._live.stop()
        elif kind is not None:
            self._print(f"{format_clock(self._elapsed_s()):>7}  stopped by {kind.__name__}")

    def _render(self) -> Panel:
        with self._lock:
            return render(
                self._progress,
                title=self._title,
                now_s=self._elapsed_s(),
                width=self._console.width,
                stopped=self._stopped,
            )

    def _redraw(self) -> None:
        interval_s = _SHORTEST_INTERVAL_S
        drawn_s = 0.0
        while not self._finish.wait(interval_s):
            # Between updates only the clocks move, and those by the second.
            if not self._changed and time.monotonic() - drawn_s < 1.0:
                continue
            self._changed = False
            # The thread's own processor time: waiting for the trainer to give way costs the trainer nothing.
            before_s = time.thread_time()
            self._live.refresh()
            cost_s = time.thread_time() - before_s
            interval_s = max(_SHORTEST_INTERVAL_S, cost_s / _SHARE_OF_TIME)
            drawn_s = time.monotonic()

    def _print(self, text: str) -> None:
        # Text takes no markup and soft_wrap keeps one line one line, however narrow the log.
        self._console.print(Text(text), soft_wrap=True)

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._start_s


def _can_redraw(console: Console, *, given: bool) -> bool:
    # A variable such as FORCE_COLOR makes a pipe pass for a terminal. Colours may be forced; redrawing may not.
    is_terminal = console.is_interactive and (given or sys.stdout.isatty())
    return is_terminal and console.encoding.lower().startswith("utf")


_BLOCKS = "▁▂▃▄▅▆▇█"
_COLOURS = {phase.name: phase.colour for phase in PHASES}
_ACCENT = "#4c8dff"
_HELD_OUT = "#f0883e"
_GOOD = "#3fb068"
_TRACK = "bright_black"
_MAX_WIDTH = 100
_LABEL_WIDTH = 12


def render(progress: RunProgress, *, title: str, now_s: float, width: int, stopped: bool = False) -> Panel:
    """Draw the panel.

    Args:
        progress: what to draw.
        title: what the run is called.
        now_s: seconds since the run's start.
        width: columns of the terminal; the panel takes no more than 100.
        stopped: whether the run ended before its last step.
    """
    width = min(width, _MAX_WIDTH)
    inner = max(20, width - 4)
    rows = [_stage_row(stage, progress, now_s=now_s, width=inner) for stage in progress.stages.values()]
    current = progress.current
    if current is not None:
        rows.append(Text())
        rows += [
            row
            for row in (
                _headline_row(current, inner),
                _held_out_row(progress),
                _speed_row(current),
                *_phase_rows(current, inner),
                _memory_row(current),
                _refit_row(current),
                _event_row(progress),
            )
            if row is not None
        ]
    clock = format_clock(now_s)
    return Panel(
        Group(*rows),
        title=Text(title, style="bold default"),
        title_align="left",
        subtitle=Text(f"stopped after {clock}" if stopped else clock, style="default"),
        subtitle_align="right",
        border_style="red" if stopped else _TRACK,
        width=width,
    )


def _stage_row(stage: StageProgress, progress: RunProgress, *, now_s: float, width: int) -> Text:
    active = stage is progress.current and not stage.done
    mark = ("✔", _GOOD) if stage.done else ("▸", _ACCENT) if active else ("·", _TRACK)
    digits = len(str(max(other.steps for other in progress.stages.values())))
    count = f"{stage.step:>{digits}}/{stage.steps:<{digits}}"
    clock = _stage_clock(stage, now_s, active=active)
    name_width = max(_LABEL_WIDTH - 2, *(len(other.name) for other in progress.stages.values()))
    bar_width = max(4, width - name_width - len(count) - 12 - 4)
    filled = round(bar_width * min(1.0, stage.step / stage.steps))
    return Text.assemble(
        mark,
        " ",
        (f"{stage.name:<{name_width}}", "bold" if active else ""),
        ("━" * filled, _GOOD if stage.done else _ACCENT),
        ("━" * (bar_width - filled), _TRACK),
        "  ",
        count,
        (f"{clock:>12}", "" if active else _TRACK),
        no_wrap=True,
        overflow="crop",
    )


def _stage_clock(stage: StageProgress, now_s: float, *, active: bool) -> str:
    if stage.done:
        return format_clock(stage.elapsed_s)
    if not active or math.isnan(stage.remaining_s):
        return ""
    return f"ETA {format_clock(max(0.0, stage.remaining_s - (now_s - stage.updated_s)))}"


def _headline_row(stage: StageProgress, width: int) -> Text | None:
    if stage.headline is None or math.isnan(stage.trace.last):
        return None
    number = format_value(stage.trace.last, METRICS[stage.headline].unit)
    curve = stage.trace.resampled(max(8, width - _LABEL_WIDTH - len(number) - 2))
    return _row(METRICS[stage.headline].label, (_sparkline(curve), _ACCENT), "  ", (number, "bold"))


def _sparkline(values: list[float]) -> str:
    low, high = min(values), max(values)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((value - low) * scale)] for value in values)


def _held_out_row(progress: RunProgress) -> Text | None:
    parts: list[str | tuple[str, str]] = []
    for name, label in (
        ("held_out_sampled", "sampled"),
        ("held_out_greedy", "greedy"),
        ("held_out_loss", "loss"),
        ("held_out_pair_accuracy", "pairs right"),
    ):
        figures = progress.held_out(name)
        if figures is not None:
            parts += [("   " if parts else "") + label + " ", (f"{figures[0]:.3f}", _TRACK), " → "]
            parts.append((f"{figures[1]:.3f}", f"bold {_HELD_OUT}"))
    return _row("held-out", *parts) if parts else None


def _speed_row(stage: StageProgress) -> Text | None:
    parts = []
    if "tokens_per_s" in stage.values:
        parts.append(f"{format_count(stage.values['tokens_per_s'])} tokens/s")
    if not math.isnan(stage.seconds_per_step):
        parts.append(f"{format_duration(stage.seconds_per_step)} a step")
    return _row("speed", " · ".join(parts)) if parts else None


def _phase_rows(stage: StageProgress, width: int) -> list[Text]:
    total = sum(stage.phase_s.values())
    if total <= 0:
        return []
    columns = width - _LABEL_WIDTH
    edge, covered = 0, 0.0
    bar: list[tuple[str, str]] = []
    legend: list[tuple[str, str]] = []
    for name in sorted(stage.phase_s, key=_phase_order):
        covered += stage.phase_s[name]
        end = round(columns * covered / total)
        bar.append(("█" * (end - edge), _COLOURS.get(name, _TRACK)))
        edge = end
        legend.append((f"{name} {100 * stage.phase_s[name] / total:.0f} %", _COLOURS.get(name, _TRACK)))
    return [_row("a step", *bar), *_legend_rows(legend, columns)]


def _legend_rows(legend: list[tuple[str, str]], columns: int) -> list[Text]:
    rows: list[Text] = []
    used = columns
    for text, colour in legend:
        size = len(text) + 4
        if used + size > columns + 2:
            rows.append(_row(""))
            used = 0
        rows[-1].append_text(Text.assemble(("■ ", colour), text, "  "))
        used += size
    return rows


def _phase_order(name: str) -> int:
    names = list(_COLOURS)
    return names.index(name) if name in names else len(names)


def _memory_row(stage: StageProgress) -> Text | None:
    parts = []
    if "memory_rss_bytes" in stage.values:
        parts.append(f"{format_bytes(stage.values['memory_rss_bytes'])} process")
    if "memory_gpu_bytes" in stage.values:
        gpu = f"{format_bytes(stage.values['memory_gpu_bytes'])} GPU"
        most = stage.values.get("memory_gpu_peak_bytes")
        parts.append(gpu if most is None else f"{gpu}, at most {format_bytes(most)}")
    return _row("memory", " · ".join(parts)) if parts else None


def _refit_row(stage: StageProgress) -> Text | None:
    if "refit_bytes" not in stage.values:
        return None
    parts = [format_bytes(stage.values["refit_bytes"])]
    if "version" in stage.values:
        parts.insert(0, f"version {stage.values['version']:.0f}")
    if "refit_s" in stage.values:
        parts.append(format_duration(stage.values["refit_s"]))
    verified = stage.values.get("refit_verified")
    marks: dict[bool, tuple[str, str]] = {True: (" · ✓ verified", _GOOD), False: (" · not verified", _HELD_OUT)}
    mark = [] if verified is None else [marks[verified >= 1]]
    return _row("last refit", " · ".join(parts), *mark)


def _event_row(progress: RunProgress) -> Text | None:
    last = progress.last_event
    if last is None:
        return None
    counts = ", ".join(f"{name} × {count}" if count > 1 else name for name, count in progress.event_counts.items())
    place = "" if last.step is None else f" at step {last.step}"
    first_line = last.message.partition("\n")[0]
    return _row("came up", (counts, f"bold {_HELD_OUT}"), f"  last{place}: {first_line}")


def _row(label: str, *parts: str | tuple[str, str]) -> Text:
    return Text.assemble((f"{label:<{_LABEL_WIDTH - 1}} ", _TRACK), *parts, no_wrap=True, overflow="ellipsis")
