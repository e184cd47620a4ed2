"""`Rollout`: one response with its log-probabilities, the versions of the weights that made it, and why it ended."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, TypeVar, final

FinishReason = Literal["stop", "length", "abort"]
"""A stop token or stop string; `max_new_tokens`; somebody aborted the request."""

LogpOf = Literal["sampled", "raw"]
"""Which distribution a logp refers to; one choice an engine, the same meaning in all of them.

`"sampled"`: the one drawn from: bad words excluded, logits over temperature, cut by min-p, top-k and top-p,
renormalised. Greedy answers take it at temperature 1 and without cuts, since their own is a single point.
`"raw"`: the log-softmax of the model's logits, whatever was done to them afterwards.
With temperature 1 and nothing cut or excluded, both are the same.
"""


TopLogp = tuple[tuple[tuple[int, float], ...], ...]
"""For each token of a response, pairs of a token id and its logp at that place."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Tokens `[start, end)` of an answer were made by the weights of `version`."""

    version: int
    """Number of optimizer steps that those weights had seen."""

    start: int
    end: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One answer to one prompt, as token ids. Nothing here was decoded to text and encoded again.

    Raises:
        ValueError: A token has no logp or one that is not finite, or `versions` leave a gap.
    """

    tokens: tuple[int, ...]
    """What was generated, in order; the last one is the stop token where one ended the answer. Never padding."""

    logp: tuple[float, ...]
    """Natural log-probability of each of `tokens`, always finite; `logp_of` says under which distribution."""

    logp_of: LogpOf
    """See `LogpOf`."""

    finish_reason: FinishReason
    """Why it ended; an aborted answer may have no tokens."""

    stop_reason: int | str | None
    """The stop token or stop string that ended it; None for `"length"` and `"abort"`."""

    versions: tuple[VersionSpan, ...]
    """Which weights made which tokens: one span unless the weights changed underway. Never empty, without gaps."""

    top_logp: TopLogp = ()
    """Where `Sampling.top_logp` asks for it: of each of `tokens` the likeliest tokens at its place with their logp, of
    the same distribution as `logp`, in falling order; fewer where fewer could have been drawn."""

    prompt_index: int = 0
    """Place of its prompt in the call."""

    sample_index: int = 0
    """Which of the prompt's `n` answers this is."""

    def __post_init__(self) -> None:
        name = f"sample {self.sample_index} of prompt {self.prompt_index}"
        if len(self.logp) != len(self.tokens) or not all(map(math.isfinite, self.logp)):
            raise ValueError(
                f"{name} has {len(self.tokens)} tokens and {len(self.logp)} logp, of which "
                f"{sum(map(math.isfinite, self.logp))} are finite: the engine must give a finite one for each token"
            )
        if self.top_logp and len(self.top_logp) != len(self.tokens):
            raise ValueError(
                f"{name} has {len(self.tokens)} tokens and the likeliest ones of {len(self.top_logp)} places"
            )
        ends = [0, *(span.end for span in self.versions)]
        starts = [*(span.start for span in self.versions), len(self.tokens)]
        if not self.versions or starts != ends:
            raise ValueError(
                f"{name} has {len(self.tokens)} tokens, which versions={self.versions} must cover from first to last"
            )

    @property
    def version(self) -> int:
        """Number of optimizer steps that the oldest weights that made any of `tokens` had seen."""
        return min(span.version for span in self.versions)

    @property
    def truncated(self) -> bool:
        """Whether the answer was cut off before the model ended it."""
        return self.finish_reason != "stop"


T = TypeVar("T")


def in_order(samples: Sequence[T]) -> list[T]:
    """Sort by prompt, then by sample: the order in which every engine's `generate` returns."""
    return sorted(samples, key=attrgetter("prompt_index", "sample_index"))
