"""The responses that the embedded engine works on, and how their next tokens are drawn.

A `Row` is one of the `n` responses to a prompt; it holds all that is known of it, on the host. A `Draw` draws a token
for each of some rows from the logits of a forward. A `Runner` keeps the rows that wait and those that are under way;
how it runs the model is up to `ContinuousBatching` and `WholeBatches`.

Axes: N rows, V vocabulary.
"""

import math
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from rl_generation.constraints import Constraints
from rl_generation.distribution import SamplingTensors, choose, raw_logp, sampled_logits, uniforms
from rl_generation.engine import RolloutDelta
from rl_generation.errors import LogpError
from rl_generation.requests import Prompt, Request
from rl_generation.rollout import FinishReason, LogpOf, Rollout, VersionSpan

# Random numbers are computed for so many steps at once: it costs as much as for one.
STEPS_AHEAD = 16


@dataclass(slots=True, kw_only=True, eq=False)
class Row:
    """One answer that waits or is being generated."""

    owner: object
    """Who wants the answer: what `abort` calls it by, and its news go to."""

    request: Request
    sample_index: int
    seed: int
    stop_token_ids: frozenset[int]
    constraints: Constraints | None
    """None where logits are taken as they are, and nothing is searched for."""

    slot: int = -1
    """Its place in the cache, while it is in the batch."""

    stale: bool = False
    """Whether weights before the present ones have made some of what the cache holds of it."""

    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    top_logp: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    """Of all tokens so far, where the request asks for it."""

    told: int = 0
    """How many of its tokens were news."""

    version: int = 0
    """Of the weights that make its next token, while it is in the batch."""

    versions: list[int] = field(default_factory=list)
    """Of the weights that made each token."""

    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    arrived_s: float = field(default_factory=time.monotonic)

    @property
    def context(self) -> Prompt:
        """What must be in the cache before the next token."""
        return (*self.request.prompt, *self.tokens) if self.tokens else self.request.prompt

    @property
    def position(self) -> int:
        """Where its last token stands."""
        return len(self.request.prompt) + len(self.tokens) - 1

    @property
    def last_token(self) -> int:
        """Of its answer, or else of its prompt."""
        return self.tokens[-1] if self.tokens else self.request.prompt[-1]

    def take(self, token: int, logp: float) -> bool:
        """Take the next token; return whether it is the last: of a stop, at the limit, or from broken logits."""
        self.tokens.append(token)
        self.logp.append(logp)
        self.versions.append(self.version)
        stopped = token in self.stop_token_ids
        string = None if self.constraints is None else self.constraints.push(token, is_stop_token=stopped)
        if stopped or string is not None:
            self.finish_reason, self.stop_reason = "stop", token if stopped else string
        elif len(self.tokens) >= self.request.sampling.max_new_tokens or not math.isfinite(logp):
            self.finish_reason = "length"
        return self.finish_reason is not None

    def news(self, *, logp_of: LogpOf, version: int) -> "News":
        """What has become of it since the last time; `version` is that of the weights now."""
        tokens, logp = tuple(self.tokens), tuple(self.logp)
        if logp and not math.isfinite(logp[-1]):
            step = len(tokens) - 1
            return self, LogpError(
                f"prompt {self.request.prompt_index}: token {step} of its answer, id {tokens[step]}, has "
                f"logp={logp[step]} under weights of version {version}: the logits hold NaN or infinity; look for it "
                f"in the weights"
            )
        rollout = None
        if self.finish_reason is not None:
            made_by = self.versions
            starts = [step for step in range(len(tokens)) if step == 0 or made_by[step] != made_by[step - 1]]
            spans = [
                VersionSpan(version=made_by[start], start=start, end=end)
                for start, end in pairwise([*starts, len(tokens)])
            ]
            rollout = Rollout(
                tokens=tokens,
                logp=logp,
                logp_of=logp_of,
                finish_reason=self.finish_reason,
                stop_reason=self.stop_reason,
                versions=tuple(spans) or (VersionSpan(version=version, start=0, end=0),),
                top_logp=tuple(self.top_logp),
                prompt_index=self.request.prompt_index,
                sample_index=self.sample_index,
            )
        told, self.told = self.told, len(tokens)
        return self, RolloutDelta(
            sample_index=self.sample_index,
            tokens=tokens[told:],
            logp=logp[told:],
            top_logp=tuple(self.top_logp[told:]),
            rollout=rollout,
        )


News = tuple[Row, RolloutDelta | LogpError]
"""What has become of a row: its new tokens, and the rollout once it has ended; or why there is none, where its logits
were not finite. Other rows are not touched by that."""


