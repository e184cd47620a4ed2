"""The rows that are decoded together, as tensors on the device: draws their tokens and finds who has finished.

Knows no model and no queue. Slots 0 to N - 1 hold rows; a slot whose row has finished holds None until it is filled or
closed, and its row stands still in the meantime.

Axes: N rows, m of them, F fields, T tokens of the longest answer, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rl_generation.distribution import SamplingTensors, choose, raw_logp
from rl_generation.embedded.rows import Profile, Row, Text
from rl_generation.rollout import FinishReason, LogpOf
from rl_generation.uniforms import exact_dtype, uniforms

__all__ = ["Batch", "Ended"]

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
