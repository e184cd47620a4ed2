"""Real vLLM as a sink of weights: `VllmSink` in the caller's process, `RefitWorker` in each of the engine's workers.

`VllmAdapterSink` is the sink of a LoRA adapter alone.

The only door to vLLM: it is imported inside functions that run in a worker, so that importing this package needs torch
alone.
"""

from __future__ import annotations

from rl_refit.vllm.adapters import VllmAdapterSink
from rl_refit.vllm.sink import WORKER_EXTENSION, VllmSink

__all__ = ["WORKER_EXTENSION", "VllmAdapterSink", "VllmSink"]
