"""What servers, commands and checks ask of an engine; every engine here answers it."""

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol, final, runtime_checkable

from rl_generation.errors import PromptError
from rl_generation.requests import Limits, Sampling
from rl_generation.rollout import LogpOf, Rollout, TopLogp


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutDelta:
    """The next tokens of one answer."""

    sample_index: int
    """Which of the prompt's `n` answers."""

    tokens: tuple[int, ...]
    """New ones; none where an answer was aborted."""

    logp: tuple[float, ...]
    """One for each of `tokens`."""

    top_logp: TopLogp = ()
    """One entry for each of `tokens` where the request asked for it; see `Rollout.top_logp`."""

    rollout: Rollout | None = None
    """The whole answer, with the last of its deltas."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMetrics:
    """What an engine is doing, and has done since it was made."""

    time_s: float = field(default_factory=time.monotonic)
    """When this was read, by `time.monotonic`."""

    running: int = 0
    """Answers being generated now."""

    waiting: int = 0
    """Answers that wait for a place in the batch."""

    prompt_tokens: int = 0
    """Prefilled, or found in the prefix cache."""

    cached_prompt_tokens: int = 0
    """Of these, found in the prefix cache, or shared with another answer to the same prompt."""

    generated_tokens: int = 0

    preemptions: int = 0
    """Answers that had to give up their place in the cache and start again."""

    cache_usage: float = 0.0
    """Share of the key/value cache in use, 0 to 1."""

    finished: Mapping[str, int] = field(default_factory=dict)
    """Finish reason → answers."""

    version: int
    """Of the weights now."""


PROMETHEUS = {
    "running": "answers_running",
    "waiting": "answers_waiting",
    "cache_usage": "cache_usage_ratio",
    "version": "weight_version",
    "prompt_tokens": "prompt_tokens_total",
    "cached_prompt_tokens": "cached_prompt_tokens_total",
    "generated_tokens": "generated_tokens_total",
    "preemptions": "preemptions_total",
}
"""Field of EngineMetrics → its name for Prometheus, whose counters end with `_total`."""


def check_version(version: int) -> None:
    """Raise ValueError where `version` is no number of optimizer steps."""
    if isinstance(version, bool) or not isinstance(version, int) or version < 0:
        raise ValueError(f"a version counts optimizer steps and is at least 0; got version={version!r}")


def check_single(sampling: Sampling) -> None:
    """Raise PromptError where `sampling` asks for several answers: a future has one."""
    if sampling.n != 1:
        raise PromptError(f"submit answers a prompt once, and sampling.n={sampling.n}: submit it {sampling.n} times")


def failed_request(error: Exception) -> "Future[Rollout]":
    """The future of a request that was refused."""
    future: Future[Rollout] = Future()
    future.set_exception(error)
    return future


def to_prometheus(metrics: EngineMetrics, *, model_name: str) -> str:
    """Render metrics in Prometheus' text format, version 0.0.4; serve it as `text/plain; version=0.0.4`.

    Args:
        metrics: Of any engine.
        model_name: Value of the label `model_name`, any text.
    """
    name = model_name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    label = f'model_name="{name}"'
    lines: list[str] = []
    for field_name, family in PROMETHEUS.items():
        kind = "counter" if family.endswith("_total") else "gauge"
        value = getattr(metrics, field_name)
        lines += [f"# TYPE rl_generation_{family} {kind}", f"rl_generation_{family}{{{label}}} {value}"]
    lines.append("# TYPE rl_generation_answers_finished_total counter")
    for reason, count in ({"stop": 0, "length": 0, "abort": 0} | dict(metrics.finished)).items():
        lines.append(f'rl_generation_answers_finished_total{{{label},finish_reason="{reason}"}} {count}')
    return "".join(f"{line}\n" for line in lines)


@runtime_checkable
class RequestEngine(Protocol):
    """What answers prompts, many at once or one by one: an engine of this package, or several of them together."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling]) -> Sequence[Rollout]:
        """Answer each prompt `n` times; all answers to prompt 0 come first, then all to prompt 1, and so on."""

    def submit(self, prompt: Sequence[int], sampling: Sampling, *, seed: int) -> "Future[Rollout]":
        """Begin to answer one prompt, beside whatever is under way; from any thread, and without waiting.

        Sampled, it is what `generate([prompt], [sampling.for_request(seed)])` returns. Cancelling the future aborts
        it; what prevents this answer is the future's error, and touches no other.
        """

    def explain(self) -> str:
        """Which engine this is, with which limits and quirks. For people."""

    def close(self) -> None:
        """End it, with all of its processes; it can be called again."""


@runtime_checkable
class Engine(RequestEngine, Protocol):
    """What every engine of this package also says of itself."""

    @property
    def version(self) -> int:
        """Number of optimizer steps that the weights have seen, as last committed."""

    @property
    def logp_of(self) -> LogpOf:
        """Which distribution the logp of its rollouts refers to."""

    @property
    def limits(self) -> Limits:
        """What it can be asked for."""

    def metrics(self) -> EngineMetrics:
        """What it is doing now."""


@runtime_checkable
class StreamingEngine(Engine, Protocol):
    """What also hands new tokens out as they come: `TransformersEngine` and `VllmEngine`."""

    def stream(self, prompt: Sequence[int], sampling: Sampling) -> AsyncGenerator[RolloutDelta, None]:
        """Yield new tokens of the `n` answers, on any event loop; closing the iterator aborts what is unfinished."""

    async def abort(self) -> int:
        """Abort whatever is under way, and return how much that was; answers end with reason `"abort"`."""

    async def check_health(self) -> None:
        """Return where the engine answers; raise EngineDeadError where it does not."""
