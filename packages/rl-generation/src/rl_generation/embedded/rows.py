"""One answer on its way, and how it becomes a Rollout. Knows no tensors: a row's place on the device is the batch's.

A row is one of the `n` answers of a request.
"""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

from rl_generation.bad_words import BadWords, banned_next, encode_bad_words
from rl_generation.errors import LogpError
from rl_generation.requests import Prompt, Request
from rl_generation.rollout import FinishReason, LogpOf, Rollout, RolloutTiming, VersionSpan
from rl_generation.sampling import Sampling
from rl_generation.stop_strings import StopStrings

__all__ = ["Profile", "Row", "Text", "make_rows", "make_texts"]


class Profile(NamedTuple):
    """What rows that are sampled alike have in common."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    stop_token_ids: tuple[int, ...]

    def sampling(self) -> Sampling:
        """The settings as a Sampling; how long it generates is not part of them."""
        return Sampling(
            max_new_tokens=1, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p
        )


@final
class Text:
    """What an answer must be read for, token by token."""

    def __init__(self, *, bad_words: BadWords, stop: StopStrings | None) -> None:
        self._bad_words, self._stop = bad_words, stop
        self._answer: list[int] = []

    @property
    def banned(self) -> list[int]:
        """Tokens that may not come next."""
        return banned_next(self._bad_words, self._answer)

    def push(self, token: int, *, is_stop_token: bool) -> str | None:
        """Take the next token; return the stop string that it completed."""
        self._answer.append(token)
        return None if self._stop is None or is_stop_token else self._stop.push(token)


@final
@dataclass(slots=True, kw_only=True, eq=False)
class Row:
    """One answer that waits or is being generated."""

    request_id: str
    request: Request
    sample_index: int
    seed: int
    profile: Profile
    text: Text | None
    """None where nothing needs to be read."""

    arrived_s: float = field(default_factory=time.monotonic)
    first_token_s: float | None = None
    spans: list[tuple[int, int]] = field(default_factory=list)
    """Version of the weights, and the first token that they made."""

    tokens: list[int] = field(default_factory=list)
    """What was generated before it gave up its place in the cache; of a row in a batch, the batch knows more."""

    logp: list[float] = field(default_factory=list)

    @property
    def prompt(self) -> Prompt:
        """Token ids."""
        return self.request.prompt

    @property
    def context(self) -> Prompt:
        """What must be in the cache before the next token."""
        return (*self.request.prompt, *self.tokens) if self.tokens else self.request.prompt

    @property
    def limit(self) -> int:
        """Tokens to generate at most."""
        return self.request.sampling.max_new_tokens

    @property
    def longest(self) -> int:
        """Tokens of prompt and answer together, at most."""
        return len(self.request.prompt) + self.limit

    def stamp(self) -> None:
        """Note when the first token came."""
        if self.first_token_s is None:
            self.first_token_s = time.monotonic()

    def mark_version(self, version: int, *, start: int) -> None:
        """From token `start` on, the weights are of `version`."""
        if self.spans and self.spans[-1][1] == start:
            self.spans.pop()
        if not self.spans or self.spans[-1][0] != version:
            self.spans.append((version, start))

    def rollout(
        self,
        tokens: Sequence[int],
        logp: Sequence[float],
        *,
        finish_reason: FinishReason,
        stop_reason: int | str | None,
        logp_of: LogpOf,
        version: int,
    ) -> Rollout:
        """Finish this answer; `version` is that of the weights now.

        Raises:
            LogpError: The last logp is not finite; no row goes on behind one that is not.
        """
        if logp and not math.isfinite(logp[-1]):
            step = len(tokens) - 1
            raise LogpError(
                f"prompt {self.request.prompt_index}: token {step} of its answer, id {tokens[step]}, has "
                f"logp={logp[step]} under weights of version {version}: the logits hold NaN or infinity; look for it "
                f"in the weights"
            )
        spans = self.spans or [(version, 0)]
        ends = [*(start for _, start in spans[1:]), len(tokens)]
        now = time.monotonic()
        timing = None
        if tokens and self.first_token_s is not None:
            timing = RolloutTiming(first_token_s=self.first_token_s - self.arrived_s, total_s=now - self.arrived_s)
        return Rollout(
            tokens=tuple(tokens),
            logp=tuple(logp),
            logp_of=logp_of,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            versions=tuple(
                VersionSpan(version=made_by, start=start, end=end)
                for (made_by, start), end in zip(spans, ends, strict=True)
                if end > start or len(spans) == 1
            ),
            timing=timing,
            prompt_index=self.request.prompt_index,
            sample_index=self.sample_index,
        )


def make_texts(request: Request, *, tokenizer: Any, vocab_size: int) -> list[Text | None]:
    """Return what each of the `n` answers of a request is read for; None where nothing is.

    Raises:
        PromptError: A bad word has no tokens, or tokens that the model does not have.
    """
    sampling = request.sampling
    if not (sampling.stop or sampling.bad_words):
        return [None] * sampling.n
    bad_words = encode_bad_words(sampling.bad_words, tokenizer, vocab_size=vocab_size)
    return [
        Text(
            bad_words=bad_words,
            stop=StopStrings(sampling.stop, tokenizer, request.prompt) if sampling.stop else None,
        )
        for _ in range(sampling.n)
    ]


def make_rows(
    request_id: str,
    request: Request,
    *,
    texts: Iterable[Text | None],
    seeds: Iterable[int],
    stop_token_ids: tuple[int, ...],
) -> list[Row]:
    """Return the `n` answers of a request, with a text and a seed each; `stop_token_ids` are the engine's own."""
    sampling = request.sampling
    stops = sampling.stop_token_ids if sampling.ignore_eos else stop_token_ids + sampling.stop_token_ids
    if sampling.greedy:
        profile = Profile(0.0, 0, 1.0, 0.0, stops)
    else:
        profile = Profile(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, stops)
    return [
        Row(request_id=request_id, request=request, sample_index=index, seed=seed, profile=profile, text=text)
        for index, (seed, text) in enumerate(zip(seeds, texts, strict=True))
    ]
