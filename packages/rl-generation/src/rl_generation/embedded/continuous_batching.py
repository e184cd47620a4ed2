"""Continuous batching in the embedded engine: rows enter and leave slots, one forward pass per generated token.

A `Row` is one of the `n` responses to a prompt. The `Batch` holds the rows being generated, their state as tensors and
what they have generated so far; it draws a token for each and finds those that have ended. `ContinuousBatching` decides
which rows enter, keeps the key/value cache in step, and runs the forwards.

Slots 0 to N - 1 hold rows; a slot whose row has finished holds None until it is filled or closed, and its row stands
still in the meantime. Each call of `advance` is one forward: either over the prompts of rows that entered, or over a
token of every row. Finished rows leave holes, which are filled by waiting rows, or closed, once they are an eighth of
the batch: to move a row costs about as much as one more decoding step. Responses to the same prompt share one prefill:
if they enter together, it runs once; a row that enters later copies it from a row that is still there.

The cache is a rectangle, slots times columns. It grows with what rows hold, not with what they may come to hold, and
never beyond `max_cache_tokens`: the newest rows give up their place first, and later start again from what they had.

Axes: N rows, m of them, V vocabulary.
"""

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rl_generation.constraints import Constraints
from rl_generation.distribution import SamplingTensors, choose, exact_dtype, raw_logp, sampled_logits, uniforms
from rl_generation.embedded.slot_model import SlotModel
from rl_generation.engine import RolloutDelta
from rl_generation.errors import LogpError
from rl_generation.requests import Prompt, Request, Sampling
from rl_generation.rollout import FinishReason, LogpOf, Rollout, VersionSpan

__all__ = ["Batch", "ContinuousBatching", "Counters", "News", "Profile", "Row"]

# Fields of the state: the last token, where it stands, tokens generated, how many at most, seed, row of the buffers.
TOKEN, POSITION, GENERATED, LIMIT, SEED, BUFFER = range(6)
# Random numbers are computed for so many steps at once: it costs as much as for one.
STEPS_AHEAD = 16
REPLACE_AT_FRACTION = 0.125
# Up to so many, the arithmetic of a step costs less than its calls.
FEW_ROWS = 32
# The cache grows by at least so many columns: to grow is to copy it.
COLUMNS_STEP = 32
# Of one forward over prompts, unless one alone has more: bounds the memory of activations, and of logits (elements).
MAX_PREFILL_TOKENS = 16_384
MAX_PREFILL_LOGITS = 1 << 26


