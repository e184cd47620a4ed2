"""Starts a tracker within a time, or says why not: some clients try for minutes to reach a server that is not there."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping

from rl_launcher.observe.redaction import Secrets
from rl_launcher.observe.run_directory import RunDirectory
from rl_launcher.observe.trackers.contract import Tracker, TrackerError

__all__ = ["start_tracker"]

# A service that takes longer to greet is down; the user is waiting in front of the terminal.
_START_TIMEOUT_S = 60.0


def start_tracker(
    tracker: Tracker,
    recipe: Mapping[str, object],
    run: RunDirectory,
    *,
    known_as: str | None,
    secrets: Secrets,
    timeout_s: float = _START_TIMEOUT_S,
) -> str:
    """Start it; see `Tracker.start`.

    Args:
        tracker: not started yet.
        recipe: without credentials.
        run: the run's directory.
        known_as: what an earlier start of the same run returned.
        secrets: what no message may hold.
        timeout_s: seconds after which it is given up.

    Raises:
        TrackerError: it raised, or did not answer in time.
    """
    answers: queue.SimpleQueue[str | Exception] = queue.SimpleQueue()

    def start() -> None:
        try:
            answers.put(tracker.start(recipe, run, known_as=known_as))
        except Exception as error:  # noqa: BLE001 - a client raises what it likes; it is raised again where it is waited for
            answers.put(error)

    # A daemon: one that never answers must not keep Python from ending.
    threading.Thread(target=start, name=f"start-{tracker.name}", daemon=True).start()
    try:
        answer = answers.get(timeout=timeout_s)
    except queue.Empty:
        answer = TimeoutError(f"no answer within {timeout_s:g} s")
    if isinstance(answer, str):
        return answer
    if isinstance(answer, TrackerError):
        raise answer
    reason = secrets.scrub(f"{type(answer).__name__}: {answer}".splitlines()[0])
    raise TrackerError(
        f"{tracker.name} could not be started: {reason}; nothing has been trained. Mend it, or set "
        f"logger.{tracker.name}_enabled=false"
    ) from None  # the error itself may hold credentials
