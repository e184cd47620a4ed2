"""The tracker protocol, and the thread that delivers metrics to a tracker.

A tracker may block and may raise: it is called from a thread of its own. What could not be sent is kept in order, and
sent again with the next step and at the end of the run. The first failure is reported; all failures are counted.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Literal, Protocol

from rl_observe.redaction import Secrets
from rl_observe.run_directory import RunDirectory

Status = Literal["finished", "failed", "interrupted"]
"""How a run ended."""

# A service that takes longer to respond is down, and the user is waiting for the run to start.
_START_TIMEOUT_S = 60.0
# A service may be down for an hour; the pause between attempts doubles from the first to the longest.
_FIRST_PAUSE_S = 5.0
_LONGEST_PAUSE_S = 300.0
# At the end of the run. This bridges a dropped connection; after a longer outage the summary counts what is lost.
_LAST_ATTEMPTS = 3
_LAST_PAUSE_S = 2.0


class TrackerError(ValueError):
    """An enabled tracker cannot be used."""


class Tracker(Protocol):
    """One experiment tracking service."""

    @property
    def name(self) -> str:
        """Its name in configs and summaries, such as `wandb`."""

    def start(self, recipe: Mapping[str, object], run: RunDirectory, *, known_as: str | None) -> str:
        """Start or continue a run, and return its id at the service.

        Args:
            recipe: resolved plain settings, without credentials.
            run: the run's directory.
            known_as: the id that an earlier `start` of the same run returned; None for a new run.
        """

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Send the metrics of one step; every value is finite."""

    def finish(self, summary: Mapping[str, object], *, status: Status) -> None:
        """Send the summary and end the run once everything is sent."""


def require_client(name: str) -> None:
    """Refuse a tracker whose package is not installed, without importing it.

    Raises:
        TrackerError: it is missing; the message names the extra to install.
    """
    if importlib.util.find_spec(name) is None:
        raise TrackerError(
            f"logger.{name}_enabled=true needs the package {name}, which is not installed; "
            f"pip install 'rl-observe[{name}]', or set logger.{name}_enabled=false"
        )


def import_client(name: str) -> ModuleType:
    """Import the client's module.

    Raises:
        TrackerError: it is not installed, or broken.
    """
    require_client(name)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise TrackerError(f"logger.{name}_enabled=true, and the package {name} cannot be imported: {error}") from error


def flat(data: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the leaves of nested plain data by dotted key; a list is one leaf."""
    for name, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def start_tracker(
    tracker: Tracker,
    recipe: Mapping[str, object],
    run: RunDirectory,
    *,
    known_as: str | None,
    secrets: Secrets,
    timeout_s: float = _START_TIMEOUT_S,
) -> str:
    """Call `tracker.start` with a timeout, and return the id of the run.

    Raises:
        TrackerError: it raised, or did not respond in time. No message contains `secrets`.
    """
    answers: queue.SimpleQueue[str | Exception] = queue.SimpleQueue()

    def start() -> None:
        try:
            answers.put(tracker.start(recipe, run, known_as=known_as))
        except Exception as error:  # noqa: BLE001 - clients raise anything; it is raised again below
            answers.put(error)

    # A daemon thread, so that a service that never responds does not keep Python from exiting.
    threading.Thread(target=start, name=f"start-{tracker.name}", daemon=True).start()
    try:
        answer = answers.get(timeout=timeout_s)
    except queue.Empty:
        answer = TimeoutError(f"no response within {timeout_s:g} s")
    if isinstance(answer, str):
        return answer
    if isinstance(answer, TrackerError):
        raise answer
    reason = secrets.scrub(f"{type(answer).__name__}: {answer}".splitlines()[0])
    raise TrackerError(
        f"{tracker.name} could not be started: {reason}; nothing has been trained. Fix it, or set "
        f"logger.{tracker.name}_enabled=false"
    ) from None  # the chained error could show credentials


class Delivery:
    """Deliver metrics to a started tracker, from a thread of its own.

    Args:
        tracker: already started.
        warn: called once, with the first failure; may be called from another thread.
        secrets: removed from every message.
        first_pause_s: seconds between a first failure and the next attempt; doubles with each further failure.
        last_pause_s: seconds between the last attempts, when the run has ended.
    """

    def __init__(
        self,
        tracker: Tracker,
        *,
        warn: Callable[[str], None],
        secrets: Secrets | None = None,
        first_pause_s: float = _FIRST_PAUSE_S,
        last_pause_s: float = _LAST_PAUSE_S,
    ) -> None:
        self._tracker, self._warn, self._secrets = tracker, warn, secrets or Secrets()
        self._first_pause_s, self._last_pause_s = first_pause_s, last_pause_s
        self._rows: deque[tuple[str, int, dict[str, float]]] = deque()
        self._changed = threading.Condition()
        self._ending: tuple[Mapping[str, object], Status] | None = None
        self._finished = False
        self._sent = self._failures = 0
        self._last_error: str | None = None
        self._thread = threading.Thread(target=self._work, name=f"tracker-{tracker.name}", daemon=True)
        self._thread.start()

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Queue the finite metrics of one step; returns at once."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        with self._changed:
            self._rows.append((stage, step, finite))
            self._changed.notify()

    def finish(self, summary: Mapping[str, object], *, status: Status, timeout_s: float) -> dict[str, object]:
        """Send what is left and the summary, wait at most `timeout_s`, and return the outcome.

        Returns:
            `sent` and `lost` steps, `failures`, `finished` (whether the tracker knows that the run has ended), and
            `last_error` if there was one.
        """
        with self._changed:
            self._ending = (summary, status)
            self._changed.notify()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._failed(TimeoutError(f"not everything was sent within {timeout_s:g} s at the end"))
        with self._changed:
            counts = {"sent": self._sent, "lost": len(self._rows), "failures": self._failures}
            error = {} if self._last_error is None else {"last_error": self._last_error}
            return {**counts, "finished": self._finished, **error}

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
            if self._send_all():
                pause_s = self._first_pause_s
            else:
                not_before_s = time.monotonic() + pause_s
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _send_all(self) -> bool:
        while self._rows:
            stage, step, values = self._rows[0]
            try:
                self._tracker.log(stage, step, values)
            except Exception as error:  # noqa: BLE001 - clients raise anything, and none of it may end a run
                self._failed(error)
                return False
            with self._changed:
                self._rows.popleft()
                self._sent += 1
        return True

    def _end(self, summary: Mapping[str, object], status: Status) -> None:
        for attempts_left in reversed(range(_LAST_ATTEMPTS)):
            if self._send_all():
                break
            if attempts_left:
                time.sleep(self._last_pause_s)
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
                f"{self._tracker.name} could not be reached ({text}); the run continues, metrics.jsonl is complete, "
                f"and missing steps are sent when the service responds again"
            )
