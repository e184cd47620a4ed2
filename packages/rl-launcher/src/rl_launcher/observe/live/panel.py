"""A run as one panel on a terminal: progress, learning, held-out accuracy, speed, time, memory, last refit, events.

It draws a `RunProgress` and knows nothing else. Lines are assembled by hand, since tables and progress bars of the
terminal library take several times as long and a panel is drawn while the run computes.
"""

from __future__ import annotations

import math

from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from rl_launcher.observe.figures import format_bytes, format_clock, format_count, format_duration, format_value
from rl_launcher.observe.glossary import METRICS, PHASES
from rl_launcher.observe.live.progress import RunProgress, StageProgress

__all__ = ["render"]

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
