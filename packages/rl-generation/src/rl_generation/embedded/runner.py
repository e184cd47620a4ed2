"""What the engine asks of a way to generate: continuous batching, or the model's own `generate`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, final

from rl_generation.embedded.rows import Row
from rl_generation.rollout import Rollout

__all__ = ["Counters", "Progress", "Runner"]


class Progress(NamedTuple):
    """News of one answer."""

    row: Row
    tokens: tuple[int, ...]
    """New ones, and their logp; only where they were asked for."""
    logp: tuple[float, ...]
    rollout: Rollout | None
    """The whole answer, once it has ended."""


@final
@dataclass(slots=True)
class Counters:
    """What has happened since the engine was made; see `EngineMetrics`."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0


class Runner(Protocol):
    """Generates the answers it is given. One thread at a time."""

    counters: Counters

    @property
    def max_cache_tokens(self) -> int | None:
        """Tokens that its cache may hold; None where there is no bound."""

    @property
    def running(self) -> int:
        """Answers being generated."""

    @property
    def waiting(self) -> int:
        """Answers that wait for a place."""

    @property
    def cache_usage(self) -> float:
        """Share of the cache's bound that is in use."""

    def add(self, rows: Sequence[Row]) -> None:
        """Take answers in; they start in this order."""

    def advance(self, *, stream: bool) -> list[Progress]:
        """Generate some more; return who has ended, and with `stream` every new token."""

    def abort(self, request_id: str) -> list[Progress]:
        """Take the answers of a request out, as they are."""

    def commit_version(self, version: int) -> None:
        """From here on, tokens are made by the weights of `version`."""

    def clear(self) -> None:
        """Forget all answers, and give the cache back."""

    def explain(self) -> list[str]:
        """How it generates, in lines for people."""
