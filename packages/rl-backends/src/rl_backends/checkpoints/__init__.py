"""Checkpoints that any mesh can resume from: safetensors and JSON, whole or absent, written while training goes on."""

from rl_backends.checkpoints.folders import find_latest, prune
from rl_backends.checkpoints.loading import load_checkpoint
from rl_backends.checkpoints.optimizer_state import CheckpointedOptimizers
from rl_backends.checkpoints.reading import CheckpointState
from rl_backends.checkpoints.saving import save_checkpoint
from rl_backends.checkpoints.writing import CheckpointWrite

__all__ = [
    "CheckpointState",
    "CheckpointWrite",
    "CheckpointedOptimizers",
    "find_latest",
    "load_checkpoint",
    "prune",
    "save_checkpoint",
]
