"""How far an engine's log-probabilities are from its model's: the figures, a report, and a watch over a run.

A comparison is handed in. Reference: token_mult_prob_error, NeMo RL (github.com/NVIDIA-NeMo/RL), which calls above 1.05
a fault.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import final

__all__ = ["AgreementError", "AgreementMonitor", "Coverage", "LogpAgreement", "TokenDifference"]

FAULT = 1.05
"""Of `token_mult_prob_error`, by NeMo RL."""

LARGEST_DIFFERENCE = 700.0
"""In nats, of those that are averaged: exp of a larger one is no number any more."""


@final
class AgreementError(ValueError):
    """An engine and its model disagree on what was sampled: weights, precision or sampling differ."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDifference:
    """One token as the engine and as the model saw it. Log-probabilities in nats."""

    prompt_index: int
    sample_index: int
    step: int
    """Place of the token in its answer."""

    token: int
    engine_logp: float
    model_logp: float
    """-inf where the model's top-k, top-p or min-p excludes the token."""

    @property
    def difference(self) -> float:
        """Of the engine's logp to the model's; +inf outside the model's support."""
        return self.engine_logp - self.model_logp


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Which positions a comparison looked at, and which of the places where engines break."""

    max_length: int | None
    """Tokens of a prompt and its response together that the engine takes; None where it knows no limit."""

    landmarks: Mapping[str, int]
    """Lengths from which on the model or the engine works otherwise, by name."""

    spans: tuple[tuple[int, int], ...]
    """Of each response, its first position and one after its last."""

    repeated_prefix: int
    """Tokens of the prompt that was asked again."""

    crowd: int
    """Requests that were asked at once."""

    def times_passed(self, length: int) -> int:
        """How many times over the longest prompt passes `length`, at most twice; 0 where no response goes beyond it."""
        if max(end for _, end in self.spans) <= length:
            return 0
        return 2 if max(start for start, _ in self.spans) > 2 * length else 1

    def explain(self) -> str:
        """Say what was looked at, and what was not. For people."""
        furthest = max(end for _, end in self.spans)
        whole = "an unknown number" if self.max_length is None else f"{self.max_length:,}"
        said = [f"positions 0-{furthest:,} of {whole}"]
        said += [
            f"{name} {length:,} {('never passed', 'passed', 'passed twice')[self.times_passed(length)]}"
            for name, length in self.landmarks.items()
        ]
        said.append(f"a prompt of {self.repeated_prefix:,} tokens asked again")
        said.append(f"requests alone and among {self.crowd}")
        return "covered: " + "; ".join(said)


@final
@dataclass(frozen=True, kw_only=True)
class LogpAgreement:
    """How far the logp of rollouts is from that of a plain forward, in nats."""

    differences: tuple[TokenDifference, ...]
    """Every token compared: by prompt, sample and step."""

    coverage: Coverage | None = None
    """What was looked at; None where the caller chose the prompts."""

    @property
    def tokens(self) -> int:
        """Tokens that both admit; the figures below are over these."""
        return len(self._sizes)

    @cached_property
    def max_abs_difference(self) -> float:
        """The largest |d|; in float32 below 1e-4 where nothing is wrong."""
        return max(self._sizes)

    @cached_property
    def mean_abs_difference(self) -> float:
        """The mean of |d|."""
        return fmean(self._sizes)

    @cached_property
    def token_mult_prob_error(self) -> float:
        """The mean of exp|d|, 1 where both agree."""
        return fmean(math.exp(min(size, LARGEST_DIFFERENCE)) for size in self._sizes)

    @property
    def outside_support(self) -> int:
        """Tokens that the model's cuts exclude; left out of all the above.

        A few are rounding: a token on the edge of a cut falls on either side of it. Many are a fault.
        """
        return len(self.differences) - self.tokens

    def worst(self, count: int = 10) -> list[TokenDifference]:
        """Return the tokens with the largest |d|, those outside the model's support first."""
        return sorted(self.differences, key=lambda each: -abs(each.difference))[:count]

    def explain(self, count: int = 10) -> str:
        """Say how well both agree, and where least. For people."""
        summary = (
            f"{self.tokens} tokens compared: token_mult_prob_error {self.token_mult_prob_error:.6f}, "
            f"|difference| at most {self.max_abs_difference:.1e}, {self.mean_abs_difference:.1e} on average; "
            f"{self.outside_support} outside the model's support"
        )
        header = f"{'prompt':>6} {'sample':>6} {'step':>6} {'token':>8} {'engine':>11} {'model':>11} {'difference':>11}"
        rows = [
            f"{each.prompt_index:>6} {each.sample_index:>6} {each.step:>6} {each.token:>8} "
            f"{each.engine_logp:>11.6f} {each.model_logp:>11.6f} {each.difference:>11.2e}"
            for each in self.worst(count)
        ]
        covered = [] if self.coverage is None else [self.coverage.explain()]
        return "\n".join([summary, *covered, header, *rows])

    @cached_property
    def _sizes(self) -> list[float]:
        return [abs(each.difference) for each in self.differences if math.isfinite(each.model_logp)]


@final
class AgreementMonitor:
    """Asks for a comparison at the start of a run and every so many steps, and stops the run where it fails.

    Args:
        compare: Makes one, as `lambda: verify_logp(engine, model)`.
        every: Optimizer steps between two comparisons; 0 compares at the start alone.
        max_token_mult_prob_error: Above it a comparison fails.
    """

    def __init__(
        self, compare: Callable[[], LogpAgreement], *, every: int = 0, max_token_mult_prob_error: float = FAULT
    ) -> None:
        if every < 0:
            raise ValueError(f"every counts optimizer steps and is at least 0; got every={every}")
        if not max_token_mult_prob_error >= 1.0:
            raise ValueError(
                f"token_mult_prob_error is 1 where both agree; got "
                f"max_token_mult_prob_error={max_token_mult_prob_error}"
            )
        self._compare, self._every, self._limit = compare, every, max_token_mult_prob_error
        self._last: int | None = None

    def __call__(self, step: int) -> LogpAgreement | None:
        """Compare if `step` is the first one asked about, or `every` steps or more after the last comparison.

        Raises:
            AgreementError: They differ by more than the limit, or most tokens are outside the model's support.
        """
        if self._last is not None and (not self._every or step < self._last + self._every):
            return None
        self._last = step
        agreement = self._compare()
        if not agreement.token_mult_prob_error <= self._limit or agreement.outside_support > agreement.tokens:
            raise AgreementError(
                f"at step {step} the engine disagrees with its model: token_mult_prob_error is "
                f"{agreement.token_mult_prob_error:.4f}, above {self._limit}, or too many tokens are outside the "
                f"model's support. Look for weights that were not refitted, a lower precision, or another "
                f"temperature.\n{agreement.explain()}"
            )
        return agreement
