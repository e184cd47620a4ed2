"""Uniform random numbers that are a pure function of (seed, step). Knows no model and no batch.

    u = top 53 bits of mix(mix(seed) + (step + 1) γ) / 2^53        γ = 0x9E3779B97F4A7C15, mix = splitmix64's finaliser

A counter-based generator has no state to carry: a row draws the same number whatever its batch holds, wherever its rows
moved to, and on every device, for two integer multiplications a number.
Reference: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["exact_dtype", "uniforms"]


def _signed(bits: int) -> int:
    """The int64 of the same 64 bits."""
    return bits - (1 << 64) if bits >= 1 << 63 else bits


GAMMA = _signed(0x9E3779B97F4A7C15)
MULTIPLIERS = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))


def uniforms(seeds: Int[Tensor, "*shape"], steps: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return a number in [0, 1) for each pair of a seed and a step, in `exact_dtype`. `steps` counts from 0."""
    bits = _mix(_mix(seeds) + (steps + 1) * GAMMA)
    dtype = exact_dtype(seeds.device)
    # As many bits as the mantissa holds: one more could round up to 1.
    kept = 53 if dtype == torch.float64 else 24
    return _shift(bits, 64 - kept).to(dtype) * 2.0**-kept


def exact_dtype(device: torch.device) -> torch.dtype:
    """Return the widest float that `device` computes with, in which to cumulate probabilities.

    float32 sums round away tokens rarer than 6e-8; Apple's mps has nothing wider.
    """
    return torch.float32 if device.type == "mps" else torch.float64


def _mix(bits: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    bits = (bits ^ _shift(bits, 30)) * MULTIPLIERS[0]
    bits = (bits ^ _shift(bits, 27)) * MULTIPLIERS[1]
    return bits ^ _shift(bits, 31)


def _shift(bits: Int[Tensor, "*shape"], count: int) -> Int[Tensor, "*shape"]:
    """Shift right without the sign."""
    return (bits >> count) & ((1 << (64 - count)) - 1)
