"""How to choose tokens. Does not know the model: limits that depend on one are checked by the engine."""

import math
from dataclasses import dataclass
from typing import ClassVar, final

__all__ = ["Sampling"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one call of `generate` chooses tokens. Cuts apply in the order temperature, top-k, top-p."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "use_attribute_docstrings": True}

    max_new_tokens: int
    """Tokens after which an answer is cut off, its stop token included; more costs time and cache memory."""

    temperature: float = 1.0
    """Divides the logits: below 1 the likely becomes likelier, above 1 rarer; 0 is greedy, whatever the cuts below."""

    top_p: float = 1.0
    """Draw from the likeliest tokens that together reach this probability (nucleus); 1 draws from all of them."""

    top_k: int = 0
    """Draw from this many likeliest tokens, and those tied with the last of them; 0 draws from all of them."""

    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end an answer in this call, besides the engine's own; an answer includes the one that ended it."""

    seed: int | None = None
    """Makes the call repeatable whatever was generated before; None continues the engine's running generator."""

    def __post_init__(self) -> None:
        if not _is_int(self.max_new_tokens) or self.max_new_tokens < 1:
            raise ValueError(
                f"max_new_tokens must be an integer of at least 1; got max_new_tokens={self.max_new_tokens!r}"
            )
        if not math.isfinite(self.temperature) or self.temperature < 0.0:
            raise ValueError(
                f"temperature must be finite and not negative (0 is greedy); got temperature={self.temperature!r}"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1] (1 is off); got top_p={self.top_p!r}")
        if not _is_int(self.top_k) or self.top_k < 0:
            raise ValueError(f"top_k must be an integer of at least 0 (0 is off); got top_k={self.top_k!r}")
        if not all(_is_int(token) and token >= 0 for token in self.stop_token_ids):
            raise ValueError(f"stop_token_ids must be token ids, 0 or more; got stop_token_ids={self.stop_token_ids!r}")
        if self.seed is not None and not (_is_int(self.seed) and 0 <= self.seed < 2**63):
            raise ValueError(f"seed must be None or an integer in [0, 2**63); got seed={self.seed!r}")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
