"""What an engine did between two readings of its metrics, and over many of them. Arithmetic only; reads no engine."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self, final

from rl_generation.engine import EngineMetrics

__all__ = ["MetricsSample", "MetricsSummary"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSample:
    """What an engine did between two readings."""

    start_s: float
    """Time of the first, by the engine's clock."""

    end_s: float
    """Time of the second; later than `start_s`."""

    generated_tokens: int
    """In between."""

    prompt_tokens: int
    """Prefilled in between, or found in the prefix cache."""

    cached_prompt_tokens: int
    """Of these, found."""

    preemptions: int
    """In between."""

    finished: Mapping[str, int]
    """Finish reason → answers that ended in between."""

    running: int
    """Answers being generated at the second reading."""

    waiting: int
    """Answers that waited for a place then."""

    cache_usage: float
    """Share of the key/value cache in use then, 0 to 1."""

    version: int
    """Of the weights then."""

    restarted: bool
    """Whether the engine's counters began anew in between; what it counted before its end is then lost."""

    @classmethod
    def between(cls, first: EngineMetrics, second: EngineMetrics) -> Self:
        """Take the difference. A counter that fell began anew: all that it shows came since, as Prometheus has it.

        Raises:
            ValueError: `second` is not later than `first`.
        """
        if not second.time_s > first.time_s:
            raise ValueError(
                f"the second reading, at {second.time_s} s, is not later than the first, at {first.time_s} s"
            )
        restarted = _restarted(first, second)
        since = {"prompt": 0, "cached": 0, "generated": 0, "preemptions": 0}
        before: Mapping[str, int] = {}
        if not restarted:
            since = {
                "prompt": first.prompt_tokens,
                "cached": first.cached_prompt_tokens,
                "generated": first.generated_tokens,
                "preemptions": first.preemptions,
            }
            before = first.finished
        return cls(
            start_s=first.time_s,
            end_s=second.time_s,
            generated_tokens=second.generated_tokens - since["generated"],
            prompt_tokens=second.prompt_tokens - since["prompt"],
            cached_prompt_tokens=second.cached_prompt_tokens - since["cached"],
            preemptions=second.preemptions - since["preemptions"],
            finished={reason: count - before.get(reason, 0) for reason, count in second.finished.items()},
            running=second.running,
            waiting=second.waiting,
            cache_usage=second.cache_usage,
            version=second.version,
            restarted=restarted,
        )

    @property
    def duration_s(self) -> float:
        """Seconds between the readings."""
        return self.end_s - self.start_s

    @property
    def generated_tokens_per_s(self) -> float:
        """Rate in between."""
        return self.generated_tokens / self.duration_s

    @property
    def prompt_tokens_per_s(self) -> float:
        """Rate in between, cached ones included."""
        return self.prompt_tokens / self.duration_s

    @property
    def prefix_cache_hit_share(self) -> float | None:
        """Share of the prompt tokens in between that the cache had; None where there were none."""
        return self.cached_prompt_tokens / self.prompt_tokens if self.prompt_tokens else None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSummary:
    """A timeline in one row."""

    duration_s: float
    """From the first reading to the last."""

    samples: int
    """Intervals that it is made of."""

    generated_tokens: int
    """In all."""

    generated_tokens_per_s: float
    """Over the whole duration, pauses included."""

    prompt_tokens: int
    """In all."""

    prompt_tokens_per_s: float
    """Over the whole duration."""

    prefix_cache_hit_share: float | None
    """Of all prompt tokens; None where there were none."""

    mean_running: float
    """Answers generated at once, averaged over time as seen at the end of each interval."""

    max_running: int
    """The most that any sample saw."""

    max_waiting: int
    """The most that any sample saw."""

    max_cache_usage: float
    """The most that any sample saw, 0 to 1."""

    preemptions: int
    """In all; many say that the cache is too small for `max_num_seqs`."""

    finished: Mapping[str, int]
    """Finish reason → answers, in all."""

    restarts: int
    """How often the engine's counters began anew."""

    @classmethod
    def of(cls, samples: Sequence[MetricsSample]) -> Self:
        """Sum up samples that follow one another.

        Raises:
            ValueError: There is none.
        """
        if not samples:
            raise ValueError("there is nothing to sum up: two readings at different times are needed")
        duration = samples[-1].end_s - samples[0].start_s
        generated, prompt = sum(s.generated_tokens for s in samples), sum(s.prompt_tokens for s in samples)
        finished: Counter[str] = Counter()
        for sample in samples:
            finished.update(sample.finished)
        return cls(
            duration_s=duration,
            samples=len(samples),
            generated_tokens=generated,
            generated_tokens_per_s=generated / duration,
            prompt_tokens=prompt,
            prompt_tokens_per_s=prompt / duration,
            prefix_cache_hit_share=sum(s.cached_prompt_tokens for s in samples) / prompt if prompt else None,
            mean_running=sum(s.running * s.duration_s for s in samples) / duration,
            max_running=max(s.running for s in samples),
            max_waiting=max(s.waiting for s in samples),
            max_cache_usage=max(s.cache_usage for s in samples),
            preemptions=sum(s.preemptions for s in samples),
            finished=dict(finished),
            restarts=sum(s.restarted for s in samples),
        )


def _restarted(first: EngineMetrics, second: EngineMetrics) -> bool:
    pairs = [
        (first.prompt_tokens, second.prompt_tokens),
        (first.cached_prompt_tokens, second.cached_prompt_tokens),
        (first.generated_tokens, second.generated_tokens),
        (first.preemptions, second.preemptions),
        *((count, second.finished.get(reason, 0)) for reason, count in first.finished.items()),
    ]
    return any(after < before for before, after in pairs)
