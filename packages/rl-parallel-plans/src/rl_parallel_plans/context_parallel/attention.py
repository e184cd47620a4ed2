"""Causal attention of one rank's queries to the keys and values of all ranks: exact, for any length.

Each rank gathers the keys and values of the others in one all-gather, before they are repeated for grouped queries,
and runs one attention for each run of consecutive tokens that it holds, over the keys of its document up to the run's
end. That is a causal mask aligned to the lower right, for which torch has a flash kernel, so no mask of T² entries
exists on a GPU; documents of a packed row never meet in a call. Under a sliding window of w tokens a run is computed
w queries at a time over at most 2·w - 1 keys, with a mask of that size. In backward one reduce-scatter sums the
gradients of keys and values. This is the all-gather method of Llama 3 (arXiv:2407.21783, 3.3.2).

Axes: [B, heads, T / cp, D]; heads are this rank's where tensor parallelism shards them.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from rl_parallel_plans.context_parallel.layout import RowLayout, Run, gather_tokens, in_order, layout_of_documents
from rl_parallel_plans.dtensor import is_dtensor
from rl_parallel_plans.errors import PlanError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


_POSITIONAL = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class GatheredAttention(TorchFunctionMode):
    """While entered, scaled_dot_product_attention sees the keys and values of every rank of `cp_mesh`.

    rows: where documents begin and end, for packed rows; None where each row is one document.
    window: how many tokens a query attends to, itself included; None: all before it.
    """

    def __init__(
        self, cp_mesh: "DeviceMesh", *, rows: tuple[RowLayout, ...] | None = None, window: int | None = None
    ) -> None:
        super().__init__()
        self.cp_mesh, self.rows, self.window = cp_mesh, rows, window
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
        return gathered_attention(cp_mesh=self.cp_mesh, rows=self.rows, window=self.window, **named, **(kwargs or {}))


def gathered_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cp_mesh: "DeviceMesh",
    rows: tuple[RowLayout, ...] | None = None,
    window: int | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` of this rank's queries [B, heads, T / cp, D] over the whole sequence.

    rows, window: as of `GatheredAttention`.

    Raises PlanError for anything but causal self-attention without a mask on plain tensors.
    """
    _refuse_other_than_causal(query, key, attn_mask, is_causal=is_causal)
    from torch.distributed.tensor import Partial

    # [T, B, heads, D of keys and values]
    both = gather_tokens(torch.cat([key, value], -1), cp_mesh, dim=-2, gradient=Partial())
    options: dict[str, Any] = {"window": window, "dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
    if rows is None:
        rows = (layout_of_documents([query.shape[-2] // 2], cp_mesh.get_local_rank(), cp_mesh.size()),)
    outputs = []
    # Rows of one layout are computed together.
    batches = [slice(None)] if len(rows) == 1 else [slice(row, row + 1) for row in range(len(rows))]
    for layout, batch in zip(rows, batches, strict=True):
        ordered = in_order(both[:, batch], layout).movedim(0, -2)
        keys, values = ordered[..., : key.shape[-1]], ordered[..., key.shape[-1] :]
        outputs.append(attention_of_runs(query[batch], keys, values, runs=layout.runs, **options))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def attention_of_runs(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    runs: Sequence[Run],
    window: int | None = None,
    enable_gqa: bool = False,
    **options: Any,
) -> Tensor:
    """Causal attention of the runs of tokens that are joined in `query`, each over its document in `keys`, `values`.

    options: those of `scaled_dot_product_attention`.
    """
    if window is not None and enable_gqa:
        # The kernels that take a mask take no grouped queries: on a GPU torch would compute all scores.
        groups = query.shape[-3] // keys.shape[-3]
        keys, values, enable_gqa = keys.repeat_interleave(groups, -3), values.repeat_interleave(groups, -3), False
    outputs = []
    for queries, run in zip(torch.split(query, [run.length for run in runs], -2), runs, strict=True):
        stop = run.end - run.length
        for block in (queries,) if window is None else torch.split(queries, window, -2):
            tokens = block.shape[-2]
            stop += tokens
            start = run.first if window is None else max(run.first, stop - tokens - window + 1)
            mask: Any
            if window is not None and stop - start > window:
                mask = _window_mask(tokens, stop - start, window=window, device=query.device)
            else:
                with _disable_current_modes():  # torch cannot make it under one, as in selective checkpointing
                    mask = causal_lower_right(tokens, stop - start)
            seen = keys[..., start:stop, :], values[..., start:stop, :]
            outputs.append(scaled_dot_product_attention(block, *seen, attn_mask=mask, enable_gqa=enable_gqa, **options))
    return torch.cat(outputs, -2)


def _window_mask(queries: int, keys: int, *, window: int, device: torch.device) -> Tensor:
    """Whether each query attends to each key, where queries are the last of the keys' tokens: bool [queries, keys]."""
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    return (distance >= 0) & (distance < window)


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
