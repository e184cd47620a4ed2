"""Sequence packing: rows one after the other in one sequence, whose attention cannot see from one into another."""

from rl_backends.packing.attention import AttentionKernel, block_masks
from rl_backends.packing.enable import enable_packing, enable_padded_kernel

__all__ = ["AttentionKernel", "block_masks", "enable_packing", "enable_padded_kernel"]
