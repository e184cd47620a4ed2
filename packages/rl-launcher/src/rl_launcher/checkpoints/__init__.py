"""Checkpoints of a run: one format for all savings, whole or absent, from which any number of ranks can go on.

retention   when one is due, and which are kept: rules over numbers
saving      what is written; folders: what makes it whole, and which there are
history     the log of a run that goes on from an earlier step
exporting   a Hugging Face folder of one
"""

from rl_launcher.checkpoints.export import export
from rl_launcher.checkpoints.folders import (
    Checkpoint,
    CheckpointError,
    find_latest,
    list_checkpoints,
    unfinished_of,
)
from rl_launcher.checkpoints.progress import Progress
from rl_launcher.checkpoints.save import Keeper, cut_history, load_progress, save_in_a_step, stage_start_of

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Keeper",
    "Progress",
    "cut_history",
    "export",
    "find_latest",
    "list_checkpoints",
    "load_progress",
    "save_in_a_step",
    "stage_start_of",
    "unfinished_of",
]
