"""Causal attention in plain torch, as megatron-core's `core_attention`: for machines without Transformer Engine.

On a GPU use Transformer Engine's attention, which does the same in fused kernels and overlaps communication. Megatron's
own torch attention can neither read packed rows nor be cut over context-parallel ranks, which this does, exactly.

Rows are computed one by one, neighbours of equal length together, so that no score between two rows exists. Under
context parallelism a rank holds chunks r and 2·cp - 1 - r of each row's 2·cp, gathers the keys and values of all ranks
in one all-gather (before they are repeated for grouped queries), and runs one attention per chunk over the keys up to
its end; backward sums the gradients of keys and values in one reduce-scatter: the all-gather method of Llama 3
(arXiv:2407.21783, 3.3.2).

Memory: torch's kernels store no scores; on a CPU those of rows of up to 128 tokens are kept. A mask is made for a
sliding window shorter than the row, and for every chunk but a row's first: chunk x (keys up to its end), or, with a
window, chunk x (chunk + window).

Axes: S tokens of a rank's part of a row, b rows, t tokens of a rank's part of a pack; Q query heads, K key heads (both
this rank's under tensor parallelism), D features of a head; n neighbours of equal length L, of a rank's tokens.
"""

from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from rl_backends.errors import ModelError
from rl_backends.megatron.cpu_compat import no_cuda_calls
from rl_backends.packing.attention import LONGEST_MULTIPLIED, RowsOnCpu, attention_on_cpu, is_flash_of_cpu

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Run = tuple[Tensor, Tensor, Tensor]
"""Queries [n, L, Q, D], and keys and values of every context-parallel rank [cp, n, L, K, D]."""