def rounded_shape(num_rows: int, columns: int) -> tuple[int, int]:
    """How many rows and columns are decoded instead, so that forwards have few shapes, each of which is recorded.

    A shape costs a few slow steps. Rows and columns more cost arithmetic, an eighth more at most of many; of few, it is
    little beside what every step costs, and shapes are coarser.

    >>> [rounded_shape(rows, 40)[0] for rows in (1, 2, 3, 5, 9, 33, 100, 256)]
    [1, 2, 4, 8, 16, 40, 104, 256]
    >>> rounded_shape(8, 33), rounded_shape(256, 33), rounded_shape(256, 1000)
    ((8, 64), (256, 48), (256, 1024))
    """

    def rounded(number: int, *, finest: int) -> int:
        step = max(finest, 1 << max(0, (number - 1).bit_length() - 4))
        return -(-number // step) * step

    rows = rounded(num_rows, finest=8) if num_rows > 4 else 1 << max(0, num_rows - 1).bit_length()
    return rows, rounded(columns, finest=16 if rows > FEW_ROWS else 32)


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
@dataclass(slots=True, kw_only=True, eq=False)
class Row:
    """One answer that waits or is being generated."""

    owner: object
    """Who wants the answer: what `abort` calls it by, and its news go to."""

    request: Request
    sample_index: int
    seed: int
    profile: Profile
    constraints: Constraints | None
    """None where logits are taken as they are, and nothing is searched for."""

    context: Prompt
    """What must be in the cache before the next token: the prompt, and `tokens`."""

    arrived_s: float = field(default_factory=time.monotonic)
    spans: list[tuple[int, int]] = field(default_factory=list)
    """Version of the weights, and the first token that they made."""

    tokens: list[int] = field(default_factory=list)
    """What was generated before it gave up its place in the cache; for a row in the batch, the batch knows more."""

    logp: list[float] = field(default_factory=list)

    top_logp: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    """Of all tokens so far, where the request asks for it; it stays here while the row is in the batch."""

    finish_reason: FinishReason = "abort"
    """Why it left the batch, and by which stop token or string."""

    stop_reason: int | str | None = None

    def mark_version(self, version: int, *, start: int) -> None:
        """From token `start` on, the weights are of `version`."""
        if self.spans and self.spans[-1][1] == start:
            self.spans.pop()
        if not self.spans or self.spans[-1][0] != version:
            self.spans.append((version, start))

    def ended(self, *, logp_of: LogpOf, version: int) -> "News":
        """Make the rollout, or the error where the last logp is not finite, after which no row goes on.

        `version` is that of the weights now.
        """
        tokens, logp = self.tokens, self.logp
        if logp and not math.isfinite(logp[-1]):
            step = len(tokens) - 1
            return self, LogpError(
                f"prompt {self.request.prompt_index}: token {step} of its answer, id {tokens[step]}, has "
                f"logp={logp[step]} under weights of version {version}: the logits hold NaN or infinity; look for it "
                f"in the weights"
            )
        spans = self.spans or [(version, 0)]
        ends = [*(start for _, start in spans[1:]), len(tokens)]
        rollout = Rollout(
            tokens=tuple(tokens),
            logp=tuple(logp),
            logp_of=logp_of,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            versions=tuple(
                VersionSpan(version=made_by, start=start, end=end)
                for (made_by, start), end in zip(spans, ends, strict=True)
                if end > start or len(spans) == 1
            ),
            top_logp=tuple(self.top_logp),
            prompt_index=self.request.prompt_index,
            sample_index=self.sample_index,
        )
        return self, RolloutDelta(sample_index=self.sample_index, tokens=(), logp=(), rollout=rollout)


News = tuple[Row, RolloutDelta | LogpError]
"""What has become of a row: new tokens where they were asked for, and the rollout once it has ended; or why there is
none, where its logits were not finite. Other rows are not touched by that."""


@final
@dataclass(slots=True)
class Counters:
    """What has happened since the engine was made; see `EngineMetrics`."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0


@final
@dataclass(frozen=True, slots=True)
class _Settings:
    """How each of m rows is sampled, and the tokens that end it."""

    sampling: SamplingTensors
    stops: Int[Tensor, "m stops"]

    def of(self, index: Int[Tensor, " k"]) -> "_Settings":
        """Return those of `index`, which may repeat."""
        columns = {name: getattr(self.sampling, name) for name in ("greedy", "temperature", "min_p", "top_k", "top_p")}
        chosen: dict[str, Any] = {name: None if column is None else column[index] for name, column in columns.items()}
        return _Settings(replace(self.sampling, **chosen), self.stops[index])


@final
class Batch:
    """Up to `capacity` rows under way."""

    def __init__(self, *, capacity: int, vocab_size: int, device: torch.device, logp_of: LogpOf) -> None:
        self.capacity = capacity
        self.rows: list[Row | None] = []
        self.columns = 0
        """Columns of the cache that hold every row with the token to come."""
        self._vocab_size, self._device, self._logp_of = vocab_size, device, logp_of
        self._state = torch.zeros(6, capacity, dtype=torch.int64, device=device)
        self._alive = torch.ones(capacity, dtype=torch.bool, device=device)
        # One row more, where those that stand still write.
        self._tokens = torch.zeros(capacity + 1, 0, dtype=torch.int64, device=device)
        self._logp = torch.zeros(capacity + 1, 0, dtype=exact_dtype(device), device=device)
        self._buffers = list(range(capacity))
        self._profiles: dict[Profile, int] = {}
        self._settings: _Settings | None = None
        self._constrained = self._reports_top = False
        self._ahead: list[Tensor] = []
        self.num_alive = 0
        # Views of the state, as of the last `settle`: its fields over all slots, and what a step adds to.
        self._fields = self._state[:, :0].unbind()
        self._advancing = self._state[POSITION : GENERATED + 1, :0]
        self._inputs = (self._state[TOKEN, :0], self._state[POSITION, :0])
        # So many steps at least until a row reaches its limit.
        self._until_limit = 0

    def inputs(self, num_rows: int) -> tuple[Int[Tensor, " rows"], Int[Tensor, " rows"]]:
        """The last token of the first slots, and its position: views of the state. Empty slots are at position 0."""
        if len(self._inputs[0]) != num_rows:
            self._inputs = (self._state[TOKEN, :num_rows], self._state[POSITION, :num_rows])
        return self._inputs

    def num_generated(self) -> list[int]:
        """Tokens of each slot's answer so far."""
        generated: list[int] = self._state[GENERATED, : len(self.rows)].tolist()
        return generated

    def num_cached(self) -> int:
        """Tokens in the cache, of all rows together."""
        return int((self._state[POSITION, : len(self.rows)] * self._alive[: len(self.rows)]).sum())

    # -- who is in it

    def place(self, rows: Sequence[Row], slots: Sequence[int]) -> None:
        """Put rows into slots: holes, or those behind the last. The next token fed to each is its context's last."""
        generated = max([len(row.tokens) for row in rows])
        if generated >= self._tokens.shape[1]:
            self._lengthen(generated)
        self.rows += [None] * (max(slots) + 1 - len(self.rows))
        fields = []
        for row, slot in zip(rows, slots, strict=True):
            self.rows[slot] = row
            context, limit, buffer = row.context, row.request.sampling.max_new_tokens, self._buffers.pop()
            fields.append([context[-1], len(context) - 1, len(row.tokens), limit, row.seed, buffer])
            if row.tokens:
                self._tokens[buffer, : len(row.tokens)] = torch.tensor(row.tokens)
                self._logp[buffer, : len(row.tokens)] = torch.tensor(row.logp, dtype=self._logp.dtype)
        index = torch.tensor(slots, device=self._device)
        self._state[:, index] = torch.tensor(fields, device=self._device).T
        self._alive[index] = True
        self.num_alive += len(rows)

    def close_holes(self) -> tuple[Int[Tensor, " moved"], Int[Tensor, " moved"]]:
        """Move the last rows into the holes; return to which slots and from which, for the cache to follow."""
        kept = self.num_alive
        to = [slot for slot, row in enumerate(self.rows[:kept]) if row is None]
        source = [slot for slot, row in enumerate(self.rows) if slot >= kept and row is not None]
        for hole, slot in zip(to, source, strict=True):
            self.rows[hole] = self.rows[slot]
        moves = torch.tensor([to, source], dtype=torch.int64, device=self._device)
        self._state[:, moves[0]] = self._state[:, moves[1]]
        self._state[POSITION, kept:] = 0
        del self.rows[kept:]
        self._alive[:kept] = True
        return moves[0], moves[1]

    def settle(self) -> None:
        """Look up the settings of all rows again, after rows have entered, left or moved."""
        self._ahead = []
        if not self.rows:
            self._constrained = self._reports_top = False
            return
        state = self._state[:, : len(self.rows)]
        self._fields, self._advancing = state.unbind(), state[POSITION : GENERATED + 1]
        alive = self._alive[: len(self.rows)]
        until = torch.where(alive, state[LIMIT] - state[GENERATED], state[LIMIT].max())
        self.columns, self._until_limit = int(state[POSITION].max()) + 1, int(until.min())
        self._constrained = any(row is not None and row.constraints is not None for row in self.rows)
        self._reports_top = any(row is not None and row.request.sampling.top_logp for row in self.rows)
        profiles: dict[Profile, int] = {}
        default = next(row for row in self.rows if row is not None).profile
        index = [profiles.setdefault((row.profile if row else default), len(profiles)) for row in self.rows]
        if profiles != self._profiles:
            self._profiles, self._table = profiles, self._tabulate(list(profiles))
        self._settings = self._table.of(torch.tensor(index, device=self._device))

    def drop(self, slots: Sequence[int]) -> list[Row]:
        """Take rows out before their time."""
        return self._end(slots, ["abort"] * len(slots), [None] * len(slots))

    def clear(self) -> None:
        """Forget every row."""
        self.rows, self.num_alive, self.columns = [], 0, 0
        self._state[POSITION] = 0
        self._buffers = list(range(self.capacity))
        self._tokens, self._logp = self._tokens[:, :0].clone(), self._logp[:, :0].clone()

    # -- a token for each row

    def draw(
        self, logits: Float[Tensor, "m V"], slots: list[int] | None
    ) -> tuple[Int[Tensor, " m"], Float[Tensor, " m"], list[Row]]:
        """Draw the next token of `slots` (all where None) from `logits`; return them, their logp, and who has ended.

        A row ends with a stop token, with a stop string, at its limit, or because its logits are not finite.
        """
        assert self._settings is not None
        if slots is None:
            fields, settings = self._fields, self._settings
        else:
            index = torch.tensor(slots, device=self._device)
            fields, settings = self._state[:, index].unbind(), self._settings.of(index)

        # Rows with constraints, by their place in `logits`: what they exclude or penalise is done to a copy.
        rows = self.rows if slots is None else [self.rows[slot] for slot in slots]
        constraints: dict[int, Constraints] = {}
        allowed = logits
        if self._constrained:
            constraints = {place: row.constraints for place, row in enumerate(rows) if row and row.constraints}
            changed = {place: each for place, each in constraints.items() if each.changes_logits}
            allowed = logits.float().clone() if changed else logits  # a bias in bfloat16 would be rounded
            for place, each in changed.items():
                allowed[place] = each.adjust(logits[place])

        # One uniform number a row decides its token.
        if slots is not None:
            chances = uniforms(fields[SEED], fields[GENERATED])
        else:
            if not self._ahead:
                steps = fields[GENERATED] + torch.arange(STEPS_AHEAD, device=self._device)[:, None]
                self._ahead = list(uniforms(fields[SEED].expand_as(steps), steps).flip(0).unbind())
            chances = self._ahead.pop()
        tokens, logp = choose(allowed, chances, settings.sampling)
        if self._logp_of == "raw":
            logp = raw_logp(logits, tokens)
        if self._reports_top:
            self._report_top(rows, logits=logits, allowed=allowed, settings=settings)

        # Write them down before the rows advance, while GENERATED still says where they belong. No response is longer
        # than its row in the cache.
        if self.columns >= self._tokens.shape[1]:
            self._lengthen(self.columns)
        buffer = (fields[BUFFER], fields[GENERATED])
        self._tokens[buffer] = tokens
        self._logp[buffer] = logp.to(self._logp.dtype)

        # The rows that are still there advance; the others stand still.
        has_holes = slots is None and self.num_alive < len(self.rows)
        if slots is None:
            fields[TOKEN].copy_(tokens)
            self._advancing.add_(self._alive[: len(self.rows)] if has_holes else 1)
            generated = fields[GENERATED]
        else:
            self._state[TOKEN, index] = tokens
            self._state[POSITION : GENERATED + 1, index] += 1
            generated = fields[GENERATED] + 1
        self.columns += 1

        # Who is done, by which token or string. One copy to the host where nobody is.
        stops = settings.stops
        stopped = tokens == stops[:, 0] if stops.shape[1] == 1 else (tokens[:, None] == stops).any(1)
        ended = stopped | (logp - logp != 0)  # which it is where logp is not finite
        self._until_limit -= 1
        if self._until_limit <= 0:
            ended |= generated >= fields[LIMIT]
        if has_holes:
            ended &= self._alive[: len(self.rows)]
        strings: dict[int, str] = {}
        if constraints:
            drawn: list[int] = tokens.tolist()
            is_stop: list[bool] = stopped.tolist()
            for place, each in constraints.items():
                string = each.push(drawn[place], is_stop_token=is_stop[place])
                if string is not None:
                    strings[place] = string
                    ended[place] = True
        done: list[int] = ended.nonzero()[:, 0].tolist()
        if not done:
            return tokens, logp, []
        stop_reasons: list[int | str | None] = [
            strings.get(place, token if by_token else None)
            for place, token, by_token in zip(done, tokens[done].tolist(), stopped[done].tolist(), strict=True)
        ]
        reasons: list[FinishReason] = ["length" if by is None else "stop" for by in stop_reasons]
        done_slots = done if slots is None else [slots[place] for place in done]
        return tokens, logp, self._end(done_slots, reasons, stop_reasons)

    def _end(
        self, slots: Sequence[int], reasons: Sequence[FinishReason], stop_reasons: Sequence[int | str | None]
    ) -> list[Row]:
        index = torch.tensor(slots, device=self._device)
        state = self._state[:, index]
        generated: list[int] = state[GENERATED].tolist()
        longest = max(generated, default=0)
        tokens = self._tokens[state[BUFFER], :longest].tolist()
        logp = self._logp[state[BUFFER], :longest].tolist()
        ended = []
        for place, slot in enumerate(slots):
            row, count = self.rows[slot], generated[place]
            assert row is not None
            self.rows[slot] = None
            row.tokens, row.logp = tokens[place][:count], logp[place][:count]
            row.finish_reason, row.stop_reason = reasons[place], stop_reasons[place]
            ended.append(row)
        self._buffers += state[BUFFER].tolist()
        self._alive[index] = False
        self._state[BUFFER, index], self._state[POSITION, index] = self.capacity, 0
        self.num_alive -= len(slots)
        self.columns = int(self._state[POSITION, : len(self.rows)].max()) + 1
        return ended

    def _report_top(
        self,
        rows: Sequence[Row | None],
        *,
        logits: Float[Tensor, "m V"],
        allowed: Float[Tensor, "m V"],
        settings: _Settings,
    ) -> None:
        """Note the likeliest tokens of the rows that report them; tokens that could not be drawn are left out."""
        asking = [(place, row) for place, row in enumerate(rows) if row is not None and row.request.sampling.top_logp]
        index = torch.tensor([place for place, _ in asking], device=self._device)
        if self._logp_of == "raw":
            distribution = logits[index].float()
        else:
            distribution = sampled_logits(allowed[index], settings.of(index).sampling)
        most = min(self._vocab_size, max(row.request.sampling.top_logp for _, row in asking))
        best = distribution.log_softmax(-1).topk(most)
        for (_, row), tokens, values in zip(asking, best.indices.tolist(), best.values.tolist(), strict=True):
            pairs = list(zip(tokens, values, strict=True))[: row.request.sampling.top_logp]
            row.top_logp.append(tuple((token, value) for token, value in pairs if math.isfinite(value)))

    # -- storage

    def _lengthen(self, num_tokens: int) -> None:
        """Make room for responses of `num_tokens`, and for a row at its limit to stand still behind it."""
        missing = max(num_tokens + 1 - self._tokens.shape[1], self._tokens.shape[1] // 2, 64)
        self._tokens = torch.cat([self._tokens, self._tokens.new_zeros(self.capacity + 1, missing)], dim=1)
        self._logp = torch.cat([self._logp, self._logp.new_zeros(self.capacity + 1, missing)], dim=1)

    def _tabulate(self, profiles: Sequence[Profile]) -> _Settings:
        samplings = [profile.sampling() for profile in profiles]
        most = max(1, *(len(profile.stop_token_ids) for profile in profiles))
        stops = [[*profile.stop_token_ids, *[-1] * (most - len(profile.stop_token_ids))] for profile in profiles]
        return _Settings(
            SamplingTensors.of(samplings, vocab_size=self._vocab_size, device=self._device),
            torch.tensor(stops, dtype=torch.int64, device=self._device),
        )


@final
class ContinuousBatching:
    """Decodes up to `max_batch_size` rows together in a cache of up to `max_cache_tokens`."""

    def __init__(
        self,
        model: SlotModel,
        *,
        max_batch_size: int,
        max_cache_tokens: int,
        vocab_size: int,
        logp_of: LogpOf,
    ) -> None:
        self.counters = Counters()
        self._model = model
        self.max_cache_tokens = max_cache_tokens
        self._vocab_size, self._logp_of, self._version = vocab_size, logp_of, 0
        self._waiting: deque[Row] = deque()
        self._batch = Batch(capacity=max_batch_size, vocab_size=vocab_size, device=model.model.device, logp_of=logp_of)
        # Rows that have not drawn a token since they were let in, and rows whose prompt older weights have seen.
        self._stale: set[Row] = set()

    @property
    def running(self) -> int:
        """Answers being generated."""
        return self._batch.num_alive

    @property
    def waiting(self) -> int:
        """Answers that wait for a place."""
        return len(self._waiting)

    @property
    def cache_usage(self) -> float:
        """Tokens in the cache, as a share of `max_cache_tokens`."""
        return self._batch.num_cached() / self.max_cache_tokens

    def add(self, rows: Sequence[Row]) -> None:
        """Take answers in; they start in this order."""
        self._waiting.extend(rows)

    def advance(self, *, stream: bool) -> list[News]:
        """Run one forward; return who has ended, and with `stream` every new token."""
        batch, device = self._batch, self._model.model.device
        groups = self._rearrange()
        if not batch.num_alive:
            return []
        slots: list[int] | None = None
        if groups:
            # Each distinct prompt runs once, for all slots that wait for it.
            slots = [slot for group in groups.values() for slot in group]
            sources = [index for index, group in enumerate(groups.values()) for _ in group]
            source = torch.tensor(sources, device=device)
            logits = self._model.prefill(list(groups), slots=torch.tensor(slots, device=device), sources=source)[source]
        else:
            num_rows, columns = self._make_room()
            logits = self._model.decode(*batch.inputs(num_rows), columns=columns)[: len(batch.rows)]
        rows = list(batch.rows) if slots is None else [batch.rows[slot] for slot in slots]
        self.counters.generated_tokens += batch.num_alive if slots is None else len(slots)
        tokens, logp, ended = batch.draw(logits, slots)
        self._stale.difference_update(ended)
        ends = dict(row.ended(logp_of=self._logp_of, version=self._version) for row in ended)
        if not stream:
            return list(ends.items())
        news: list[News] = []
        for row, token, value in zip(rows, tokens.tolist(), logp.tolist(), strict=True):
            if row is None:
                continue
            end = ends.get(row)
            if isinstance(end, LogpError):
                news.append((row, end))
                continue
            delta = RolloutDelta(
                sample_index=row.sample_index,
                tokens=(token,),
                logp=(value,),
                top_logp=tuple(row.top_logp[-1:]),
                rollout=None if end is None else end.rollout,
            )
            news.append((row, delta))
        return news

    def abort(self, owner: object) -> list[News]:
        """Take the answers that somebody wanted out, as they are."""
        waiting = [row for row in self._waiting if row.owner == owner]
        self._waiting = deque(row for row in self._waiting if row.owner != owner)
        slots = [s for s, row in enumerate(self._batch.rows) if row is not None and row.owner == owner]
        ended = [*(self._batch.drop(slots) if slots else ()), *waiting]
        self._stale.difference_update(ended)
        return [row.ended(logp_of=self._logp_of, version=self._version) for row in ended]

    def commit_version(self, version: int) -> None:
        """From here on, tokens are made by the weights of `version`."""
        self._version = version
        if not self._batch.num_alive:
            return
        for row, generated in zip(self._batch.rows, self._batch.num_generated(), strict=True):
            if row is not None:
                row.mark_version(version, start=generated)
                self._stale.add(row)

    def clear(self) -> None:
        """Forget all answers, and give the cache back."""
        self._waiting.clear()
        self._batch.clear()
        self._stale.clear()
        self._model.cache.clear()

    def explain(self) -> list[str]:
        """How it generates, in lines for people."""
        size = self._model.cache.token_bytes * self.max_cache_tokens
        return [
            "batching: continuous; finished rows are replaced, answers to one prompt share its prefill",
            self._model.decoding.explain(),
            f"cache: static slots, at most {self.max_cache_tokens} tokens"
            + (f" ({size / 2**20:.0f} MiB)" if size else ""),
        ]

    # -- who is in the batch

    def _rearrange(self) -> dict[Prompt, list[int]]:
        """Let rows in and close holes where that pays; return the prompts to run, each with the slots that want it."""
        batch, counters = self._batch, self.counters
        rows = self._let_in() if self._waiting else []
        num_holes = len(batch.rows) - batch.num_alive
        fewer = not batch.num_alive or rounded_shape(batch.num_alive, 1)[0] < rounded_shape(len(batch.rows), 1)[0]
        if not rows and (not fewer or num_holes < REPLACE_AT_FRACTION * len(batch.rows)):
            return {}
        if len(rows) < num_holes:
            to, source = batch.close_holes()
            self._model.cache.move(to=to, source=source, columns=batch.columns)
        groups: dict[Prompt, list[int]] = {}
        if rows:
            # They take the holes, which are none or at most as many as they are, and the slots after the last.
            slots = [slot for slot, row in enumerate(batch.rows) if row is None]
            slots += range(len(batch.rows), len(batch.rows) + len(rows) - len(slots))
            donors = {
                row.request.prompt: slot
                for slot, row in enumerate(batch.rows)
                if row is not None and row not in self._stale
            }
            longest = max([len(row.context) for row in rows])
            self._reserve(max(len(batch.rows), max(slots) + 1), max(batch.columns, longest))
            batch.place(rows, slots)
            # A prompt that is in the cache is copied; the others are to be run, each once.
            copies: list[tuple[int, int]] = []
            for row, slot in zip(rows, slots, strict=True):
                context = row.context
                row.mark_version(self._version, start=len(row.tokens))
                counters.prompt_tokens += len(context)
                if context in donors:
                    copies.append((slot, donors[context]))
                    counters.cached_prompt_tokens += len(context) - 1
                else:
                    counters.cached_prompt_tokens += len(context) if context in groups else 0
                    groups.setdefault(context, []).append(slot)
            if copies:
                moves = torch.tensor(copies, device=self._model.model.device)
                self._model.cache.move(to=moves[:, 0], source=moves[:, 1], columns=longest)
        batch.settle()
        return groups

    def _let_in(self) -> list[Row]:
        """Choose who of those waiting comes in now: as many as fit, or nobody where few do."""
        alive, waiting = self._batch.num_alive, self._waiting
        rows: list[Row] = []
        columns = self._batch.columns if alive else 0
        prompts: set[Prompt] = set()
        lengths: set[int] = set()
        full_forward = False
        for row in waiting:
            context, most = row.context, row.request.sampling.max_new_tokens
            columns = max(columns, len(context) + min(most - len(row.tokens), COLUMNS_STEP))
            prompts.add(context)
            lengths.add(len(context))
            too_many = alive + len(rows) == self._batch.capacity or (alive + len(rows) + 1) * columns > (
                self.max_cache_tokens
            )
            too_long = (
                len(prompts) * max(lengths) > MAX_PREFILL_TOKENS
                or len(prompts) * len(lengths) * self._vocab_size > MAX_PREFILL_LOGITS
            )
            full_forward = bool(rows) and too_long
            if too_many or full_forward:
                break
            rows.append(row)
        if alive and not full_forward and len(rows) < min(len(waiting), REPLACE_AT_FRACTION * alive):
            return []
        for _ in rows:
            waiting.popleft()
        return rows

    # -- memory

    def _reserve(self, slots: int, columns: int) -> None:
        """Grow the cache where it is smaller than this, which `max_cache_tokens` has been asked for."""
        cache, bound = self._model.cache, self.max_cache_tokens
        if slots <= cache.slots and columns <= cache.columns:
            return
        ample_slots = min(self._batch.capacity, 1 << (slots - 1).bit_length())
        ample_columns = -(-max(columns * 5 // 4, 1) // COLUMNS_STEP) * COLUMNS_STEP
        shapes = [
            (max(ample_slots, cache.slots), max(ample_columns, cache.columns)),
            (ample_slots, ample_columns),
            (slots, bound // slots),
        ]
        slots, columns = next(shape for shape in shapes if shape[0] * shape[1] <= bound)
        cache.resize(slots=slots, columns=columns)

    def _make_room(self) -> tuple[int, int]:
        """Make the cache hold `columns` of the batch; where it cannot, the newest rows give up their place.

        Returns:
            How many slots and columns are decoded: those of the batch, and some behind them, to no effect. They depend
            on the batch and on limits alone, not on what the cache held before, since they decide how results round.
        """
        batch = self._batch
        if len(batch.rows) * batch.columns > self.max_cache_tokens:
            keep = max(1, self.max_cache_tokens // (batch.columns + COLUMNS_STEP))
            alive = [(row.arrived_s, slot) for slot, row in enumerate(batch.rows) if row is not None]
            evicted = [slot for _, slot in sorted(alive)[keep:]]
            for row in reversed(batch.drop(evicted) if evicted else []):
                row.context = (*row.request.prompt, *row.tokens)
                self._stale.discard(row)
                self._waiting.appendleft(row)
                self.counters.preemptions += 1
            to, source = batch.close_holes()
            self._model.cache.move(to=to, source=source, columns=batch.columns)
            batch.settle()
        num_rows, columns = rounded_shape(len(batch.rows), batch.columns)
        num_rows = min(num_rows, batch.capacity)
        if num_rows * columns > self.max_cache_tokens:
            num_rows, columns = len(batch.rows), batch.columns
        self._reserve(num_rows, columns)
        return num_rows, columns
