"""Gives the memory of weights, gradients and optimizer state to others, and brings them back bit for bit."""

from rl_backends.offload.offloader import PARTS, Offloader, OffloadReport, Part

__all__ = ["PARTS", "OffloadReport", "Offloader", "Part"]
