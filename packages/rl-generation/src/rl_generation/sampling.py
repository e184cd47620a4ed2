"""How to choose tokens. Does not know the model: limits that depend on one are checked by the engine."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, final

__all__ = ["MAX_SEED", "MIN_TEMPERATURE", "Sampling"]

MAX_SEED = 2**63
MIN_TEMPERATURE = 0.01
"""Below it, and above 0, vLLM puts this value in place of the one that was asked for; every engine refuses it."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the answers to a prompt are sampled, in every engine alike.

    Tokens that would end a bad word are excluded first; then logits are divided by the temperature, then cut by min-p,
    by top-k and by top-p, in this order, which is vLLM's.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "use_attribute_docstrings": True}

    max_new_tokens: int
    """Tokens after which an answer is cut off, its stop token included; more costs time and cache memory."""

    n: int = 1
    """Answers to each prompt, which share its prefill where the engine can; sample j of them draws with `seed + j`."""

    temperature: float = 1.0
    """Divides the logits: below 1 the likely becomes likelier, above 1 rarer; 0 is greedy, whatever the cuts below."""

    top_p: float = 1.0
    """Draw from the likeliest tokens that together reach this probability (nucleus); 1 draws from all of them."""

    top_k: int = 0
    """Draw from this many likeliest tokens, and those tied with the last of them; 0 draws from all of them."""

    min_p: float = 0.0
    """Draw from the tokens at least this likely relative to the likeliest one; 0 draws from all of them."""

    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end an answer, besides the engine's own; an answer includes the one that ended it."""

    stop: tuple[str, ...] = ()
    """Strings that end an answer as soon as its text holds one; the tokens that completed it are kept. Asks for a
    tokenizer."""

    bad_words: tuple[str, ...] = ()
    """Words whose last token is never drawn where it would complete one. Asks for a tokenizer."""

    ignore_eos: bool = False
    """True generates past the engine's own stop tokens; `stop_token_ids` and `stop` still end an answer."""

    seed: int | None = None
    """Makes answers repeatable whatever was generated before; None continues the engine's running generator."""

    def __post_init__(self) -> None:
        for name in ("stop_token_ids", "stop", "bad_words"):
            if isinstance(getattr(self, name), list):  # else it could not be hashed, and be changed behind our back
                object.__setattr__(self, name, tuple(getattr(self, name)))
        for name, value in (("max_new_tokens", self.max_new_tokens), ("n", self.n)):
            if not _is_int(value) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1; got {name}={value!r}")
        self._check_distribution()
        self._check_stops()
        if self.seed is not None and not (_is_int(self.seed) and 0 <= self.seed <= MAX_SEED - self.n):
            raise ValueError(
                f"seed must be None or an integer of at least 0 with seed + n <= 2**63; got seed={self.seed!r}, "
                f"n={self.n}"
            )

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0

    def spread(self, count: int) -> "list[Sampling]":
        """Return one Sampling for each of `count` prompts, whose seeds differ; the first is this one itself.

        This is what a single Sampling for many prompts means: without it, two equal prompts would get equal answers.
        """
        if self.seed is None:
            return [self] * count
        room = MAX_SEED - self.n + 1
        return [self, *(replace(self, seed=(self.seed ^ _scramble(index)) % room) for index in range(1, count))][:count]

    def _check_distribution(self) -> None:
        if not (self.temperature == 0.0 or MIN_TEMPERATURE <= self.temperature < math.inf):
            raise ValueError(
                f"temperature must be 0 (greedy) or finite and at least {MIN_TEMPERATURE}; "
                f"got temperature={self.temperature!r}"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1] (1 is off); got top_p={self.top_p!r}")
        if not _is_int(self.top_k) or self.top_k < 0:
            raise ValueError(f"top_k must be an integer of at least 0 (0 is off); got top_k={self.top_k!r}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be in [0, 1] (0 is off); got min_p={self.min_p!r}")

    def _check_stops(self) -> None:
        stops: object = self.stop_token_ids
        if not isinstance(stops, tuple) or not all(_is_int(token) and token >= 0 for token in stops):
            raise ValueError(
                f"stop_token_ids must be a tuple of token ids, 0 or more; got stop_token_ids={self.stop_token_ids!r}"
            )
        for name in ("stop", "bad_words"):
            words: object = getattr(self, name)
            if not isinstance(words, tuple) or not all(isinstance(word, str) and word for word in words):
                example = words if isinstance(words, str) and words else "END"
                raise ValueError(
                    f"{name} must be a tuple of strings that are not empty, as {name}=({example!r},); "
                    f"got {name}={words!r}"
                )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _scramble(index: int) -> int:
    """Finalise as splitmix64 does (Steele et al. 2014): 64 bits that differ in half of them for any two indices."""
    bits = index * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return bits ^ bits >> 31
