"""Causal attention of one rank's queries to the keys and values of all: exact, for any length.

Knows torch's scaled_dot_product_attention and the layout of tokens; nothing of models.

Each rank gathers the keys and values of the others in one all-gather (before they are repeated for grouped queries)
and runs one attention per chunk that it holds, over the keys up to that chunk's end: a causal mask aligned to the lower
right, for which torch has a flash kernel, so that no mask of T² entries exists on a GPU. Backward: one reduce-scatter
sums the gradients of keys and values. This is the all-gather method of Llama 3 (arXiv:2407.21783, 3.3.2).

Axes: [B, heads, T / cp, D]; heads are this rank's where tensor parallelism cuts them.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from rl_parallel_plans.context_parallel.layout import gather_sequence, own_chunks
from rl_parallel_plans.dtensor import is_dtensor
from rl_parallel_plans.errors import PlanError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


_POSITIONAL = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class GatheredAttention(TorchFunctionMode):
    """While it is entered, scaled_dot_product_attention sees the keys and values of every rank of `cp_mesh`."""

    def __init__(self, cp_mesh: "DeviceMesh") -> None:
        super().__init__()
        self.cp_mesh = cp_mesh
        self.calls = 0

    def __torch_function__(  # noqa: PLR0917 - torch's protocol
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Replace the one function and pass on every other."""
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        named = dict(zip(_POSITIONAL, args, strict=False))
        return gathered_attention(cp_mesh=self.cp_mesh, **named, **(kwargs or {}))


def gathered_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cp_mesh: "DeviceMesh",
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` of this rank's queries [B, heads, T / cp, D] over the whole sequence.

    Raises PlanError for anything but causal self-attention without a mask on plain tensors.
    """
    _refuse_other_than_causal(query, key, attn_mask, is_causal=is_causal)
    from torch.distributed.tensor import Partial

    both = gather_sequence(torch.cat([key, value], -1), cp_mesh, dim=-2, gradient=Partial())
    keys, values = both[..., : key.shape[-1]], both[..., key.shape[-1] :]
    options = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
    return attention_of_chunks(query, keys, values, numbers=own_chunks(cp_mesh), **options)


def attention_of_chunks(
    query: Tensor, keys: Tensor, values: Tensor, *, numbers: Sequence[int], **options: Any
) -> Tensor:
    """Causal attention of the chunks `numbers` of a sequence, joined in `query`, over the whole of `keys`, `values`.

    options: those of `scaled_dot_product_attention`.
    """
    outputs = []
    for number, queries in zip(numbers, query.chunk(len(numbers), -2), strict=True):
        chunk = queries.shape[-2]
        end = (number + 1) * chunk
        with _disable_current_modes():  # under one, as in selective checkpointing, torch cannot make this tensor
            mask = causal_lower_right(chunk, end)
        until = keys[..., :end, :], values[..., :end, :]
        outputs.append(scaled_dot_product_attention(queries, *until, attn_mask=mask, **options))
    return torch.cat(outputs, -2)


def _refuse_other_than_causal(query: Tensor, key: Tensor, attn_mask: Tensor | None, *, is_causal: bool) -> None:
    if attn_mask is not None:
        raise PlanError(
            f"scaled_dot_product_attention was given a mask of shape {tuple(attn_mask.shape)}, which knows only this "
            "rank's tokens: context parallelism does causal attention without a mask"
        )
    if not is_causal:
        raise PlanError("scaled_dot_product_attention was called with is_causal=False: context parallelism is causal")
    if query.shape[-2] != key.shape[-2]:
        raise PlanError(
            f"{query.shape[-2]} queries attend to {key.shape[-2]} keys of this rank: context parallelism is for whole "
            "sequences, without cached keys"
        )
    if is_dtensor(query) or is_dtensor(key):
        raise PlanError(
            "scaled_dot_product_attention was called with DTensors: use a plan whose attention sees this rank's heads "
            "as plain tensors"
        )
