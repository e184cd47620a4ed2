"""What an engine did over time: samples of its metrics with the rates between them, and its metrics as Prometheus text.

A background thread calls `metrics()` at intervals, while another thread generates; any object with that method will do.
Rates use the engine's clock, `EngineMetrics.time_s`, so a late sample does not distort them.

The text follows Prometheus, "Exposition formats", version 0.0.4.
"""

import json
import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, final

from rl_generation.engine import EngineMetrics

__all__ = ["HasMetrics", "MetricsSample", "MetricsSummary", "MetricsTimeline", "to_prometheus"]

GAUGES = {
    "running": ("answers_running", "Answers being generated."),
    "waiting": ("answers_waiting", "Answers that wait for a place in the batch."),
    "cache_usage": ("cache_usage_ratio", "Share of the key/value cache in use, 0 to 1."),
    "version": ("weight_version", "Number of optimizer steps that the weights have seen."),
}
COUNTERS = {
    "prompt_tokens": ("prompt_tokens_total", "Prompt tokens prefilled, or found in the prefix cache."),
    "cached_prompt_tokens": ("cached_prompt_tokens_total", "Prompt tokens found in the prefix cache."),
    "generated_tokens": ("generated_tokens_total", "Tokens generated."),
    "preemptions": ("preemptions_total", "Answers that gave up their place in the cache and started again."),
}
"""Field of EngineMetrics → its name and meaning for Prometheus; `finished`, which has labels, is left out."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSample:
    """What an engine did between two readings; fields of `EngineMetrics` say what they say there."""

    start_s: float
    """Time of the first, by the engine's clock."""

    end_s: float
    """Time of the second; later than `start_s`."""

    # How much they grew in between; of `finished`, finish reason → answers.
    generated_tokens: int
    prompt_tokens: int
    cached_prompt_tokens: int
    preemptions: int
    finished: Mapping[str, int]

    # As they were at the second reading.
    running: int
    waiting: int
    cache_usage: float
    version: int

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
        grown: dict[str, int] = {name: getattr(second, name) - getattr(first, name) for name in COUNTERS}
        reasons = {**first.finished, **second.finished}
        finished = {why: second.finished.get(why, 0) - first.finished.get(why, 0) for why in reasons}
        restarted = min([*grown.values(), *finished.values()]) < 0
        if restarted:
            grown, finished = {name: getattr(second, name) for name in COUNTERS}, dict(second.finished)
        states = {name: getattr(second, name) for name in GAUGES}
        return cls(start_s=first.time_s, end_s=second.time_s, **grown, **states, finished=finished, restarted=restarted)

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

    # In all, and over the whole duration, pauses included. Many preemptions say that the cache is too small for
    # `max_num_seqs`.
    generated_tokens: int
    generated_tokens_per_s: float
    prompt_tokens: int
    prompt_tokens_per_s: float
    preemptions: int
    finished: Mapping[str, int]

    prefix_cache_hit_share: float | None
    """Of all prompt tokens; None where there were none."""

    mean_running: float
    """Answers generated at once, averaged over time as seen at the end of each interval."""

    # The most that any sample saw.
    max_running: int
    max_waiting: int
    max_cache_usage: float

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


class HasMetrics(Protocol):
    """All that a timeline asks of an engine."""

    def metrics(self) -> EngineMetrics:
        """What it is doing now; callable while another thread generates."""


@final
class MetricsTimeline:
    """Reads an engine's metrics at an interval, from entering the `with` block to leaving it.

    Both ends are readings too, so that a short block has a sample. It grows by one sample an interval.

    Args:
        engine: Any; its `metrics` is called from another thread.
        interval_s: Seconds between readings.
        stop_timeout_s: Seconds that a reading under way may take when the block is left.

    Raises:
        ValueError: A time is not positive and finite.
    """

    def __init__(self, engine: HasMetrics, *, interval_s: float = 1.0, stop_timeout_s: float = 10.0) -> None:
        for name, value in (("interval_s", interval_s), ("stop_timeout_s", stop_timeout_s)):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be a positive number of seconds; got {name}={value!r}")
        self._engine = engine
        self._interval_s = interval_s
        self._stop_timeout_s = stop_timeout_s
        self._readings: list[EngineMetrics] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        """Read once, and go on in a thread.

        Raises:
            RuntimeError: It was entered before; a timeline is used once.
        """
        if self._thread is not None:
            raise RuntimeError("a MetricsTimeline is entered once; make another for another stretch of time")
        self._readings.append(self._engine.metrics())
        self._thread = threading.Thread(target=self._run, name="rl-generation-metrics", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop, read once more, and raise what a reading raised; an error of the block itself comes first.

        Raises:
            TimeoutError: A reading is still under way after `stop_timeout_s`.
        """
        assert self._thread is not None
        self._stop.set()
        self._thread.join(self._stop_timeout_s)
        failure = self._error
        if self._thread.is_alive():
            failure = TimeoutError(
                f"metrics() of the engine did not return within stop_timeout_s={self._stop_timeout_s}"
            )
        if failure is None:
            return
        if error is None:
            raise failure
        error.add_note(f"the engine's metrics could not be read either: {failure!r}")

    @property
    def samples(self) -> tuple[MetricsSample, ...]:
        """All so far, in order; of readings at the same moment, the last counts."""
        readings = list(self._readings)
        latest = [one for one, after in pairwise(readings) if after.time_s != one.time_s] + readings[-1:]
        return tuple(MetricsSample.between(first, second) for first, second in pairwise(latest))

    def summary(self) -> MetricsSummary:
        """Sum up all samples so far.

        Raises:
            ValueError: There is none yet.
        """
        return MetricsSummary.of(self.samples)

    def to_jsonl(self, path: str | Path) -> None:
        """Write a line of JSON for each sample, with its rates, over what the file held."""
        with Path(path).open("w", encoding="utf-8") as file:
            for sample in self.samples:
                rates = {
                    "generated_tokens_per_s": sample.generated_tokens_per_s,
                    "prompt_tokens_per_s": sample.prompt_tokens_per_s,
                    "prefix_cache_hit_share": sample.prefix_cache_hit_share,
                }
                file.write(json.dumps(asdict(sample) | rates) + "\n")

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._interval_s):
                self._readings.append(self._engine.metrics())
            self._readings.append(self._engine.metrics())
        except BaseException as caught:  # noqa: BLE001 - raised when the block is left
            self._error = caught


def to_prometheus(metrics: EngineMetrics, *, model_name: str) -> str:
    """Render metrics in Prometheus' text format; serve it as `text/plain; version=0.0.4`.

    Args:
        metrics: Of any engine.
        model_name: Value of the label `model_name`, any text.
    """

    def escaped(value: str) -> str:
        return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    def header(name: str, kind: str, text: str) -> list[str]:
        return [f"# HELP rl_generation_{name} {text}", f"# TYPE rl_generation_{name} {kind}"]

    label = f'model_name="{escaped(model_name)}"'
    lines: list[str] = []
    for kind, families in (("gauge", GAUGES), ("counter", COUNTERS)):
        for field, (name, text) in families.items():
            lines += [*header(name, kind, text), f"rl_generation_{name}{{{label}}} {getattr(metrics, field)}"]
    lines += header("answers_finished_total", "counter", "Answers that ended, by finish reason.")
    known = ("stop", "length", "abort")
    for reason in (*known, *sorted(set(metrics.finished) - set(known))):
        count = metrics.finished.get(reason, 0)
        lines.append(f'rl_generation_answers_finished_total{{{label},finish_reason="{escaped(reason)}"}} {count}')
    return "".join(f"{line}\n" for line in lines)
