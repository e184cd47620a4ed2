"""What a tracker is, and the thread that delivers metrics to it.

It knows no client. Whoever implements it may block and may raise: `delivery` calls it from a thread of its own.

What could not be sent is kept, in its order, and tried again with the next step and once more at the end. The first
failure is told once; all are counted, and `finish` says what was lost.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Literal, Protocol

from rl_observe.redaction import Secrets
from rl_observe.run_directory import RunDirectory

__all__ = ["Delivery", "Status", "Tracker", "TrackerError", "flat", "import_client", "require_client"]

Status = Literal["finished", "failed", "interrupted"]
"""How a run ended."""


class TrackerError(ValueError):
    """A tracker that a recipe enables and that cannot be used."""


class Tracker(Protocol):
    """One service that is shown a run."""

    @property
    def name(self) -> str:
        """What recipes and summaries call it: `wandb`."""

    def start(self, recipe: Mapping[str, object], run: RunDirectory, *, known_as: str | None) -> str:
        """Begin, and return the name under which the service will know this run when it is resumed.

        Args:
            recipe: resolved, plain, and without credentials.
            run: the run's directory.
            known_as: what an earlier `start` of the same run returned; None for a new run.
        """

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Show what one step logged; every value is finite."""

    def finish(self, summary: Mapping[str, object], *, status: Status) -> None:
        """Show how the run ended, and let go of it once all is sent."""


def require_client(name: str) -> None:
    """Refuse a tracker whose package is not installed, without importing it.

    Raises:
        TrackerError: naming the extra that brings it.
    """
    if importlib.util.find_spec(name) is None:
        raise TrackerError(
            f"logger.{name}_enabled=true needs the package {name}, which is not installed; "
            f"pip install 'rl-launcher[{name}]', or set logger.{name}_enabled=false"
        )


def import_client(name: str) -> ModuleType:
    """The client's own module.

    Raises:
        TrackerError: it is not installed, or is broken.
    """
    require_client(name)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise TrackerError(f"logger.{name}_enabled=true, and the package {name} cannot be imported: {error}") from error


def flat(data: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """The leaves of nested plain data by dotted key; a list is one leaf."""
    for name, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


# The service may be down for an hour; asking it at every step would only fill its log.
_FIRST_PAUSE_S = 5.0
_LONGEST_PAUSE_S = 300.0
# Enough for a connection that breaks now and then; who is down for longer loses the figures, and the summary says so.
_TRIES_AT_THE_END = 3
_PAUSE_AT_THE_END_S = 2.0

Row = tuple[str, int, dict[str, float]]


class Delivery:
    """One tracker that has been started, and what is still to be sent to it.

    Args:
        tracker: already started.
        warn: is told of the first failure.
        secrets: what no message may hold.
        first_pause_s: seconds after a first failure in which nothing is tried; doubles with each further one.
        end_pause_s: seconds between the last tries, when the run is over.
    """

    def __init__(
        self,
        tracker: Tracker,
        *,
        warn: Callable[[str], None],
        secrets: Secrets | None = None,
        first_pause_s: float = _FIRST_PAUSE_S,
        end_pause_s: float = _PAUSE_AT_THE_END_S,
    ) -> None:
        self._tracker, self._warn, self._secrets = tracker, warn, secrets or Secrets()
        self._first_pause_s, self._end_pause_s = first_pause_s, end_pause_s
        self._rows: deque[Row] = deque()
        self._changed = threading.Condition()
        self._ending: tuple[Mapping[str, object], Status] | None = None
        self._finished = False
        self._sent = self._failures = 0
        self._last_error: str | None = None
        self._thread = threading.Thread(target=self._work, name=f"tracker-{tracker.name}", daemon=True)
        self._thread.start()

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Take one step's figures to be sent, those that are finite; returns at once."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        with self._changed:
            self._rows.append((stage, step, finite))
            self._changed.notify()

    def finish(self, summary: Mapping[str, object], *, status: Status, timeout_s: float) -> dict[str, object]:
        """Send what is left and the summary, wait for that at most so long, and say what became of it.

        Returns:
            `sent` and `lost` steps, `failures`, `finished` (whether the tracker knows that the run has ended), and the
            `last_error` if there was one.
        """
        with self._changed:
            self._ending = (summary, status)
            self._changed.notify()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._failed(TimeoutError(f"nothing more arrived within {timeout_s:g} s at the end"))
        with self._changed:
            outcome: dict[str, object] = {
                "sent": self._sent,
                "lost": len(self._rows),
                "failures": self._failures,
                "finished": self._finished,
            }
            return outcome if self._last_error is None else {**outcome, "last_error": self._last_error}

    def _work(self) -> None:
        pause_s, not_before_s = self._first_pause_s, 0.0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._rows) or self._ending is not None)
                if self._ending is None and (left_s := not_before_s - time.monotonic()) > 0:
                    self._changed.wait_for(lambda: self._ending is not None, left_s)
                ending = self._ending
            if ending is not None:
                self._end(*ending)
                return
            if not self._send_all():
                not_before_s = time.monotonic() + pause_s
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            else:
                pause_s = self._first_pause_s

    def _send_all(self) -> bool:
        while self._rows:
            stage, step, values = self._rows[0]
            try:
                self._tracker.log(stage, step, values)
            except Exception as error:  # noqa: BLE001 - a client raises what it likes, and none of it may end a run
                self._failed(error)
                return False
            with self._changed:
                self._rows.popleft()
                self._sent += 1
        return True

    def _end(self, summary: Mapping[str, object], status: Status) -> None:
        for tries_left in reversed(range(_TRIES_AT_THE_END)):
            if self._send_all():
                break
            if tries_left:
                time.sleep(self._end_pause_s)
        try:
            self._tracker.finish(summary, status=status)
        except Exception as error:  # noqa: BLE001 - as above
            self._failed(error)
        else:
            self._finished = True

    def _failed(self, error: Exception) -> None:
        text = self._secrets.scrub(f"{type(error).__name__}: {error}".strip().splitlines()[0][:300])
        with self._changed:
            self._failures += 1
            is_first = self._failures == 1
            self._last_error = text
        if is_first:
            self._warn(
                f"{self._tracker.name} could not be reached ({text}); the run goes on, nothing of it is lost in "
                f"metrics.jsonl, and what is missing there is sent when it answers again"
            )
