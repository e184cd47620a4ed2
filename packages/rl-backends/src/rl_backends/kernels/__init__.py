"""Kernels as a choice: which code computes attention, the loss, norms, rotary embeddings, MLPs and linear layers."""

from rl_backends.kernels.config import KernelsConfig
from rl_backends.kernels.table import KERNELS, Kernel, register_kernel

__all__ = ["KERNELS", "Kernel", "KernelsConfig", "register_kernel"]
