"""What a run did when: spans of time in lanes, one lane for each that works beside the others.

    {"name": "generate", "lane": "trainer", "start_s": 1.25, "end_s": 1.75, "stage": "grpo", "step": 7, "laid": false}

It knows clocks and threads. It does not know what the names mean. Seconds count from the start of the run, over all
processes that have carried it on.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

from rl_launcher.observe.glossary import PHASE_PREFIX, phase_seconds
from rl_launcher.observe.json_lines import JsonLinesWriter, JsonValue, read_json_lines
from rl_launcher.observe.run_directory import RunDirectory

__all__ = ["TRAINER", "SpanLog", "read_spans"]

P = ParamSpec("P")
T = TypeVar("T")

TRAINER = "trainer"
"""The lane of the thread that drives the run."""

_NOT_DRAWN = "other"


class SpanLog:
    """Write spans, from any thread. Use it as the run's one clock.

    Args:
        run: whose spans they are.
        elapsed_s: seconds that the run took in earlier processes.
    """

    def __init__(self, run: RunDirectory, *, elapsed_s: float = 0.0) -> None:
        self._lines = JsonLinesWriter(run.spans)
        self._start_s = time.monotonic() - elapsed_s
        self._start_unix_s = time.time() - elapsed_s
        self._main = threading.get_ident()
        self._measured = 0

    def now(self) -> float:
        """Seconds since the run's start."""
        return time.monotonic() - self._start_s

    def since_start(self, unix_s: float) -> float:
        """Seconds since the run's start at a moment that another process took with `time.time()`.

        As exact as the clocks of the two machines agree.
        """
        return unix_s - self._start_unix_s

    def write(
        self, name: str, *, lane: str, start_s: float, end_s: float, stage: str | None = None, step: int | None = None
    ) -> None:
        """Append one span that was measured elsewhere, in seconds since the run's start.

        Raises:
            RunDirectoryError: the disk refused it.
        """
        if lane == TRAINER:
            self._measured += 1
        self._append(name, lane=lane, start_s=start_s, end_s=end_s, stage=stage, step=step, laid=False)

    @contextmanager
    def span(
        self, name: str, *, lane: str | None = None, stage: str | None = None, step: int | None = None
    ) -> Iterator[None]:
        """Write the time of the block, also if it raises; the lane is the thread's unless it is given."""
        start_s = self.now()
        try:
            yield
        finally:
            self.write(name, lane=lane or self._lane(), start_s=start_s, end_s=self.now(), stage=stage, step=step)

    def timed(self, name: str, function: Callable[P, T]) -> Callable[P, T]:
        """The same function, each of its calls a span in the lane of the thread that calls it."""

        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> T:
            with self.span(name):
                return function(*args, **kwargs)

        return called

    def step(self, stage: str, step: int, *, start_s: float, end_s: float, phases: Mapping[str, float]) -> None:
        """Write a step of the trainer, and its phases where nothing inside it was measured.

        Then `phases`, seconds by `phase_s/...`, are laid end to end in the order in which a step goes through them:
        their lengths are measured, their places are not, and the spans say so (`laid`).

        Raises:
            RunDirectoryError: the disk refused them.
        """
        self._append("step", lane=TRAINER, start_s=start_s, end_s=end_s, stage=stage, step=step, laid=False)
        measured, self._measured = self._measured, 0
        if measured:
            return
        at = start_s
        for name, seconds in phase_seconds(phases).items():
            if name != _NOT_DRAWN and seconds > 0:
                until = min(end_s, at + seconds)
                self._append(name, lane=TRAINER, start_s=at, end_s=until, stage=stage, step=step, laid=True)
                at = until

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        self._lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lane(self) -> str:
        return TRAINER if threading.get_ident() == self._main else threading.current_thread().name

    def _append(
        self, name: str, *, lane: str, start_s: float, end_s: float, stage: str | None, step: int | None, laid: bool
    ) -> None:
        if end_s < start_s:
            raise ValueError(f"span {name!r} in lane {lane!r} ends at {end_s} s, before it starts at {start_s} s")
        row = {"name": name.removeprefix(PHASE_PREFIX), "lane": lane, "stage": stage, "step": step, "laid": laid}
        self._lines.append({**row, "start_s": round(start_s, 6), "end_s": round(end_s, 6)})


def read_spans(run: RunDirectory) -> list[dict[str, JsonValue]]:
    """The spans of a run in the order in which they ended; [] where none were logged."""
    return read_json_lines(run.spans).rows if run.spans.exists() else []
