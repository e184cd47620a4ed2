"""Checkpoints of Megatron's training in the coordinates of Hugging Face, which any layout and other backends resume."""

from rl_backends.megatron.checkpoint.loading import load_checkpoint
from rl_backends.megatron.checkpoint.saving import save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint"]
