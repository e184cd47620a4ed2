"""One answer, with what is needed to train on it. Does not know its prompt: the order of the list says which."""

from dataclasses import dataclass
from typing import Literal, final

__all__ = ["Rollout"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One answer to one prompt, as token ids. Nothing here was decoded to text and encoded again."""

    tokens: tuple[int, ...]
    """What was generated, in order; the last one is the stop token where one ended the answer. Never padding."""

    logp: tuple[float, ...]
    """Natural log-probability of each of `tokens`, always finite; `logp_of` says under which distribution."""

    logp_of: Literal["sampled", "raw"]
    """`"sampled"`: the distribution drawn from: logits over temperature, cut to top-k and top-p, renormalised.

    `"raw"`: the log-softmax of the logits as they are; of greedy rollouts, whose own distribution is one point.
    """

    finish_reason: Literal["stop", "length"]
    """`"stop"`: the last token is a stop token. `"length"`: `max_new_tokens` came first."""

    version: int
    """Number of optimizer steps that the weights which made every one of `tokens` had seen."""

    @property
    def truncated(self) -> bool:
        """Whether the answer was cut off by `max_new_tokens`."""
        return self.finish_reason == "length"
