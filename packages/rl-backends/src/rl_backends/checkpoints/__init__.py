"""Checkpoints that any mesh can resume from: safetensors and JSON, complete or absent, also written asynchronously."""

from rl_backends.checkpoints.loading import CheckpointState, load_checkpoint
from rl_backends.checkpoints.optimizer_state import CheckpointedOptimizers
from rl_backends.checkpoints.saving import CheckpointWrite, find_latest, prune, release_staging_buffers, save_checkpoint

__all__ = [
    "CheckpointState",
    "CheckpointWrite",
    "CheckpointedOptimizers",
    "find_latest",
    "load_checkpoint",
    "prune",
    "release_staging_buffers",
    "save_checkpoint",
]
