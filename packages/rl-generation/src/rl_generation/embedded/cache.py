"""A key/value cache with one slot a row, each filled to its own length. Knows no requests and no weights.

Rows being decoded lie in slots 0 to N - 1, so that a layer attends to a view and copies nothing. What a slot holds
beyond its row's length is left over from others and never visible.

To a model this is a transformers `Cache`, as far as decoder-only models look at one.
Axes: R slots, K key heads, M columns of a slot, D head dimension; N rows, P prompts, L their padded length.
"""

from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["SlotCache"]


@final
class SlotCache:
    """Keys and values of all layers, `slots` × `columns` tokens of each; storage appears with the first forward."""

    # What generate would ask of a cache in order to compile the model.
    is_compileable = False

    def __init__(self) -> None:
        self.slots = 0
        self.columns = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._token_bytes: dict[int, int] = {}
        self._seen = 0
        self._prefill: tuple[Tensor, Tensor] | None = None
        self._rows = self._positions = torch.empty(0, dtype=torch.int64)

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes in all layers; 0 before the first forward."""
        return sum(self._token_bytes.values())

    @property
    def layer_indices(self) -> set[int]:
        """Layers that have stored something."""
        return set(self._layers)

    def resize(self, *, slots: int, columns: int) -> None:
        """Change the storage, layer by layer; what fits stays."""
        self.slots, self.columns = slots, columns
        for index, layer in self._layers.items():
            self._layers[index] = (self._resized(layer[0]), self._resized(layer[1]))

    def clear(self) -> None:
        """Give the storage back."""
        self._layers.clear()
        self.slots = self.columns = 0

    def move(self, *, to: Int[Tensor, " rows"], source: Int[Tensor, " rows"], columns: int) -> None:
        """Copy the first `columns` of slots `source` to slots `to`, all at once."""
        for kept in (kept for layer in self._layers.values() for kept in layer):
            kept[to, :, :columns] = kept[source, :, :columns]

    def begin_prefill(self, *, slots: Int[Tensor, " rows"], prompts: Int[Tensor, " rows"], columns: int) -> None:
        """Expect a forward over whole prompts; `slots[i]` keeps a copy of prompt `prompts[i]`."""
        self._prefill = (slots, prompts)
        self._seen = columns

    def begin_decode(self, *, positions: Int[Tensor, " N"], columns: int) -> None:
        """Expect a forward over one token of each of the first N slots, at `positions`, all below `columns`."""
        self._prefill = None
        self._positions = positions
        if len(self._rows) != len(positions):
            self._rows = torch.arange(len(positions), device=positions.device)
        self._seen = columns

    # -- what models call

    def update(
        self,
        key: Float[Tensor, "rows K S D"],
        value: Float[Tensor, "rows K S E"],
        layer_idx: int,
        *_: object,
        **__: object,
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values; return those to attend to."""
        if layer_idx not in self._layers:
            self._layers[layer_idx] = (self._allocate(key), self._allocate(value))
            self._token_bytes[layer_idx] = key[0, :, 0].nbytes + value[0, :, 0].nbytes
        keys, values = self._layers[layer_idx]
        if self._prefill is not None:
            slots, prompts = self._prefill
            keys[slots, :, : key.shape[2]] = key[prompts]
            values[slots, :, : key.shape[2]] = value[prompts]
            return key, value
        num_rows = len(self._rows)
        keys[self._rows, :, self._positions] = key[:, :, 0]
        values[self._rows, :, self._positions] = value[:, :, 0]
        return keys[:num_rows, :, : self._seen], values[:num_rows, :, : self._seen]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before this forward's; 0 for a prefill."""
        return 0 if self._prefill is not None else self._seen - 1

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The same, by its newer name."""
        return self.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: object, layer_idx: int = 0) -> tuple[int, int]:
        """Columns that a mask covers, and the first of them."""
        return self._seen, 0

    @property
    def is_sliding(self) -> list[bool]:
        """No layer throws keys away: windows are masked."""
        return [False] * max(1, len(self._layers))

    def __len__(self) -> int:
        return len(self._layers)

    def _allocate(self, like: Tensor) -> Tensor:
        # Zeros: a NaN in what nobody has written yet would pass through the mask.
        return like.new_zeros(self.slots, like.shape[1], self.columns, like.shape[3])

    def _resized(self, kept: Tensor) -> Tensor:
        larger = self._allocate(kept)
        slots, columns = min(self.slots, kept.shape[0]), min(self.columns, kept.shape[2])
        larger[:slots, :, :columns] = kept[:slots, :, :columns]
        return larger
