"""The live view of a run: it takes what the trainer logs and shows it, on a terminal as a panel, elsewhere as lines.

It knows when to draw and how much time that may take. What is drawn is in `panel` and `lines`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from rl_launcher.observe.figures import format_clock
from rl_launcher.observe.live import panel
from rl_launcher.observe.live.lines import LineWriter
from rl_launcher.observe.live.progress import Event, RunProgress, StageTotal

__all__ = ["LiveView"]

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
            return panel.render(
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
