"""Bindings for the storage of engines and of Megatron: fused, stacked, padded and sharded tensors.

Knows shapes, no engine: each function takes this rank's tensor, the Hugging Face names that it holds and the numbers
that say how, and gives the box of every name with the view where it lies. What it is told is checked against the
tensor's shape; that the engine does keep its weights so, only `trace` can tell.

Rank r of n along tensor parallelism holds the r-th of n equal slices. Attention: n divides the query heads, and n
divides the KV heads or is divided by them; then n / num_kv_heads ranks hold the same KV head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from torch import Tensor, nn

from rl_refit.layout import Region
from rl_refit.module_tensors import Binding

__all__ = [
    "fused_gate_up",
    "fused_qkv",
    "mixtral_bindings",
    "mixtral_name",
    "padded_vocabulary",
    "sharded",
    "stacked_experts",
]

GateUp = Literal["gate_up", "up_gate"]
QKV = Literal["q_k_v", "by_group"]
_Rows = tuple[str, int, int, int]
"""Name, first row, number of rows, and rows of the whole tensor."""


def sharded(param: Tensor, name: str, *, dim: int | None, tp_rank: int = 0, tp_size: int = 1) -> list[Binding]:
    """One tensor cut along `dim`: row-parallel and column-parallel weights; whole on every rank where `dim` is None.

    Args:
        param: This rank's part.
        name: The tensor's Hugging Face name.
        dim: Which dim of it is cut; None for none, and the other numbers do not matter.
        tp_rank: Which slice.
        tp_size: How many equal slices.
    """
    _check_rank("tp", tp_rank, tp_size)
    shape = list(param.shape)
    offsets = [0] * len(shape)
    if dim is not None:
        offsets[dim], shape[dim] = tp_rank * shape[dim], tp_size * shape[dim]
    return _bound(param, Region(name, tuple(offsets), tuple(param.shape)), tuple(shape))


def padded_vocabulary(
    param: Tensor, name: str, *, vocabulary_size: int, tp_rank: int = 0, tp_size: int = 1
) -> list[Binding]:
    """An embedding or a head whose rows are padded to a multiple and cut over the ranks: `[rows, H]`, or `[rows]`.

    Rank r holds the rows from `r * len(param)` on. Rows past the vocabulary are bound to nothing: a sink counts them
    and asks that the tensor is declared constant. A rank may hold padding only; then there is no binding.

    Raises:
        ValueError: The ranks hold fewer rows than the vocabulary has.
    """
    _check_rank("tp", tp_rank, tp_size)
    rows = param.shape[0]
    if rows * tp_size < vocabulary_size:
        raise ValueError(
            f"{name!r} has vocabulary_size={vocabulary_size} rows, and tp_size={tp_size} ranks of {rows} rows hold "
            f"{rows * tp_size}"
        )
    start = min(tp_rank * rows, vocabulary_size)
    count = min(rows, vocabulary_size - start)
    return _bound(param[:count], _rows(name, start, param[:count]), (vocabulary_size, *param.shape[1:]))


def fused_qkv(
    param: Tensor,
    names: tuple[str, str, str],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    tp_rank: int = 0,
    tp_size: int = 1,
    order: QKV = "q_k_v",
) -> list[Binding]:
    """The query, key and value projections in one: `[(q + 2 kv) * head_dim, H]`, or the same without H for a bias.

    Args:
        param: This rank's part.
        names: Of q, k and v; weights, or biases.
        num_heads: Query heads over all ranks.
        num_kv_heads: KV heads over all ranks, each counted once.
        head_dim: Rows of a head.
        tp_rank: This rank.
        tp_size: How many ranks.
        order: "q_k_v" as vLLM and SGLang, all query heads first; "by_group" as Megatron, each KV group's query heads,
            then its key, then its value. Megatron's grouping needs at least one group a rank.

    Raises:
        ValueError: The heads cannot be spread so, or `param` does not have the rows of its heads.
    """
    _check_rank("tp", tp_rank, tp_size)
    heads, kv_heads = _local_heads(num_heads, num_kv_heads, tp_size=tp_size, order=order)
    _check_rows(param, ", ".join(names), (heads + 2 * kv_heads) * head_dim)
    first = (tp_rank * heads, *2 * (tp_rank * num_kv_heads // tp_size,))
    count, total = (heads, kv_heads, kv_heads), (num_heads, num_kv_heads, num_kv_heads)
    groups = 1 if order == "q_k_v" else kv_heads
    blocks: list[_Rows] = []
    for group in range(groups):
        for name, start, number, size in zip(names, first, count, total, strict=True):
            each = number // groups
            blocks.append((name, (start + group * each) * head_dim, each * head_dim, size * head_dim))
    return _stacked_rows(param, blocks)


def fused_gate_up(
    param: Tensor, names: tuple[str, str], *, tp_rank: int = 0, tp_size: int = 1, order: GateUp = "gate_up"
) -> list[Binding]:
    """The gate and the up projection in one: `[2 I / tp, H]`, or `[2 I / tp]`.

    Args:
        param: This rank's part.
        names: Of gate and up, in this order, whatever `order` says.
        tp_rank: This rank.
        tp_size: How many ranks.
        order: Which half comes first in memory.

    Raises:
        ValueError: `param` has an odd number of rows.
    """
    _check_rank("tp", tp_rank, tp_size)
    if order not in {"gate_up", "up_gate"}:
        raise ValueError(f"order={order!r} is neither 'gate_up' nor 'up_gate'")
    if param.shape[0] % 2:
        raise ValueError(f"{' and '.join(names)} are halves of {list(param.shape)}, whose first dim is odd")
    rows = param.shape[0] // 2
    halves = names if order == "gate_up" else names[::-1]
    return _stacked_rows(param, [(name, tp_rank * rows, rows, tp_size * rows) for name in halves])


def mixtral_name(name: str) -> str:
    """The name that Mixtral's checkpoints, and engines that load them, have for a parameter of transformers 5.

    For `rename=`, together with `bindings=mixtral_bindings`: `ModuleSource(policy, rename=mixtral_name,
    bindings=mixtral_bindings)`.
    """
    return name.replace(".mlp.gate.", ".block_sparse_moe.gate.")


def mixtral_bindings(module: nn.Module) -> Iterator[Binding]:
    """The experts of Mixtral in transformers 5, unsharded, under the names of its checkpoints: w1, w3 and w2.

    Args:
        module: A `MixtralForCausalLM`, or a model that contains one under the same names. It keeps the experts of a
            layer in `mlp.experts.gate_up_proj`, [E, 2 I, H] with gate (w1) first, and `mlp.experts.down_proj`,
            [E, H, I].

    Raises:
        ValueError: It has no such experts.
    """
    found = False
    for name, param in module.named_parameters():
        prefix, _, last = name.rpartition(".")
        if not prefix.endswith(".mlp.experts") or last not in ("gate_up_proj", "down_proj"):
            continue
        found = True
        experts = [f"{prefix.replace('.mlp.', '.block_sparse_moe.')}.{expert}" for expert in range(len(param))]
        if last == "gate_up_proj":
            pairs = [(f"{expert}.w1.weight", f"{expert}.w3.weight") for expert in experts]
            yield from stacked_experts(param.detach(), pairs, part="gate_up")
        else:
            yield from stacked_experts(param.detach(), [f"{expert}.w2.weight" for expert in experts], part="down")
    if not found:
        raise ValueError(
            f"{type(module).__name__} has no mlp.experts.gate_up_proj and mlp.experts.down_proj, as Mixtral has in "
            f"transformers 5; earlier releases keep an expert a module, under the names of the checkpoint: leave out "
            f"bindings= and rename="
        )


def stacked_experts(
    param: Tensor,
    names: Sequence[str] | Sequence[tuple[str, str]],
    *,
    part: Literal["gate_up", "down"],
    order: GateUp = "gate_up",
    tp_rank: int = 0,
    tp_size: int = 1,
    ep_rank: int = 0,
    ep_size: int = 1,
) -> list[Binding]:
    """The experts of a layer in one: w13 `[E / ep, 2 I / tp, H]`, or w2 `[E / ep, H, I / tp]`.

    Args:
        param: This rank's part.
        names: Of all E experts in their order: pairs of gate and up, or the names of down.
        part: Which of the two `param` is.
        order: Which half of w13 comes first in memory.
        tp_rank: This rank's slice of I.
        tp_size: How many slices of I.
        ep_rank: This rank's run of experts.
        ep_size: How many equal runs.

    Raises:
        ValueError: `ep_size` does not divide E, or `param` does not have the experts of its run.
    """
    _check_rank("tp", tp_rank, tp_size)
    _check_rank("ep", ep_rank, ep_size)
    if len(names) % ep_size:
        raise ValueError(f"ep_size={ep_size} must divide the {len(names)} experts")
    local = len(names) // ep_size
    _check_rows(param, f"{part} of {len(names)} experts", local)
    bindings: list[Binding] = []
    for expert, name in zip(param, names[ep_rank * local : (ep_rank + 1) * local], strict=True):
        if isinstance(name, str) != (part == "down"):
            raise ValueError(
                f"part={part!r} needs {'a name' if part == 'down' else 'two names'} an expert; got {name!r}"
            )
        if isinstance(name, str):
            bindings += sharded(expert, name, dim=1, tp_rank=tp_rank, tp_size=tp_size)
        else:
            bindings += fused_gate_up(expert, (name[0], name[1]), tp_rank=tp_rank, tp_size=tp_size, order=order)
    return bindings


def _stacked_rows(param: Tensor, blocks: Sequence[_Rows]) -> list[Binding]:
    bindings: list[Binding] = []
    place = 0
    for name, first, count, total in blocks:
        view = param[place : place + count]
        bindings += _bound(view, _rows(name, first, view), (total, *param.shape[1:]))
        place += count
    return bindings


def _rows(name: str, first: int, view: Tensor) -> Region:
    return Region(name, (first, *[0] * (view.dim() - 1)), tuple(view.shape))


def _bound(view: Tensor, region: Region, shape: tuple[int, ...]) -> list[Binding]:
    """One binding, or none where the box is empty."""
    return [Binding(region, shape, view.detach())] if region.numel else []


def _local_heads(num_heads: int, num_kv_heads: int, *, tp_size: int, order: QKV) -> tuple[int, int]:
    numbers = f"num_heads={num_heads}, num_kv_heads={num_kv_heads}, tp_size={tp_size}"
    if order not in {"q_k_v", "by_group"}:
        raise ValueError(f"order={order!r} is neither 'q_k_v' nor 'by_group'")
    if num_heads % tp_size or num_heads % num_kv_heads:
        raise ValueError(f"tp_size and num_kv_heads must divide num_heads; got {numbers}")
    if num_kv_heads % tp_size and (tp_size % num_kv_heads or order == "by_group"):
        rule = "divide num_kv_heads" + " or be divided by it" * (order == "q_k_v")
        raise ValueError(f"tp_size must {rule} with order={order!r}; got {numbers}")
    return num_heads // tp_size, max(1, num_kv_heads // tp_size)


def _check_rank(axis: str, rank: int, size: int) -> None:
    if not 0 <= rank < size:
        raise ValueError(f"{axis}_rank must be at least 0 and less than {axis}_size; got {rank} of {size}")


def _check_rows(param: Tensor, name: str, expected: int) -> None:
    if param.shape[0] != expected:
        raise ValueError(f"{name}: this rank holds {expected} in dim 0, and the tensor is {list(param.shape)}")
