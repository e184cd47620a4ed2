"""What attention costs where a fused kernel runs it: no scores, only inputs, output and one number per row and head.

On a CPU, `scaled_dot_product_attention` holds scores [B, heads, S, S] where there is a mask. Here the operators that it
becomes on a GPU stand in for it: flash attention, and the memory-efficient kernel where there is a mask or the value's
heads have another size. Nothing is computed.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rl_parallel_plans.forecast.torch_internals import FLASH_BACKWARD, efficient_attention, flash_attention

Calls = list[tuple[int, ...]]


@contextmanager
def fused_attention() -> Iterator[Calls]:
    """While active, `torch.nn.functional.scaled_dot_product_attention` costs what a fused kernel costs.

    Yields a list that gets the shape of the query of each call. Not a TorchFunctionMode: those are suspended in
    backward, where activations are recomputed.
    """
    original, calls = functional.scaled_dot_product_attention, Calls()

    def fused(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(tuple((args[0] if args else kwargs["query"]).shape))
        return _fused(*args, **kwargs)

    functional.scaled_dot_product_attention = fused
    try:
        yield calls
    finally:
        functional.scaled_dot_product_attention = original


@contextmanager
def nothing_packed() -> Iterator[None]:
    """While active, Hugging Face models take each row for one sequence where they can find that out from positions.

    They cannot look at fake ones, and would make a mask for rows of several sequences. Releases that make one for any
    row do so here too.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    original = getattr(masks, "find_packed_sequence_indices", None)
    if original is None or original(torch.arange(2)[None]) is not None:
        yield
        return
    masks.find_packed_sequence_indices = lambda *_, **__: None
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = original


def workspace_bytes(operator: object, args: Any) -> int:
    """What backward of flash attention needs inside: the gradient of the query and one sum per row, in fp32.

    As FlashAttention-2 (arXiv:2307.08691) has it; where query heads share a key/value head, also the gradients of key
    and value per query head.
    """
    if operator is not FLASH_BACKWARD:
        return 0
    query, key = (t.shape for t in args[1:3])
    gradient = query.numel() + query.numel() // query[-1]
    per_query_head = 0 if key[-3] == query[-3] else 2 * key.numel() // key[-3] * query[-3]
    return int(4 * gradient + args[2].element_size() * per_query_head)


def _fused(  # noqa: PLR0917 - torch's signature
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002
    **_: Any,
) -> Tensor:
    if attn_mask is None and query.shape[-1] == value.shape[-1]:
        return flash_attention(query, key, value, dropout_p=dropout_p, is_causal=is_causal)
    shared = query.shape[-3] // key.shape[-3]  # this kernel knows no query heads that share one of key and value
    key, value = (t if shared == 1 else t.repeat_interleave(shared, -3) for t in (key, value))
    return efficient_attention(query, key, value, bias=None if attn_mask is None else _additive(attn_mask, query))


def _additive(mask: Tensor, query: Tensor) -> Tensor:
    """The mask as it is added to scores, for every head: torch makes one in the query's dtype from a boolean one."""
    if mask.dtype is torch.bool:
        mask = torch.full_like(mask, 0, dtype=query.dtype)
    return mask.expand(*query.shape[:-1], mask.shape[-1])
