"""Whether all ranks were given the same model and the same batch: digests are compared, never the numbers themselves.

Ranks of different weights would train a mixture of them, and ranks of different batches would each train on a part of
its own; both silently. CRC-32 of the bytes finds any accident. Nothing is pickled.
"""

from collections.abc import Iterable
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_backends.batching.words import token_ids_of
from rl_backends.errors import BatchError, ModelError
from rl_backends.examples import TokenBatch
from rl_backends.ranks import gather_text
from rl_parallel_plans.dtensor import has_numbers

__all__ = ["require_same_batch", "require_same_model"]


def require_same_model(model: nn.Module) -> None:
    """Compare names, shapes and dtypes of all parameters and buffers, and their bits where they have numbers.

    Every rank must call it. The weights are read once, through the host's memory.

    Raises:
        ModelError: on every rank; ranks have other weights, or other models.
    """
    if not _several_ranks():
        return
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if _differ(crc32("\n".join(map(_described, tensors, tensors.values())).encode())):
        models = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(gather_text(_summary(model, tensors))))
        raise ModelError(f"every rank must be given the same model, and these are different ones: {models}")
    if all(map(has_numbers, tensors.values())) and (difference := _first_difference(tensors)) is not None:
        name, ranks = difference
        raise ModelError(
            f"every rank must be given the same weights, and {name} of {_named(ranks)} is not what rank 0 has: load "
            f"the same files on every rank, set the same seed before the model is made, or use from_pretrained"
        )


def require_same_batch(examples: TokenBatch, *, with_token_ids: bool = False) -> None:
    """Compare tokens, lengths and which tokens train; every rank must call it.

    Args:
        examples: of this rank.
        with_token_ids: compare `examples.token_ids` as well: ranks that share a row must ask about the same words.

    Raises:
        BatchError: on every rank; the ranks have other batches.
    """
    if not _several_ranks():
        return
    tensors = [examples.tokens, examples.lengths, examples.trainable]
    if with_token_ids and (token_ids := token_ids_of(examples)) is not None:
        tensors.append(token_ids)
    kind = " ".join(f"{each.dtype} {tuple(each.shape)}" for each in tensors)
    if _differ(_digest(tensors, crc32(f"{kind} {examples.rows_per_unit}".encode()))):
        texts = gather_text(f"{examples.tokens.shape[0]} rows, {int(examples.lengths.sum())} tokens")
        batches = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
        raise BatchError(
            f"every rank must be given the whole batch, and the ranks were given different ones ({batches}): leave out "
            f"a DistributedSampler, since the backend deals the rows to the ranks itself, and shuffle by the same seed"
        )


def _several_ranks() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _differ(digest: int) -> bool:
    """Whether ranks have other digests: one small reduction."""
    extremes = torch.tensor([digest, -digest], device=_device())
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    most, least = extremes.tolist()
    return bool(most != -least)


def _first_difference(tensors: dict[str, Tensor]) -> tuple[str, list[int]] | None:
    """The first tensor that is not alike everywhere, and the ranks where it is not what rank 0 has."""
    own = torch.tensor([_digest([tensor]) for tensor in tensors.values()], device=_device())
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    apart = torch.stack(gathered).cpu() != gathered[0].cpu()
    if not apart.any():
        return None
    first = int(apart.any(0).int().argmax())
    return list(tensors)[first], apart[:, first].nonzero()[:, 0].tolist()


def _digest(tensors: Iterable[Tensor], start: int = 0) -> int:
    for tensor in tensors:
        start = crc32(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data, start)
    return start


def _device() -> str:
    """Where collectives of all ranks take tensors from; the host, if they can."""
    backend = dist.get_backend()
    return "cuda" if "nccl" in backend and "gloo" not in backend else "cpu"


def _described(name: str, tensor: Tensor) -> str:
    return f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.is_meta}"


def _summary(model: nn.Module, tensors: dict[str, Tensor]) -> str:
    numbers = sum(tensor.numel() for tensor in tensors.values())
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
    on_meta = ", on the meta device" if any(tensor.is_meta for tensor in tensors.values()) else ""
    return f"{type(model).__qualname__} of {len(tensors)} tensors, {numbers} numbers, {', '.join(dtypes)}{on_meta}"


def _named(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
