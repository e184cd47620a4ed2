"""Attention over a cache in which every row has its own length, inside unmodified models. Knows no rows or requests.

transformers looks both the attention and the mask of a model up by the name in its config. Under the name registered
here, a model builds its own masks (causal, sliding windows, chunks) from the positions of each row, and attends to keys
without repeating them for the query heads that share them.

Axes: N rows, H query heads, K key heads, S queries a row, C cache columns, D head dimension.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from rl_generation.errors import ModelError

__all__ = ["ATTENTION", "AttentionStep", "attending", "register_attention", "stepping"]

ATTENTION = "rl_generation_slots"

# Arguments of other attention functions that change the result, and that this one does not know.
UNKNOWN = ("s_aux", "sinks", "position_bias", "head_mask", "attention_bias")


@final
@dataclass(slots=True, kw_only=True)
class AttentionStep:
    """What one forward attends to."""

    positions: Int[Tensor, "rows S"]
    """Of the queries; one row stands for all of them where they are alike."""

    columns: int
    """C: columns of the cache that are looked at."""

    dtype: torch.dtype
    """Of the additive masks."""

    softcap: bool
    """Whether to cap scores where the model asks for it; some of transformers' own attention functions do not."""

    from_start: bool
    """Whether the queries, more than one, are at all columns from the first on: a prefill."""

    mask_left_out: bool = False
    """Whether the model was told to do without a mask, since it would be the triangle that kernels know."""

    calls: int = 0
    """Layers that have attended so far."""


# Of the forward that runs in this thread: transformers calls the functions below by name, without a place for it.
_STEP: ContextVar[AttentionStep] = ContextVar("rl_generation_attention_step")


def register_attention() -> None:
    """Make the functions below known to transformers; again is harmless."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, _mask)


@contextmanager
def attending(configs: Iterable[Any]) -> Iterator[None]:
    """Let the models of `configs`, outer ones first, attend through this module; put back what was there."""
    # transformers' own way in, `set_attn_implementation`, looks for kernels and warns.
    before = [(config, config._attn_implementation) for config in configs]  # noqa: SLF001
    try:
        for config, _ in before:
            config._attn_implementation = ATTENTION  # noqa: SLF001
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation = implementation  # noqa: SLF001


@contextmanager
def stepping(step: AttentionStep) -> Iterator[None]:
    """Tell the functions below what the forward inside attends to."""
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)


def _mask(
    *, mask_function: Callable[..., Tensor], allow_is_causal_skip: bool = False, **_: object
) -> Float[Tensor, "rows 1 S C"] | None:
    """Return 0 where the model's own predicate (row, head, query position, column) lets a query look, else -inf."""
    from transformers.masking_utils import causal_mask_function

    causal: Any = causal_mask_function
    step = _STEP.get()
    if allow_is_causal_skip and mask_function is causal and step.from_start and not step.softcap:
        step.mask_left_out = True
        return None
    queries = step.positions[:, None, :, None]
    rows = torch.arange(len(queries), device=queries.device)[:, None, None, None]
    columns = torch.arange(step.columns, device=queries.device)[None, None, None]
    visible = mask_function(rows, rows.new_zeros(()), queries, columns)
    return torch.zeros(visible.shape, dtype=step.dtype, device=visible.device).masked_fill_(~visible, -torch.inf)


def _attention(  # noqa: PLR0917 - as transformers calls it
    module: nn.Module,
    query: Float[Tensor, "N H S D"],
    key: Float[Tensor, "N K C D"],
    value: Float[Tensor, "N K C E"],
    attention_mask: Float[Tensor, "rows 1 S C"] | None,
    **options: Any,
) -> tuple[Float[Tensor, "N S H E"], None]:
    """Attend as `transformers.AttentionInterface` asks for."""
    step = _STEP.get()
    unknown = [name for name in UNKNOWN if options.get(name) is not None]
    if unknown or (attention_mask is None and not step.mask_left_out):
        raise ModelError(
            f"{type(module).__name__} attends with {', '.join(unknown)}"
            if unknown
            else f"{type(module).__name__} attends without the mask that transformers' mask functions build"
        )
    step.calls += 1
    scale, softcap = options.get("scaling"), options.get("softcap") if step.softcap else None
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if attention_mask is None:
        return _triangle(query, key, value, scale=scale), None
    num_rows, num_heads, num_queries, _ = query.shape
    num_shared = num_heads // key.shape[1]
    mask = attention_mask.to(query.dtype)
    one_query = num_queries == 1
    explicit = softcap is not None or (one_query and query.dtype == torch.float32 and query.device.type == "cpu")
    if one_query or explicit:
        # Heads that share a key become queries of one head, instead of copies of the cache.
        query = query.reshape(num_rows, key.shape[1], num_shared * num_queries, -1)
        mask = mask if one_query else mask.repeat(1, 1, num_shared, 1)
    if explicit:
        attended = _explicit(query, key, value, mask=mask, scale=scale, softcap=softcap)
    else:
        grouped = query.shape[1] != key.shape[1]
        attended = F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=grouped)
    return attended.reshape(num_rows, num_heads, num_queries, -1).transpose(1, 2).contiguous(), None


def _triangle(
    query: Float[Tensor, "N H S D"], key: Float[Tensor, "N K S D"], value: Float[Tensor, "N K S E"], *, scale: float
) -> Float[Tensor, "N S H E"]:
    """Attend to what is not after each query; kernels skip the rest instead of masking it."""
    grouped = query.shape[1] != key.shape[1]
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
    return attended.transpose(1, 2).contiguous()


def _explicit(
    query: Float[Tensor, "N K Q D"],
    key: Float[Tensor, "N K C D"],
    value: Float[Tensor, "N K C E"],
    *,
    mask: Float[Tensor, "rows 1 queries C"],
    scale: float,
    softcap: float | None,
) -> Float[Tensor, "N K Q E"]:
    """Attend step by step, in float32; on the CPU faster than the fused kernel where each row has one query."""
    scores = (query * scale @ key.transpose(2, 3)).float()
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    return (scores + mask).softmax(-1).to(value.dtype) @ value
