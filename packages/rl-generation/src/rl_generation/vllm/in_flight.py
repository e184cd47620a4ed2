"""Which answers vLLM is working on, whose they are, and what has come of those that are handed out step by step."""

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, final

from rl_generation.engine import RolloutDelta
from rl_generation.requests import Request
from rl_generation.rollout import FinishReason, LogpOf, Rollout, VersionSpan
from rl_generation.submitting import Call
from rl_generation.vllm.outputs import logp_of_tokens, rollout_of, timing_of, version_of

__all__ = ["Answer", "StreamedAnswer", "Streams"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One of the answers of a call to `generate`, or the one to a submitted request."""

    request: Request
    sample_index: int
    owner: "Call | Future[Rollout]"
    """Who gets it."""
    version: int
    """Of the weights when it was begun."""

    def rollout(self, output: Any, *, logp_of: LogpOf) -> Rollout:
        """Return what a finished `vllm.RequestOutput` holds."""
        (completion,) = output.outputs
        return rollout_of(
            completion,
            prompt_index=self.request.prompt_index,
            sample_index=self.sample_index,
            logp_of=logp_of,
            version=self.version,
            timing=timing_of(output.metrics),
        )


@final
@dataclass(slots=True)
class StreamedAnswer:
    """One of the answers to a request that `add_request` took in."""

    request_id: str
    """The caller's."""

    internal_id: str
    """vLLM's."""

    _: KW_ONLY
    request: Request
    sample_index: int
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)

    def delta(self, output: Any, *, logp_of: LogpOf, version: int) -> RolloutDelta:
        """Take the next tokens from a `vllm.RequestOutput`, and return them."""
        (completion,) = output.outputs
        place = {"prompt_index": self.request.prompt_index, "sample_index": self.sample_index}
        tokens = tuple(completion.token_ids)
        logp = logp_of_tokens(tokens, completion.logprobs, **place, start=len(self.tokens))
        self.tokens += tokens
        self.logp += logp
        rollout = None
        if output.finished:
            rollout = rollout_of(
                completion,
                **place,
                logp_of=logp_of,
                version=version,
                timing=timing_of(output.metrics),
                tokens=self.tokens,
                logp=self.logp,
            )
        return RolloutDelta(sample_index=self.sample_index, tokens=tokens, logp=logp, rollout=rollout)

    def aborted(self, state: Any, *, logp_of: LogpOf, version: int) -> RolloutDelta:
        """Return the end of an answer that is cut off now, whose vLLM `RequestState` is `state`."""
        reason: FinishReason = "abort"
        rollout = Rollout(
            tokens=tuple(self.tokens),
            logp=tuple(self.logp),
            logp_of=logp_of,
            finish_reason=reason,
            stop_reason=None,
            versions=_spans(state.weight_version_starts, length=len(self.tokens), version=version),
            timing=timing_of(state.stats) if self.tokens else None,
            prompt_index=self.request.prompt_index,
            sample_index=self.sample_index,
        )
        return RolloutDelta(sample_index=self.sample_index, tokens=(), logp=(), rollout=rollout)


@final
class Streams:
    """The answers that are handed out step by step, under the numbers by which vLLM knows them."""

    def __init__(self) -> None:
        self._answers: dict[str, StreamedAnswer] = {}
        self._deltas: deque[tuple[str, RolloutDelta]] = deque()

    @property
    def running(self) -> bool:
        """Whether vLLM has some of them to work on."""
        return bool(self._answers)

    @property
    def waiting(self) -> bool:
        """Whether there are deltas that nobody has taken."""
        return bool(self._deltas)

    def holds(self, request_id: str) -> bool:
        """Whether an answer to this request is under way."""
        return any(answer.request_id == request_id for answer in self._answers.values())

    def add(self, number: str, answer: StreamedAnswer) -> None:
        """Expect outputs for `number`."""
        self._answers[number] = answer

    def take(self, output: Any, *, logp_of: LogpOf, version: int) -> bool:
        """Keep the tokens of a `vllm.RequestOutput`; False where it belongs to none of them."""
        answer = self._answers.get(output.request_id)
        if answer is None:
            return False
        delta = answer.delta(output, logp_of=logp_of, version=version)
        self._deltas.append((answer.request_id, delta))
        if delta.rollout is not None:
            del self._answers[output.request_id]
        return True

    def abort(self, request_id: str, states: Mapping[str, Any], *, logp_of: LogpOf, version: int) -> list[str]:
        """End the answers to a request, whose vLLM `RequestState` are in `states`; return their numbers."""
        ended = [number for number, each in self._answers.items() if each.request_id == request_id]
        for number in ended:
            answer = self._answers.pop(number)
            delta = answer.aborted(states[answer.internal_id], logp_of=logp_of, version=version)
            self._deltas.append((request_id, delta))
        return ended

    def drop(self) -> list[str]:
        """Forget everything; return the numbers of what was under way."""
        numbers = list(self._answers)
        self._answers.clear()
        self._deltas.clear()
        return numbers

    def deltas(self) -> list[tuple[str, RolloutDelta]]:
        """Hand out what has come."""
        deltas = list(self._deltas)
        self._deltas.clear()
        return deltas


def _spans(starts: list[tuple[str, int]], *, length: int, version: int) -> tuple[VersionSpan, ...]:
    begun = [(label, start) for label, start in starts if start < length]
    ends = [start for _, start in begun[1:]] + [length]
    if not begun:
        return (VersionSpan(version=version, start=0, end=length),)
    return tuple(
        VersionSpan(version=version_of(label), start=start, end=end)
        for (label, start), end in zip(begun, ends, strict=True)
    )