class TorchAttention(nn.Module):
    """Causal self-attention without dropout; what else a configuration asks for is refused, never left out."""

    def __init__(  # noqa: PLR0917 - as Megatron's Attention builds it
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        *,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        sliding_window: int | None = None,
    ) -> None:
        """As megatron-core builds its `core_attention`."""
        super().__init__()
        self.layer_number = layer_number
        self.sliding_window = sliding_window
        self.softmax_scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5
        self.cp_group: ProcessGroup = pg_collection.cp
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self._refuse(
            {
                f"attention_dropout={dropout}": dropout,
                f"softmax_type={config.softmax_type!r}": config.softmax_type != "vanilla",
                f"window_size={config.window_size} (give sliding_window)": config.window_size,
                "apply_query_key_layer_scaling": config.apply_query_key_layer_scaling,
                "qk_clip": config.qk_clip,
                f"attention_type={attention_type!r}": attention_type != "self",
                f"attn_mask_type={attn_mask_type.name}": not _is_causal(attn_mask_type),
            }
        )
        if sliding_window is not None and sliding_window < 1:
            raise ModelError(f"sliding_window={sliding_window} must be >= 1: a token sees at least itself; or None")

    def forward(  # noqa: PLR0917 - as Megatron's Attention calls it
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Each token's attention to those of its row up to itself: [S, b, Q·D], or [t, Q, D] of packed rows.

        Queries are [S, b, Q, D], or [t, Q, D] of packed rows; keys and values have K heads, where K divides Q. Packed
        rows are "thd"; their lengths are those over all context-parallel ranks, multiples of 2·cp.
        """
        packed = packed_seq_params
        self._refuse(
            {
                "attention_mask": attention_mask is not None,
                "attention_bias": attention_bias is not None,
                f"attn_mask_type={getattr(attn_mask_type, 'name', None)}": attn_mask_type is not None
                and not _is_causal(attn_mask_type),
                "packed_seq_params.cp_group": packed is not None and packed.cp_group is not None,
                "packed_seq_params.local_cp_size": packed is not None and packed.local_cp_size is not None,
                "a qkv_format other than 'thd'": packed is not None and packed.qkv_format != "thd",
            }
        )
        with no_cuda_calls():
            held = [len(query)] if packed is None else self._held(packed, num_tokens=query.shape[0])
            short = packed is not None or len(query) <= LONGEST_MULTIPLIED
            if short and self.cp_group.size() == 1 and self.sliding_window is None:
                tokens = [each.flatten(0, -3) for each in (query, key, value)]
                if is_flash_of_cpu(*(each.transpose(0, 1)[None] for each in tokens), scale=self.softmax_scale):
                    rows = RowsOnCpu.packed(_starts(packed)) if packed else RowsOnCpu.side_by_side(*query.shape[1::-1])
                    attended = attention_on_cpu(*tokens, rows=rows, scale=self.softmax_scale)
                    return attended if packed else attended.view(*query.shape[:2], -1)
            keys, values = _of_all_ranks(key, value, self.cp_group)
            if packed is None:
                whole = query.transpose(0, 1), keys.transpose(1, 2), values.transpose(1, 2)
                return self._attend(*whole).transpose(0, 1).flatten(2)
            runs = _runs(query, keys, values, held=held)
            return torch.cat([self._attend(*run).flatten(0, 1) for run in runs])

    def _held(self, packed: Any, *, num_tokens: int) -> list[int]:
        """Tokens of each packed row that this rank holds."""
        ranks = self.cp_group.size()
        lengths = _starts(packed).diff().tolist()
        if ranks > 1 and any(length % (2 * ranks) for length in lengths):
            raise ModelError(
                f"packed rows have {lengths} tokens over {ranks} context-parallel ranks: pad each to a multiple of "
                f"{2 * ranks}, so that every rank holds two chunks of it"
            )
        if sum(lengths) != num_tokens * ranks:
            raise ModelError(
                f"packed rows have {sum(lengths)} tokens, and {ranks} context-parallel ranks hold {num_tokens} each: "
                f"cu_seqlens are those of whole rows, over all ranks"
            )
        return [length // ranks for length in lengths]

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[n, L, Q, D] of the tokens of one `Run`."""
        ranks, rank = keys.shape[0], self.cp_group.rank()
        numbers = [0] if ranks == 1 else [rank, 2 * ranks - 1 - rank]  # whole rows, or two chunks of each
        keys, values = _in_order(keys), _in_order(values)
        out = []
        for number, queries in zip(numbers, query.chunk(len(numbers), dim=1), strict=True):
            chunk = queries.shape[1]
            begin, end = number * chunk, (number + 1) * chunk
            window = end if self.sliding_window is None else self.sliding_window
            first = max(0, begin + 1 - window)  # the first key that one of the chunk's queries sees
            mask = None if end <= min(window, chunk) else _seen(begin, end, first=first, window=window, of=query)
            attended = F.scaled_dot_product_attention(
                queries.transpose(1, 2),
                keys[:, :, first:end],
                values[:, :, first:end],
                attn_mask=mask,
                is_causal=mask is None,
                scale=self.softmax_scale,
                enable_gqa=query.shape[2] != keys.shape[1],
            )
            out.append(attended.transpose(1, 2))
        return out[0] if ranks == 1 else torch.cat(out, dim=1)

    def _refuse(self, asked: dict[str, Any]) -> None:
        if left_out := [name for name, given in asked.items() if given]:
            raise ModelError(
                f"layer {self.layer_number} asks for {', '.join(left_out)}, which attention in plain torch leaves out: "
                f"do not ask, or use Transformer Engine's attention on a GPU"
            )


class _Gather(torch.autograd.Function):
    """Every rank's tensor, one after the other in a new first dim; backward sums what each rank wants of them."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: "ProcessGroup") -> Tensor:
        ctx.group = group
        out = tensor.new_empty(group.size() * len(tensor), *tensor.shape[1:])
        dist.all_gather_single(out, tensor.contiguous(), group=group)
        return out.view(group.size(), *tensor.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        out = gradient.new_empty(gradient.shape[1:])
        dist.reduce_scatter_single(out, gradient.flatten(0, 1).contiguous(), group=ctx.group)
        return out, None


def _of_all_ranks(key: Tensor, value: Tensor, group: "ProcessGroup") -> tuple[Tensor, Tensor]:
    """Both with one more dim in front, that of context-parallel ranks."""
    if group.size() == 1:
        return key[None], value[None]
    both: Tensor = _Gather.apply(torch.cat([key, value], dim=-1), group)  # type: ignore[no-untyped-call]
    return both[..., : key.shape[-1]], both[..., key.shape[-1] :]


def _starts(packed: Any) -> Tensor:
    """Where whole packed rows begin, and the end of the last."""
    starts: Tensor = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    return starts


def _runs(query: Tensor, keys: Tensor, values: Tensor, *, held: list[int]) -> list[Run]:
    """Packed rows, neighbours of equal length together, of [t, Q, D] and [cp, t, K, D]."""
    runs = [(length, len(list(run))) for length, run in groupby(held)]  # length and number of neighbours of it
    sizes = [length * rows for length, rows in runs]
    # One split, whose backward is one concatenation; a slice for each row would add up as many gradients of the pack.
    parts = [torch.split(tensor, sizes, dim=-3) for tensor in (query, keys, values)]
    return [
        (
            of_run[0].view(rows, length, *query.shape[1:]),
            of_run[1].view(-1, rows, length, *keys.shape[2:]),
            of_run[2].view(-1, rows, length, *values.shape[2:]),
        )
        for (length, rows), *of_run in zip(runs, *parts, strict=True)
    ]


def _in_order(of_ranks: Tensor) -> Tensor:
    """[n, K, cp · L, D] in the order of each row's tokens, from the two chunks of each rank [cp, n, L, K, D]."""
    if len(of_ranks) == 1:
        return of_ranks[0].transpose(1, 2)
    heads, tails = of_ranks.chunk(2, dim=2)
    chunks = torch.cat([heads, tails.flip(0)])  # [2 · cp, n, L / 2, K, D]
    return chunks.permute(1, 3, 0, 2, 4).flatten(2, 3)


def _seen(begin: int, end: int, *, first: int, window: int, of: Tensor) -> Tensor:
    """Which of the keys `first` to `end` each query from `begin` to `end` sees: itself and the window - 1 before it."""
    queries = torch.arange(begin, end, device=of.device)[:, None]
    keys = torch.arange(first, end, device=of.device)
    return (keys <= queries) & (keys > queries - window)


def _is_causal(attn_mask_type: Any) -> bool:
    return attn_mask_type.name in {"causal", "padding_causal"}
