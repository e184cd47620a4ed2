"""Continuous batching: who is decoded, who waits, and how much cache that takes. Does not know tokens or draws.

Each call of `advance` is one forward: either over the prompts of those let in, or over a token of every row. Those who
finish leave holes, which are filled by those who wait, or closed, once they are an eighth of the batch: to move a row
costs about what it costs to decode one more step. Answers to the same prompt share one prefill: let in together, it
runs once; let in later, they copy it from a row that is still there.

The cache is a rectangle, slots times columns. It grows with what rows really hold, not with what they may, and never
beyond `max_cache_tokens`: the newest rows give up their place first, and later start again from what they had.
"""

from collections import deque
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from rl_generation.embedded.batch import Batch, Ended
from rl_generation.embedded.rows import Row
from rl_generation.embedded.runner import Counters, Progress
from rl_generation.embedded.slot_model import SlotModel
from rl_generation.requests import Prompt
from rl_generation.rollout import LogpOf, Rollout

__all__ = ["ContinuousBatching"]

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
