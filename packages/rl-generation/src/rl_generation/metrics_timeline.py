"""What an engine did over time: samples of its metrics with the rates between them, and its metrics as Prometheus text.

Only calls `metrics()`, from a thread of its own: it works beside a `generate` in another one, and knows no engine.
Rates are taken by the engine's own clock, `EngineMetrics.time_s`, so a sample that comes late is no error.

Reference of the text: Prometheus, "Exposition formats", version 0.0.4.
"""

import json
import math
import threading
from collections.abc import Iterator
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, final

from rl_generation.engine import EngineMetrics
from rl_generation.metrics_sample import MetricsSample, MetricsSummary

__all__ = ["HasMetrics", "MetricsTimeline", "to_prometheus"]


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
    return "".join(line + "\n" for line in _prometheus_lines(metrics, model_name=_escaped(model_name)))


_GAUGES = {
    "running": ("answers_running", "Answers being generated."),
    "waiting": ("answers_waiting", "Answers that wait for a place in the batch."),
    "cache_usage": ("cache_usage_ratio", "Share of the key/value cache in use, 0 to 1."),
    "version": ("weight_version", "Number of optimizer steps that the weights have seen."),
}
_COUNTERS = {
    "prompt_tokens": ("prompt_tokens_total", "Prompt tokens prefilled, or found in the prefix cache."),
    "cached_prompt_tokens": ("cached_prompt_tokens_total", "Prompt tokens found in the prefix cache."),
    "generated_tokens": ("generated_tokens_total", "Tokens generated."),
    "preemptions": ("preemptions_total", "Answers that gave up their place in the cache and started again."),
}
_FINISH_REASONS = ("stop", "length", "abort")


def _prometheus_lines(metrics: EngineMetrics, *, model_name: str) -> Iterator[str]:
    label = f'model_name="{model_name}"'
    for kind, families in (("gauge", _GAUGES), ("counter", _COUNTERS)):
        for field, (name, text) in families.items():
            yield from _header(name, kind=kind, text=text)
            yield f"rl_generation_{name}{{{label}}} {getattr(metrics, field)}"
    yield from _header("answers_finished_total", kind="counter", text="Answers that ended, by finish reason.")
    for reason in (*_FINISH_REASONS, *sorted(set(metrics.finished) - set(_FINISH_REASONS))):
        count = metrics.finished.get(reason, 0)
        yield f'rl_generation_answers_finished_total{{{label},finish_reason="{_escaped(reason)}"}} {count}'


def _header(name: str, *, kind: str, text: str) -> tuple[str, str]:
    return f"# HELP rl_generation_{name} {text}", f"# TYPE rl_generation_{name} {kind}"


def _escaped(value: str) -> str:
    """A label's value: backslash, quotation mark and line feed have a meaning of their own there."""
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
