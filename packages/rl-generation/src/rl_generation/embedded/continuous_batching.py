"""Continuous batching in the embedded engine: rows enter and leave slots, one forward pass per generated token.

Slots 0 to N - 1 hold rows; a slot whose row has finished holds None until it is filled or closed, and decodes something
that nobody reads. Each call of `advance` is one forward: either over the prompts of rows that entered, or over a token
of every row. Finished rows leave holes, which are filled by waiting rows, or closed, once they are an eighth of the
batch: to move a row costs about as much as one more decoding step. Responses to the same prompt share one prefill: if
they enter together, it runs once; a row that enters later copies it from a row that is still there.

The cache is a rectangle, slots times columns. It grows with what rows hold, not with what they may come to hold, and
never beyond `max_cache_tokens`: the newest rows give up their place first, and later start again from what they had.
"""

import torch

from rl_generation.embedded.rows import Draw, News, Row, Runner
from rl_generation.embedded.slot_model import SlotModel
from rl_generation.requests import Prompt
from rl_generation.rollout import LogpOf

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


class ContinuousBatching(Runner):
    """Decodes up to `max_batch_size` rows together in a cache of up to `max_cache_tokens`."""

    def __init__(
        self, model: SlotModel, *, max_batch_size: int, max_cache_tokens: int, vocab_size: int, logp_of: LogpOf
    ) -> None:
        device = model.model.device
        super().__init__(max_batch_size=max_batch_size, vocab_size=vocab_size, device=device, logp_of=logp_of)
        self.max_cache_tokens: int = max_cache_tokens
        self._model = model
        self._draw_all: Draw | None = None
        """Draws for all slots, as long as no row enters or moves."""

    def advance(self, *, stream: bool) -> list[News]:
        """Run one forward; return who has ended, and with `stream` every new token."""
        groups = self._rearrange()
        if not any(self.slots):
            return []
        if groups:
            # Each distinct prompt runs once, for all rows that wait for it.
            entered = [row for group in groups.values() for row in group]
            slots = torch.tensor([row.slot for row in entered], device=self._device)
            sources = [index for index, group in enumerate(groups.values()) for _ in group]
            source = torch.tensor(sources, device=self._device)
            logits = self._model.prefill(list(groups), slots=slots, sources=source)[source]
            draw = self._draw([*entered])
        else:
            num_rows, columns = self._make_room()
            empty = num_rows - len(self.slots)
            tokens = [row.last_token if row else 0 for row in self.slots] + [0] * empty
            positions = [row.position if row else 0 for row in self.slots] + [0] * empty
            inputs = torch.tensor([tokens, positions], device=self._device)
            logits = self._model.decode(inputs[0], inputs[1], columns=columns)[: len(self.slots)]
            draw = self._draw_all = self._draw_all or self._draw(self.slots)
        rows = [row for row in draw.rows if row is not None]
        self.counters["generated_tokens"] += len(rows)
        ended = draw(logits)
        for row in ended:
            self.slots[row.slot] = None
        return self._news(rows if stream else ended)

    def clear(self) -> None:
        """Forget all answers, and give the cache back."""
        super().clear()
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

    @property
    def _columns(self) -> int:
        """Columns of the cache that hold every row with the token to come."""
        return max([row.position + 1 for row in self.running], default=0)

    # -- who is in the batch

    def _rearrange(self) -> dict[Prompt, list[Row]]:
        """Let rows in and close holes where that pays; return the prompts to run, each with the rows that want it."""
        rows, alive, counters = self._let_in() if self.waiting else [], len(self.running), self.counters
        num_holes = len(self.slots) - alive
        fewer = not alive or rounded_shape(alive, 1)[0] < rounded_shape(len(self.slots), 1)[0]
        if not rows and (not fewer or num_holes < REPLACE_AT_FRACTION * len(self.slots)):
            return {}
        if len(rows) < num_holes:
            self._close_holes()
        self._draw_all = None
        if not rows:
            return {}
        donors = {row.request.prompt: row.slot for row in self.running if not row.stale}
        longest = max(len(row.context) for row in rows)
        self._reserve(max(len(self.slots), alive + len(rows)), max(self._columns, longest))
        # They take the holes, which are none or at most as many as they are, and the slots after the last.
        slots = [slot for slot, row in enumerate(self.slots) if row is None]
        slots += range(len(self.slots), alive + len(rows))
        self.slots += [None] * (alive + len(rows) - len(self.slots))
        # A prompt that is in the cache is copied; the others are to be run, each once.
        copies: list[tuple[int, int]] = []
        groups: dict[Prompt, list[Row]] = {}
        for row, slot in zip(rows, slots, strict=True):
            context = row.context
            self.slots[slot], row.slot = row, slot
            row.version, row.stale = self._version, False
            counters["prompt_tokens"] += len(context)
            if context in donors:
                copies.append((slot, donors[context]))
                counters["cached_prompt_tokens"] += len(context) - 1
            else:
                counters["cached_prompt_tokens"] += len(context) if context in groups else 0
                groups.setdefault(context, []).append(row)
        if copies:
            to, source = torch.tensor(copies, device=self._device).T
            self._model.cache.move(to=to, source=source, columns=longest)
        return groups

    def _let_in(self) -> list[Row]:
        """Choose who of those waiting comes in now: as many as fit, or nobody where few do."""
        alive, waiting = len(self.running), self.waiting
        rows: list[Row] = []
        columns = self._columns
        prompts: set[Prompt] = set()
        lengths: set[int] = set()
        full_forward = False
        for row in waiting:
            context, most = row.context, row.request.sampling.max_new_tokens
            columns = max(columns, len(context) + min(most - len(row.tokens), COLUMNS_STEP))
            prompts.add(context)
            lengths.add(len(context))
            count = alive + len(rows)
            too_many = count == self._max_batch_size or (count + 1) * columns > self.max_cache_tokens
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

    def _close_holes(self) -> None:
        """Move the last rows into the holes."""
        kept = len(self.running)
        holes = [slot for slot, row in enumerate(self.slots[:kept]) if row is None]
        moved = [row for row in self.slots[kept:] if row is not None]
        if moved:
            to = torch.tensor(holes, device=self._device)
            source = torch.tensor([row.slot for row in moved], device=self._device)
            self._model.cache.move(to=to, source=source, columns=self._columns)
        for slot, row in zip(holes, moved, strict=True):
            self.slots[slot], row.slot = row, slot
        del self.slots[kept:]
        self._draw_all = None

    # -- memory

    def _reserve(self, slots: int, columns: int) -> None:
        """Grow the cache where it is smaller than this, which `max_cache_tokens` has been asked for."""
        cache, bound = self._model.cache, self.max_cache_tokens
        if slots <= cache.slots and columns <= cache.columns:
            return
        ample_slots = min(self._max_batch_size, 1 << (slots - 1).bit_length())
        ample_columns = -(-max(columns * 5 // 4, 1) // COLUMNS_STEP) * COLUMNS_STEP
        shapes = [
            (max(ample_slots, cache.slots), max(ample_columns, cache.columns)),
            (ample_slots, ample_columns),
            (slots, bound // slots),
        ]
        slots, columns = next(shape for shape in shapes if shape[0] * shape[1] <= bound)
        cache.resize(slots=slots, columns=columns)

    def _make_room(self) -> tuple[int, int]:
        """Make the cache hold the batch with its next tokens; where it cannot, the newest rows give up their place.

        Returns:
            How many slots and columns are decoded: those of the batch, and some behind them, to no effect. They depend
            on the batch and on limits alone, not on what the cache held before, since they decide how results round.
        """
        needed = self._columns
        if len(self.slots) * needed > self.max_cache_tokens:
            keep = max(1, self.max_cache_tokens // (needed + COLUMNS_STEP))
            for row in reversed(sorted(self.running, key=lambda row: (row.arrived_s, row.slot))[keep:]):
                self.slots[row.slot] = None
                self.waiting.appendleft(row)
                self.counters["preemptions"] += 1
            self._close_holes()
            needed = self._columns
        num_rows, columns = rounded_shape(len(self.slots), needed)
        num_rows = min(num_rows, self._max_batch_size)
        if num_rows * columns > self.max_cache_tokens:
            num_rows, columns = len(self.slots), needed
        self._reserve(num_rows, columns)
        return num_rows, columns
