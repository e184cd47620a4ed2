"""Sequence packing: rows one after the other in one sequence, whose attention cannot see from one into another."""

from rl_backends.packing.enable import PACKED_ATTENTION, enable_packing

__all__ = ["PACKED_ATTENTION", "enable_packing"]