class Draw:
    """Draws for the same rows again and again, each by its place in the logits.

    One that ends may be replaced by None in `rows`, and is left out from then on.
    """

    def __init__(self, rows: list[Row | None], *, vocab_size: int, device: torch.device, logp_of: LogpOf) -> None:
        self.rows = rows
        self._vocab_size, self._device, self._logp_of = vocab_size, device, logp_of
        present = [row for row in rows if row is not None]
        settings = [(row or present[0]).request.sampling for row in rows]
        self._sampling = SamplingTensors.of(settings, vocab_size=vocab_size, device=device)
        self._constrained = any(row.request.sampling.constrained for row in present)
        self._asking = [place for place, each in enumerate(settings) if each.top_logp]
        self._chances: list[Tensor] = []

    def __call__(self, logits: Float[Tensor, "N V"]) -> list[Row]:
        """Draw the next token of each row, and have the row take it; return the rows that have ended."""
        present = [(place, row) for place, row in enumerate(self.rows) if row is not None]
        allowed = logits
        if self._constrained:
            # What rows exclude or penalise is done to a copy, in float32: a bias in bfloat16 would be rounded.
            allowed = logits.float().clone()
            for place, row in present:
                if row.constraints is not None and row.request.sampling.constrained:
                    allowed[place] = row.constraints.adjust(logits[place])
        if not self._chances:
            # One uniform number a row decides its token. Those without a row have any.
            counts = torch.tensor([len(row.tokens) if row else 0 for row in self.rows], device=self._device)
            seeds = torch.tensor([row.seed if row else 0 for row in self.rows], device=self._device)
            steps = counts + torch.arange(STEPS_AHEAD, device=self._device)[:, None]
            self._chances = list(uniforms(seeds.expand_as(steps), steps).flip(0).unbind())
        tokens, logp = choose(allowed, self._chances.pop(), self._sampling)
        if self._logp_of == "raw":
            logp = raw_logp(logits, tokens)
        if self._asking:
            self._report_top(logits if self._logp_of == "raw" else allowed)
        drawn, values = tokens.tolist(), logp.tolist()
        return [row for place, row in present if row.take(drawn[place], values[place])]

    def _report_top(self, logits: Float[Tensor, "N V"]) -> None:
        """Note the likeliest tokens of the rows that report them; tokens that could not be drawn are left out."""
        asking = [(place, row) for place in self._asking if (row := self.rows[place]) is not None]
        if not asking:
            return
        asked = [row.request.sampling for _, row in asking]
        chosen = logits[[place for place, _ in asking]].float()
        if self._logp_of == "sampled":
            chosen = sampled_logits(chosen, SamplingTensors.of(asked, vocab_size=self._vocab_size, device=self._device))
        best = chosen.log_softmax(-1).topk(min(self._vocab_size, max(each.top_logp for each in asked)))
        for (_, row), tokens, values in zip(asking, best.indices.tolist(), best.values.tolist(), strict=True):
            pairs = list(zip(tokens, values, strict=True))[: row.request.sampling.top_logp]
            row.top_logp.append(tuple((token, value) for token, value in pairs if math.isfinite(value)))


class Runner(ABC):
    """A way to generate, for one thread at a time."""

    max_cache_tokens: int | None = None
    """Tokens that the cache holds at most; None where there is no bound."""

    def __init__(self, *, max_batch_size: int, vocab_size: int, device: torch.device, logp_of: LogpOf) -> None:
        self.counters = Counter(prompt_tokens=0, cached_prompt_tokens=0, generated_tokens=0, preemptions=0)
        """Since the engine was made; see `EngineMetrics`."""
        self.waiting: deque[Row] = deque()
        self.slots: list[Row | None] = []
        """Rows under way; None where one has ended."""
        self._max_batch_size, self._version = max_batch_size, 0
        self._vocab_size, self._device, self._logp_of = vocab_size, device, logp_of

    @abstractmethod
    def advance(self, *, stream: bool) -> list[News]:
        """Generate some more; return who has ended, and with `stream` every new token."""

    @abstractmethod
    def explain(self) -> list[str]:
        """How it generates, in lines for people."""

    @property
    def running(self) -> list[Row]:
        """Answers being generated."""
        return [row for row in self.slots if row is not None]

    @property
    def cache_usage(self) -> float:
        """Tokens in the cache, as a share of `max_cache_tokens`; 0 where there is no bound."""
        return (
            0.0 if self.max_cache_tokens is None else sum(row.position for row in self.running) / self.max_cache_tokens
        )

    def add(self, rows: Sequence[Row]) -> None:
        """Take answers in; they start in this order."""
        self.waiting.extend(rows)

    def abort(self, owner: object) -> list[News]:
        """Take the answers that somebody wanted out, as they are."""
        aborted = [row for row in (*self.running, *self.waiting) if row.owner == owner]
        self.waiting = deque(row for row in self.waiting if row.owner != owner)
        self.slots[:] = [None if row is not None and row.owner == owner else row for row in self.slots]
        for row in aborted:
            row.finish_reason = "abort"
        return self._news(aborted)

    def commit_version(self, version: int) -> None:
        """From here on, tokens are made by the weights of `version`."""
        self._version = version
        for row in self.running:
            row.version, row.stale = version, True

    def clear(self) -> None:
        """Forget all answers, and give the cache back."""
        self.waiting.clear()
        self.slots.clear()

    def _news(self, rows: Sequence[Row]) -> list[News]:
        return [row.news(logp_of=self._logp_of, version=self._version) for row in rows]

    def _draw(self, rows: list[Row | None]) -> Draw:
        return Draw(rows, vocab_size=self._vocab_size, device=self._device, logp_of=self._logp_of)
