"""What an engine and an environment may return: every wrong thing is refused by name. Knows no tensors.

An answer that lost a log-probability or a reward that is NaN would train as if nothing were wrong.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, SupportsFloat, runtime_checkable

from rl_algorithms.contracts import EnvironmentReturn, Rollout

__all__ = ["Tally", "check_return", "check_rollout"]

ROUNDING = 1e-3
"""How far above 0 a log-probability may be: a log-softmax in low precision gives a little."""


@runtime_checkable
class Asked(Protocol):
    """Whose answer it is. Its names are made for a message alone: a batch has hundreds."""

    @property
    def where(self) -> str: ...

    def __str__(self) -> str: ...


def check_rollout(rollout: Rollout, *, of: Asked) -> None:
    """Refuse an answer without tokens, or whose log-probabilities or versions do not fit its tokens.

    Raises:
        ValueError: it names the rollout, and the token where it is one.
    """
    if not rollout.tokens or len(rollout.logp) != len(rollout.tokens):
        raise ValueError(
            f"{of} has {len(rollout.tokens)} tokens and {len(rollout.logp)} log-probabilities ({of.where}); "
            f"each sampled token needs one, and an answer has at least its stop token"
        )
    wrong = [index for index, logp in enumerate(rollout.logp) if not _is_logp(logp)]
    if wrong:
        logp, token = rollout.logp[wrong[0]], rollout.tokens[wrong[0]]
        raise ValueError(
            f"{of} has a log-probability that {'is above 0' if _finite(logp) else 'is not finite'} ({of.where}): "
            f"{logp!r} of token {wrong[0]} of {len(rollout.tokens)}, which has the id {token}; the engine must give "
            f"the logarithm of the probability with which it sampled each token"
        )
    place = 0
    for span in rollout.versions:
        if span.start != place or span.end <= span.start or span.version < 0:
            break
        place = span.end
    if place != len(rollout.tokens):
        spans = [(span.start, span.end, span.version) for span in rollout.versions]
        raise ValueError(
            f"{of} has the versions (start, end, version) {spans} for its {len(rollout.tokens)} tokens ({of.where}); "
            f"the spans must cover them in order and without gaps, and a version is 0 or more"
        )


def check_return(judged: EnvironmentReturn, *, of: Asked) -> None:
    """Refuse a judgement with a number that is none, or with observations that are no messages.

    One that failed says nothing, and is not looked at further.

    Raises:
        ValueError: it names the rollout.
    """
    if judged.failed is not None:
        if not isinstance(judged.failed, str):
            raise ValueError(f"the environment must say why {of} failed, as text ({of.where}); found {judged.failed!r}")
        return
    for what, value in {
        "reward": judged.reward,
        **{f"rewards[{part!r}]": number for part, number in judged.rewards.items()},
        **{f"metrics[{part!r}]": number for part, number in judged.metrics.items()},
    }.items():
        if not _finite(value):
            raise ValueError(
                f"the environment gave {of} the {what} {value!r}, which is not a finite number ({of.where}); "
                f"where an answer cannot be judged, say why in `failed`"
            )
    said: object = judged.observations
    if not isinstance(said, Sequence) or isinstance(said, str) or not all(map(_is_message, said)):
        raise ValueError(
            f"the environment gave {of} the observations {said!r:.80} ({of.where}); they are a sequence of messages, "
            f"as ({{'role': 'user', 'content': '...'}},)"
        )


class Tally:
    """The environment's numbers over a batch: that all judgements name the same parts, and the means for the log."""

    def __init__(self) -> None:
        self.component_names: tuple[str, ...] | None = None
        self._sums: dict[str, tuple[float, int]] = {}

    def count(self, judged: EnvironmentReturn, *, of: Asked) -> None:
        """Take one judgement in.

        Raises:
            ValueError: it names other parts of the reward than those before it.
        """
        if judged.failed is not None:
            return
        if self.component_names is None:
            self.component_names = tuple(judged.rewards)
        if {*judged.rewards} != {*self.component_names}:
            raise ValueError(
                f"the environment gave {of} ({of.where}) rewards called {sorted(judged.rewards)}, and those before it "
                f"{sorted(self.component_names)}; every judgement names the same parts, with 0 for what does not apply"
            )
        for metric, value in judged.metrics.items():
            total, number = self._sums.get(metric, (0.0, 0))
            self._sums[metric] = (total + float(value), number + 1)

    def means(self) -> Mapping[str, float]:
        """Each metric, averaged over the judgements that gave it."""
        return {metric: total / number for metric, (total, number) in self._sums.items()}


def _is_logp(value: Any) -> bool:
    try:
        return bool(-math.inf < value <= ROUNDING)
    except TypeError:  # None, say
        return False


def _is_message(said: object) -> bool:
    return isinstance(said, Mapping) and isinstance(said.get("role"), str)


def _finite(value: object) -> bool:
    if type(value) is float:  # nearly always; asking for a protocol takes ten times as long
        return math.isfinite(value)
    try:
        return isinstance(value, SupportsFloat) and math.isfinite(float(value))
    except (ValueError, TypeError, RuntimeError, OverflowError):  # a tensor of several elements, 10**400
        return False
