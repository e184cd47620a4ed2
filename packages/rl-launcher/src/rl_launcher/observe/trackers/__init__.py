"""Weights & Biases, MLflow and trackio, each through its own client and behind its own extra.

None of them is imported before a recipe enables it.
"""

from rl_launcher.observe.trackers.contract import Tracker, TrackerError
from rl_launcher.observe.trackers.delivery import Delivery
from rl_launcher.observe.trackers.enabled import check_trackers, enabled_trackers
from rl_launcher.observe.trackers.starting import start_tracker

__all__ = ["Delivery", "Tracker", "TrackerError", "check_trackers", "enabled_trackers", "start_tracker"]
