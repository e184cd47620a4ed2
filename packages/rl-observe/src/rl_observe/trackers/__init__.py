"""Trackers: Weights & Biases, MLflow and trackio, each an extra. None is imported unless the config enables it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_observe.trackers.base import Delivery, Tracker, TrackerError, require_client, start_tracker
from rl_observe.trackers.mlflow import MlflowTracker
from rl_observe.trackers.trackio import TrackioTracker
from rl_observe.trackers.wandb import WandbTracker, require_key

if TYPE_CHECKING:
    from rl_observe.config import LoggerConfig

__all__ = ["Delivery", "Tracker", "TrackerError", "check_trackers", "enabled_trackers", "start_tracker"]


def enabled_trackers(config: LoggerConfig) -> list[Tracker]:
    """Return the enabled trackers, not started yet."""
    trackers: list[Tracker] = []
    if config.wandb_enabled:
        trackers.append(WandbTracker(config.wandb))
    if config.mlflow_enabled:
        trackers.append(MlflowTracker(config.mlflow))
    if config.trackio_enabled:
        trackers.append(TrackioTracker(config.trackio))
    return trackers


def check_trackers(config: LoggerConfig) -> None:
    """Refuse trackers that cannot work, without contacting any service; call it before a model is loaded.

    Raises:
        TrackerError: a package or a key is missing.
    """
    for tracker in enabled_trackers(config):
        require_client(tracker.name)
    if config.wandb_enabled and config.wandb.mode == "online":
        require_key()
