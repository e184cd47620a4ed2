"""Checkpoints of a run: atomic, verified by digests, and loadable on any number of ranks.

`save` writes and prunes them, `progress` is what they hold besides the policy, `folders` is their layout on disk.
"""

from rl_launcher.checkpoints.export import export
from rl_launcher.checkpoints.folders import Checkpoint, CheckpointError, find_latest, list_checkpoints, unfinished_of
from rl_launcher.checkpoints.progress import Progress
from rl_launcher.checkpoints.save import CheckpointManager, load_progress, save_mid_step, truncate_logs

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointManager",
    "Progress",
    "export",
    "find_latest",
    "list_checkpoints",
    "load_progress",
    "save_mid_step",
    "truncate_logs",
    "unfinished_of",
]
