"""Trackers: Weights & Biases, MLflow and trackio, each behind its own extra.

None of them is imported before a recipe enables it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rl_observe.redaction import Secrets
from rl_observe.run_directory import RunDirectory
from rl_observe.trackers.base import Delivery, Tracker, TrackerError, require_client
from rl_observe.trackers.mlflow import MlflowTracker
from rl_observe.trackers.trackio import TrackioTracker
from rl_observe.trackers.wandb import WandbTracker, require_key

if TYPE_CHECKING:
    from rl_observe.config import LoggerConfig

__all__ = ["Delivery", "Tracker", "TrackerError", "check_trackers", "enabled_trackers", "start_tracker"]


def enabled_trackers(config: LoggerConfig) -> list[Tracker]:
    """The trackers that are enabled; none has been started."""
    trackers: list[Tracker] = []
    if config.wandb_enabled:
        trackers.append(WandbTracker(config.wandb))
    if config.mlflow_enabled:
        trackers.append(MlflowTracker(config.mlflow))
    if config.trackio_enabled:
        trackers.append(TrackioTracker(config.trackio))
    return trackers


def check_trackers(config: LoggerConfig) -> None:
    """Refuse what could not be used, before a model is loaded. Contacts nobody.

    Raises:
        TrackerError: a package is missing, or a key.
    """
    for tracker in enabled_trackers(config):
        require_client(tracker.name)
    if config.wandb_enabled and config.wandb.mode == "online":
        require_key()


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
