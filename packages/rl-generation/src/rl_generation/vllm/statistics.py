"""What vLLM tells of its work, summed up as EngineMetrics. Takes the place of vLLM's loggers; prints nothing."""

import time
from collections import Counter
from typing import Any, final

from rl_generation.engine import EngineMetrics

__all__ = ["Statistics"]


@final
class Statistics:
    """A `StatLogger` of vLLM's by its methods, one for each replica.

    For `AsyncLLM(stat_loggers=[…])`, give a function `(vllm_config, engine_index) -> Statistics`.
    """

    def __init__(self) -> None:
        self._running = self._waiting = 0
        self._prompt = self._cached = self._generated = self._preemptions = 0
        self._usage = 0.0
        self._finished: Counter[str] = Counter()

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, *, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Add what one step did."""
        if scheduler_stats is not None:
            self._running = scheduler_stats.num_running_reqs
            self._waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            self._usage = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            self._prompt += iteration_stats.prompt_token_stats.total
            self._cached += iteration_stats.prompt_token_stats.cached_tokens
            self._generated += iteration_stats.num_generation_tokens
            self._preemptions += iteration_stats.num_preempted_reqs
            self._finished.update(str(each.finish_reason) for each in iteration_stats.finished_requests)

    def count_aborted(self, count: int) -> None:
        """Add answers that somebody aborted: vLLM leaves them out."""
        self._finished["abort"] += count

    def metrics(self, *, version: int) -> EngineMetrics:
        """Return all of it."""
        return EngineMetrics(
            time_s=time.monotonic(),
            running=self._running,
            waiting=self._waiting,
            prompt_tokens=self._prompt,
            cached_prompt_tokens=self._cached,
            generated_tokens=self._generated,
            preemptions=self._preemptions,
            cache_usage=self._usage,
            finished=dict(self._finished),
            version=version,
        )

    def log(self) -> None:
        """Print nothing."""

    def log_engine_initialized(self) -> None:
        """Print nothing."""

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        """Count nothing."""

    def record_admission_rejection(self, reason: str) -> None:
        """Count nothing."""
