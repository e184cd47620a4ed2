"""Which trackers a recipe asks for, refused before anything runs where they cannot be had."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_launcher.observe.trackers.contract import Tracker, require_client
from rl_launcher.observe.trackers.mlflow import MlflowTracker
from rl_launcher.observe.trackers.trackio import TrackioTracker
from rl_launcher.observe.trackers.wandb import WandbTracker, require_key

if TYPE_CHECKING:
    from rl_launcher.recipe_schema.logger import LoggerConfig

__all__ = ["check_trackers", "enabled_trackers"]


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
