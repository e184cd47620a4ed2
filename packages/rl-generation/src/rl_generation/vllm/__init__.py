"""Rollouts from vLLM, which owns the model, the cache and the batch. Importing this does not import vLLM.

Knows vLLM, and is the only place here that does. Does not know how new weights are made or reach the workers: whoever
refits hands in a worker extension by name, and talks to the engine that `vllm` gives out.
"""

from rl_generation.vllm.engine import VllmEngine
from rl_generation.vllm.options import LoraAdapter, VllmOptions

__all__ = ["LoraAdapter", "VllmEngine", "VllmOptions"]
