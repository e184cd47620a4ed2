"""What a few samples say of a model: pass@k, cons@k, and how sure one may be of a mean over prompts.

    pass@k = 1 - C(n - c, k) / C(n, k)            at least one of k passes, when c of n samples do
    cons@k = sum_j Pr(j wins) passed_j            the majority of k passes; a tie is shared equally

Both are exact means over all subsets of k of the n samples, hence unbiased for k fresh ones; the plain 1 - (1 - c/n)^k
is not. For cons@k, how often each of m answers stands in a random subset of k is m independent binomials (with
probability k / n each) given that they add up to k, so that one product of short polynomials sums over all subsets.

The interval is over prompts, the unit that is drawn anew in another evaluation: samples of one prompt are no more
independent than pupils of one class. Inside [0, 1] it is Wilson's, with as many draws as would give a coin of that mean
the measured standard error; so it stays inside, and has a width at 0 and at 1, where the standard error is 0.

References: Codex (arXiv:2107.03374, eq. 1), self-consistency (arXiv:2203.11171), Wilson (JASA 22, 1927), Korn and
Graubard (Survey Methodology 24, 1998: effective draws, and Student's quantile for few clusters), Miller
(arXiv:2411.00640: errors of evaluations, clustered).
"""

import functools
import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["Estimate", "majority_at_k", "pass_at_k"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over prompts, with its uncertainty."""

    mean: float
    """Each prompt counts the same, however many samples it has. NaN for no prompts."""

    standard_error: float
    """Of the mean, over prompts: std / sqrt(prompts). NaN for fewer than two."""

    low: float
    """Where the confidence interval begins. NaN for fewer than two prompts."""

    high: float
    """Where it ends."""

    num_prompts: int
    """How many prompts it rests on."""

    @classmethod
    def over_prompts(cls, values: Sequence[float], *, num_samples: int, confidence: float = 0.95) -> "Estimate":
        """The mean of one value a prompt, each made from that prompt's samples.

        Args:
            values: one number a prompt. If all lie in [0, 1] the interval is Wilson's, else it is symmetric, with
                Student's quantile.
            num_samples: of all prompts together: as many independent draws as there can be.
            confidence: how often, over evaluations, the interval should hold the mean over all prompts there might be.

        >>> Estimate.over_prompts([1.0, 0.0, 1.0, 1.0], num_samples=4).mean
        0.75
        """
        number = len(values)
        mean = fmean(values) if values else math.nan
        if number < 2:
            return cls(mean=mean, standard_error=math.nan, low=math.nan, high=math.nan, num_prompts=number)
        error = stdev(values) / math.sqrt(number)
        quantile = _student((1 + confidence) / 2, degrees=number - 1)
        if min(values) >= 0.0 and max(values) <= 1.0:
            draws = _effective_draws(mean, error=error, num_prompts=number, num_samples=num_samples)
            low, high = _wilson(mean, draws=draws, quantile=quantile)
        else:
            low, high = mean - quantile * error, mean + quantile * error
        return cls(mean=mean, standard_error=error, low=low, high=high, num_prompts=number)


def pass_at_k(num_samples: int, *, num_passed: int, k: int) -> float:
    """The probability that at least one of `k` samples passes, when `num_passed` of `num_samples` did.

    Raises:
        ValueError: `k` is not between 1 and `num_samples`, or more passed than there are.

    >>> round(pass_at_k(4, num_passed=1, k=2), 6)
    0.5
    """
    _check(k=k, num_samples=num_samples)
    if not 0 <= num_passed <= num_samples:
        raise ValueError(f"num_passed={num_passed} must be between 0 and num_samples={num_samples}")
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def majority_at_k(answers: Sequence[Hashable], *, passed: Sequence[bool], k: int) -> float:
    """The probability that the most frequent of `k` answers passes: exact over all subsets of `k`.

    Tied answers win equally often, and None is no vote: `k` samples without a single answer do not pass. Where samples
    of one answer pass and others of the same do not, it passes as often as they do.

    Raises:
        ValueError: `k` is not between 1 and the number of answers, or `passed` has another length.

    >>> majority_at_k(["3", "3", None, "4"], passed=[True, True, False, False], k=4)
    1.0
    """
    _check(k=k, num_samples=len(answers))
    if len(passed) != len(answers):
        raise ValueError(f"passed has {len(passed)} entries, and there are {len(answers)} answers")
    votes = Counter(answer for answer in answers if answer is not None)
    right = Counter(answer for answer, good in zip(answers, passed, strict=True) if good and answer is not None)
    shares = [(number, right[answer] / number) for answer, number in votes.items()]
    highest = max(votes.values(), default=0)
    most_votes = range(max(1, highest if k == len(answers) else 1), min(k, highest) + 1)
    won = math.fsum(_won_with(most, shares, num_samples=len(answers), k=k) for most in most_votes)
    # Rounding could lift a certain win a hair above 1.
    return min(1.0, won / _binomial(len(answers), rate=k / len(answers))[k])


def _won_with(most: int, shares: Sequence[tuple[int, float]], *, num_samples: int, k: int) -> float:
    """Probability that all samples in the subset are k, the winners have `most` votes each, and the subset passes.

    `shares` has each answer's votes, and the share of them that pass. Answers that cannot reach `most` votes neither
    win nor tie, and all of them with the abstentions are one binomial; so every product has at most votes / most terms.
    """
    level = [(number, share) for number, share in shares if number >= most]
    rate, others = k / num_samples, num_samples - sum(number for number, _ in level)
    # ways[0][s, t]: s samples placed so far, t answers with `most` of them; ways[1]: the same, times the t shares' sum.
    ways = torch.zeros(2, k + 1, min(len(level), k // most) + 1, dtype=torch.float64)
    held = torch.tensor(_binomial(others, rate=rate)[: k + 1], dtype=torch.float64)
    ways[0, : len(held), 0] = held
    for number, share in level:
        ways = _place(ways, _binomial(number, rate=rate), most=most, share=share)
    return float((ways[1, k, 1:] / torch.arange(1, ways.shape[2], dtype=torch.float64)).sum())


def _place(ways: Tensor, chance: Sequence[float], *, most: int, share: float) -> Tensor:
    """One more answer, that gets up to `most` samples by `chance`; with `most` it is one more that is level."""
    below = torch.tensor(chance[:most], dtype=torch.float64).flip(0)
    placed = pad(ways, (0, 0, most - 1, 0)).unfold(1, most, 1) @ below  # a convolution along s
    tied = chance[most] * ways[:, : ways.shape[1] - most, :-1]
    tied[1] += share * tied[0]
    placed[:, most:, 1:] += tied
    return placed


@functools.lru_cache(maxsize=1024)
def _binomial(number: int, *, rate: float) -> tuple[float, ...]:
    """Probability of each count from 0 to `number`. In logarithms: C(1100, 550) is beyond a float."""
    if rate == 1.0:
        return (0.0,) * number + (1.0,)
    log_odds, log_none = math.log(rate) - math.log1p(-rate), number * math.log1p(-rate)
    return tuple(math.exp(_log_comb(number, count) + count * log_odds + log_none) for count in range(number + 1))


def _log_comb(number: int, count: int) -> float:
    return math.log(math.comb(number, count))


def _effective_draws(mean: float, *, error: float, num_prompts: int, num_samples: int) -> float:
    variance = mean * (1 - mean)
    if (
        variance == 0.0
    ):  # all prompts alike at the edge: they may all be easy, so their samples say no more than they do
        return float(num_prompts)
    return min(variance / error**2, float(num_samples)) if error else float(num_samples)


def _wilson(mean: float, *, draws: float, quantile: float) -> tuple[float, float]:
    weight = quantile**2 / draws
    center = (mean + weight / 2) / (1 + weight)
    half = math.sqrt(weight * mean * (1 - mean) + weight**2 / 4) / (1 + weight)
    return max(0.0, center - half), min(1.0, center + half)


def _student(probability: float, *, degrees: int) -> float:
    """Student's quantile from the normal one, by Cornish and Fisher's expansion: to 1 % from 3 degrees on."""
    z = NormalDist().inv_cdf(probability)
    first = z * (z**2 + 1) / 4
    second = z * (5 * z**4 + 16 * z**2 + 3) / 96
    third = z * (3 * z**6 + 19 * z**4 + 17 * z**2 - 15) / 384
    return z + (first + (second + third / degrees) / degrees) / degrees


def _check(*, k: int, num_samples: int) -> None:
    if not 1 <= k <= num_samples:
        raise ValueError(
            f"k={k} must be between 1 and the {num_samples} samples that there are: sample more, or ask less"
        )
