"""Continuous batching in the embedded engine: rows enter and leave slots, one forward pass per generated token.

Knows no model and no queue. Slots 0 to N - 1 hold rows; a slot whose row has finished holds None until it is filled or
closed, and its row stands still in the meantime.

Axes: N rows, m of them, F fields, T tokens of the longest answer, V vocabulary.

Each call of `advance` is one forward: either over the prompts of those let in, or over a token of every row. Those who
finish leave holes, which are filled by those who wait, or closed, once they are an eighth of the batch: to move a row
costs about what it costs to decode one more step. Answers to the same prompt share one prefill: let in together, it
runs once; let in later, they copy it from a row that is still there.

The cache is a rectangle, slots times columns. It grows with what rows really hold, not with what they may, and never
beyond `max_cache_tokens`: the newest rows give up their place first, and later start again from what they had.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rl_generation.distribution import SamplingTensors, choose, exact_dtype, raw_logp, uniforms
from rl_generation.embedded.rows import Profile, Row, Text
from rl_generation.embedded.runner import Counters, Progress
from rl_generation.embedded.slot_model import SlotModel
from rl_generation.requests import Prompt
from rl_generation.rollout import FinishReason, LogpOf, Rollout

__all__ = ["Batch", "ContinuousBatching", "Ended"]

# Fields of the state: the last token, where it stands, tokens generated, how many at most, seed, row of the buffers.
TOKEN, POSITION, GENERATED, LIMIT, SEED, BUFFER = range(6)


# Random numbers are computed for so many steps at once.
STEPS_AHEAD = 16


class Ended(NamedTuple):
    """A row that has left the batch, and all that it generated."""

    row: Row
    tokens: list[int]
    logp: list[float]
    finish_reason: FinishReason
    stop_reason: int | str | None


@final
@dataclass(frozen=True, slots=True)
class _Settings:
    """How each of m rows is sampled, and the tokens that end it."""

    sampling: SamplingTensors
    stops: Int[Tensor, "m stops"]

    def of(self, index: Int[Tensor, " k"]) -> "_Settings":
        """Return those of `index`, which may repeat."""
        table = self.sampling
        sampling = replace(
            table,
            greedy=table.greedy[index],
            temperature=None if table.temperature is None else table.temperature[index],
            min_p=None if table.min_p is None else table.min_p[index],
            top_k=None if table.top_k is None else table.top_k[index],
            top_p=None if table.top_p is None else table.top_p[index],
        )
        return _Settings(sampling, self.stops[index])


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
        self._texts: list[int] = []
        self._ahead: list[Tensor] = []
        self.num_alive = 0

    @property
    def holes(self) -> list[int]:
        """Slots whose row has finished."""
        if self.num_alive == len(self.rows):
            return []
        return [slot for slot, row in enumerate(self.rows) if row is None]

    def inputs(self) -> tuple[Int[Tensor, " N"], Int[Tensor, " N"]]:
        """Return the last token of each slot, and its position."""
        return self._state[TOKEN, : len(self.rows)], self._state[POSITION, : len(self.rows)]

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
        self._fit(max(len(row.tokens) for row in rows))
        self.rows += [None] * (max(slots) + 1 - len(self.rows))
        fields = []
        for row, slot in zip(rows, slots, strict=True):
            self.rows[slot] = row
            context, buffer = row.context, self._buffers.pop()
            fields.append([context[-1], len(context) - 1, len(row.tokens), row.limit, row.seed, buffer])
            if row.tokens:
                self._tokens[buffer, : len(row.tokens)] = torch.tensor(row.tokens)
                self._logp[buffer, : len(row.tokens)] = torch.tensor(row.logp, dtype=self._logp.dtype)
        index = torch.tensor(slots, device=self._device)
        self._state[:, index] = torch.tensor(fields, device=self._device).T
        self._alive[index] = True
        self.num_alive += len(rows)

    def close_holes(self) -> tuple[list[int], list[int]]:
        """Move the last rows into the holes; return to which slots and from which, for the cache to follow."""
        kept = self.num_alive
        to = [slot for slot in self.holes if slot < kept]
        source = [slot for slot in range(kept, len(self.rows)) if self.rows[slot] is not None]
        for hole, slot in zip(to, source, strict=True):
            self.rows[hole] = self.rows[slot]
        if to:
            self._state[:, to] = self._state[:, source]
        del self.rows[kept:]
        self._alive[:kept] = True
        return to, source

    def settle(self) -> None:
        """Look the settings of all rows up anew, after rows have come, gone or moved."""
        self._texts = [slot for slot, row in enumerate(self.rows) if row is not None and row.text is not None]
        self._ahead = []
        if not self.rows:
            return
        profiles: dict[Profile, int] = {}
        default = next(row for row in self.rows if row is not None).profile
        index = [profiles.setdefault((row.profile if row else default), len(profiles)) for row in self.rows]
        if profiles != self._profiles or self._settings is None:
            self._profiles, self._table = profiles, self._tabulate(list(profiles))
        self._settings = self._table.of(torch.tensor(index, device=self._device))
        self.columns = int(self._state[POSITION, : len(self.rows)].max()) + 1

    def drop(self, slots: Sequence[int], *, finish_reason: FinishReason = "abort") -> list[Ended]:
        """Take rows out before their time."""
        return self._end(slots, [finish_reason] * len(slots), [None] * len(slots))

    def clear(self) -> None:
        """Forget every row."""
        self.rows, self._texts, self.num_alive, self.columns = [], [], 0, 0
        self._buffers = list(range(self.capacity))
        self._tokens, self._logp = self._tokens[:, :0].clone(), self._logp[:, :0].clone()

    # -- a token for each row

    def draw(
        self, logits: Float[Tensor, "m V"], slots: list[int] | None
    ) -> tuple[Int[Tensor, " m"], Float[Tensor, " m"], list[Ended]]:
        """Draw the next token of `slots` (all where None) from `logits`; return them, their logp, and who has ended."""
        assert self._settings is not None
        index = slice(0, len(self.rows)) if slots is None else torch.tensor(slots, device=self._device)
        state = self._state[:, index]
        settings = self._settings if isinstance(index, slice) else self._settings.of(index)
        texts = self._reading(slots)
        allowed = self._without_bad_words(logits, texts)
        chances = self._chances() if slots is None else uniforms(state[SEED], state[GENERATED])
        tokens, logp = choose(allowed, chances, settings.sampling)
        if self._logp_of == "raw":
            logp = raw_logp(logits, tokens)
        # No answer is longer than its row in the cache.
        self._fit(self.columns)
        buffer = (state[BUFFER], state[GENERATED])
        self._tokens[buffer] = tokens
        self._logp[buffer] = logp.to(self._logp.dtype)
        self._advance(tokens, index)
        stopped = (tokens[:, None] == settings.stops).any(1)
        return tokens, logp, self._find_ended(tokens, logp, stopped, index=index, slots=slots, texts=texts)

    def _chances(self) -> Float[Tensor, " N"]:
        """Return the number that draws each slot's next token; some steps ahead cost as much as one."""
        if not self._ahead:
            steps = self._state[GENERATED, : len(self.rows)] + torch.arange(STEPS_AHEAD, device=self._device)[:, None]
            self._ahead = list(uniforms(self._state[SEED, : len(self.rows)].expand_as(steps), steps).flip(0))
        return self._ahead.pop()

    def _reading(self, slots: list[int] | None) -> list[tuple[int, int]]:
        """Return the rows whose text matters, as (place among `slots`, slot)."""
        if not self._texts:
            return []
        alive = {slot for slot in self._texts if self.rows[slot] is not None}
        return [(place, slot) for place, slot in enumerate(slots or range(len(self.rows))) if slot in alive]

    def _without_bad_words(self, logits: Float[Tensor, "m V"], texts: list[tuple[int, int]]) -> Float[Tensor, "m V"]:
        banned = [(place, token) for place, slot in texts for token in self._text(slot).banned]
        if not banned:
            return logits
        allowed = logits.clone()
        places, tokens = zip(*banned, strict=True)
        allowed[list(places), list(tokens)] = -torch.inf
        return allowed

    def _text(self, slot: int) -> Text:
        row = self.rows[slot]
        assert row is not None
        assert row.text is not None
        return row.text

    def _advance(self, tokens: Int[Tensor, " m"], index: slice | Tensor) -> None:
        step: int | Tensor = 1 if self.num_alive == len(self.rows) else self._alive[index].long()
        self._state[TOKEN, index] = tokens
        if isinstance(index, slice):
            self._state[POSITION : GENERATED + 1, index] += step
        else:
            self._state[POSITION, index] += step
            self._state[GENERATED, index] += step
        self.columns += 1

    def _find_ended(
        self,
        tokens: Int[Tensor, " m"],
        logp: Float[Tensor, " m"],
        stopped: Bool[Tensor, " m"],
        *,
        index: slice | Tensor,
        slots: list[int] | None,
        texts: list[tuple[int, int]],
    ) -> list[Ended]:
        """Find who is done: by a stop token, a stop string, at the limit, or because the logits broke."""
        at_limit = self._state[GENERATED, index] >= self._state[LIMIT, index]
        ended = (stopped | at_limit | ~logp.isfinite()) & self._alive[index]
        strings = self._read(tokens, stopped, texts) if texts else {}
        if strings:
            ended[list(strings)] = True
        places: list[int] = ended.nonzero()[:, 0].tolist()
        if not places:
            return []
        reasons: list[FinishReason] = []
        stop_reasons: list[int | str | None] = []
        for place, token, by_token in zip(places, tokens[places].tolist(), stopped[places].tolist(), strict=True):
            by = strings.get(place, token if by_token else None)
            reasons.append("length" if by is None else "stop")
            stop_reasons.append(by)
        return self._end(places if slots is None else [slots[place] for place in places], reasons, stop_reasons)

    def _read(
        self, tokens: Int[Tensor, " m"], stopped: Bool[Tensor, " m"], texts: list[tuple[int, int]]
    ) -> dict[int, str]:
        """Return the stop strings that were completed, by place."""
        read = zip(texts, tokens[[place for place, _ in texts]].tolist(), strict=True)
        is_stop: list[bool] = stopped.tolist()
        found = {place: self._text(slot).push(token, is_stop_token=is_stop[place]) for (place, slot), token in read}
        return {place: string for place, string in found.items() if string is not None}

    def _end(
        self, slots: Sequence[int], reasons: Sequence[FinishReason], stop_reasons: Sequence[int | str | None]
    ) -> list[Ended]:
        generated: list[int] = self._state[GENERATED, slots].tolist()
        buffers: list[int] = self._state[BUFFER, slots].tolist()
        longest = max(generated, default=0)
        tokens, logp = self._tokens[buffers, :longest].tolist(), self._logp[buffers, :longest].tolist()
        ended = []
        for place, slot in enumerate(slots):
            row, count = self.rows[slot], generated[place]
            assert row is not None
            self.rows[slot] = None
            ended.append(Ended(row, tokens[place][:count], logp[place][:count], reasons[place], stop_reasons[place]))
        self._buffers += buffers
        self._alive[slots] = False
        self._state[BUFFER, slots], self._state[POSITION, slots] = self.capacity, 0
        self.num_alive -= len(slots)
        self.columns = int(self._state[POSITION, : len(self.rows)].max()) + 1
        return ended

    # -- storage

    def _fit(self, num_tokens: int) -> None:
        """Make room for answers of `num_tokens`, and for a row at its limit to stand still behind it."""
        missing = num_tokens + 1 - self._tokens.shape[1]
        if missing > 0:
            missing = max(missing, self._tokens.shape[1] // 2, 64)
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


REPLACE_AT_FRACTION = 0.125
# The cache grows by at least so many columns: to grow is to copy it.
COLUMNS_STEP = 32
# Of one forward over prompts, unless one alone has more: bounds what activations take, and logits (in numbers).
MAX_PREFILL_TOKENS = 16_384
MAX_PREFILL_LOGITS = 1 << 26


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
        version: int,
    ) -> None:
        self.counters = Counters()
        self._model = model
        self.max_cache_tokens = max_cache_tokens
        self._vocab_size, self._logp_of, self._version = vocab_size, logp_of, version
        self._waiting: deque[Row] = deque()
        self._batch = Batch(capacity=max_batch_size, vocab_size=vocab_size, device=model.model.device, logp_of=logp_of)
        # Rows that have not drawn a token since they were let in, and rows whose prompt older weights have seen.
        self._fresh: list[Row | None] = []
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

    def advance(self, *, stream: bool) -> list[Progress]:
        """Run one forward; return who has ended, and with `stream` every new token.

        Raises:
            LogpError: The logits of a token are not finite.
        """
        with self._model.running():
            prefill = self._rearrange()
            if not self._batch.num_alive:
                return []
            if prefill:
                slots, logits = self._prefill(prefill)
            else:
                slots, logits = None, self._decode()
        rows = [self._batch.rows[slot] for slot in slots] if slots else list(self._batch.rows)
        tokens, logp, ended = self._batch.draw(logits, slots)
        for row in rows if slots else self._fresh:
            if row is not None:
                row.stamp()
        if slots is None:
            self._fresh = []
        self.counters.generated_tokens += len(rows) - rows.count(None)
        rollouts = {item.row: self._finish(item) for item in ended}
        if not stream:
            return [Progress(row, (), (), rollout) for row, rollout in rollouts.items()]
        return [
            Progress(row, (token,), (value,), rollouts.get(row))
            for row, token, value in zip(rows, tokens.tolist(), logp.tolist(), strict=True)
            if row is not None
        ]

    def abort(self, request_id: str) -> list[Progress]:
        """Take the answers of a request out, as they are."""
        waiting = [row for row in self._waiting if row.request_id == request_id]
        self._waiting = deque(row for row in self._waiting if row.request_id != request_id)
        slots = [s for s, row in enumerate(self._batch.rows) if row is not None and row.request_id == request_id]
        ended = [
            *(self._batch.drop(slots) if slots else ()),
            *(Ended(row, row.tokens, row.logp, "abort", None) for row in waiting),
        ]
        return [Progress(item.row, (), (), self._finish(item)) for item in ended]

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
        self._fresh.clear()
        self._stale.clear()
        self._model.cache.clear()

    def explain(self) -> list[str]:
        """How it generates, in lines for people."""
        size = self._model.cache.token_bytes * self.max_cache_tokens
        return [
            "batching: continuous; finished rows are replaced, answers to one prompt share its prefill",
            f"cache: static slots, at most {self.max_cache_tokens} tokens"
            + (f" ({size / 2**20:.0f} MiB)" if size else ""),
        ]

    # -- forwards

    def _prefill(self, groups: dict[Prompt, list[int]]) -> tuple[list[int], Tensor]:
        """Run each distinct prompt; return the slots that were waiting for it, and logits for each of them."""
        slots = [slot for group in groups.values() for slot in group]
        sources = [index for index, group in enumerate(groups.values()) for _ in group]
        device = self._model.model.device
        source = torch.tensor(sources, device=device)
        logits = self._model.prefill(list(groups), slots=torch.tensor(slots, device=device), sources=source)
        return slots, logits[source]

    def _decode(self) -> Tensor:
        self._make_room()
        tokens, positions = self._batch.inputs()
        return self._model.decode(tokens, positions, columns=self._batch.columns)

    def _finish(self, ended: Ended) -> Rollout:
        row = ended.row
        self._stale.discard(row)
        return row.rollout(
            ended.tokens,
            ended.logp,
            finish_reason=ended.finish_reason,
            stop_reason=ended.stop_reason,
            logp_of=self._logp_of,
            version=self._version,
        )

    # -- who is in the batch

    def _rearrange(self) -> dict[Prompt, list[int]]:
        """Let rows in and close holes where that pays; return the prompts to run, each with the slots that want it."""
        batch = self._batch
        rows, holes = self._let_in(), batch.holes
        if not rows and (not holes or len(holes) < REPLACE_AT_FRACTION * len(batch.rows)):
            return {}
        if len(rows) < len(holes):
            self._close_holes()
            holes = []
        groups = self._place(rows, [*holes, *range(len(batch.rows), len(batch.rows) + len(rows))]) if rows else {}
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
            context = row.context
            columns = max(columns, min(row.longest, len(context) + COLUMNS_STEP))
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

    def _place(self, rows: list[Row], slots: list[int]) -> dict[Prompt, list[int]]:
        """Put rows into slots; copy the prompts that are in the cache, and return the others with their slots."""
        batch, counters = self._batch, self.counters
        slots = slots[: len(rows)]
        donors = {row.prompt: slot for slot, row in enumerate(batch.rows) if row is not None and row not in self._stale}
        contexts = [row.context for row in rows]
        self._reserve(max(len(batch.rows), max(slots) + 1), max(batch.columns, *map(len, contexts)))
        batch.place(rows, slots)
        groups: dict[Prompt, list[int]] = {}
        copies: list[tuple[int, int]] = []
        for row, slot, context in zip(rows, slots, contexts, strict=True):
            row.mark_version(self._version, start=len(row.tokens))
            counters.prompt_tokens += len(context)
            if context in donors:
                copies.append((slot, donors[context]))
                counters.cached_prompt_tokens += len(context) - 1
            else:
                counters.cached_prompt_tokens += len(context) if context in groups else 0
                groups.setdefault(context, []).append(slot)
        if copies:
            self._move(*zip(*copies, strict=True), columns=max(map(len, contexts)))
        self._fresh += [row for row, context in zip(rows, contexts, strict=True) if context in donors]
        return groups

    def _close_holes(self) -> None:
        to, source = self._batch.close_holes()
        if to:
            self._move(to, source, columns=self._batch.columns)

    def _move(self, to: Sequence[int], source: Sequence[int], *, columns: int) -> None:
        device = self._model.model.device
        self._model.cache.move(
            to=torch.tensor(to, device=device), source=torch.tensor(source, device=device), columns=columns
        )

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

    def _make_room(self) -> None:
        """See that the cache holds a column more; where it cannot, the newest rows give up their place."""
        batch = self._batch
        if batch.columns <= self._model.cache.columns:
            return
        if len(batch.rows) * batch.columns > self.max_cache_tokens:
            keep = max(1, self.max_cache_tokens // (batch.columns + COLUMNS_STEP))
            alive = [(row.arrived_s, slot) for slot, row in enumerate(batch.rows) if row is not None]
            evicted = [slot for _, slot in sorted(alive)[keep:]]
            for ended in reversed(batch.drop(evicted) if evicted else []):
                ended.row.tokens, ended.row.logp = ended.tokens, ended.logp
                self._stale.discard(ended.row)
                self._waiting.appendleft(ended.row)
                self.counters.preemptions += 1
            self._close_holes()
            batch.settle()
        self._reserve(len(batch.rows), batch.columns)
