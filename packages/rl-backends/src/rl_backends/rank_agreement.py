"""What ranks agree on: the same batch everywhere, errors raised together, sums over ranks.

Ranks with different weights would train a mixture of them, and ranks with different batches would each train on a part
of its own, both silently; comparing CRC-32 of the bytes finds any accident. Nothing is pickled: text crosses between
ranks as bytes.
"""

import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_backends.errors import BatchError, ModelError, RankError
from rl_backends.examples import TokenBatch, token_ids_of
from rl_parallel_plans.dtensor import has_numbers

T = TypeVar("T")

_kept: tuple[dist.ProcessGroup | None, dict[Hashable, Any]] = (None, {})
"""A process group, and what was made once for it."""


def once_per_process_group(key: Hashable, make: Callable[[], T]) -> T:
    """What `make` has made for `key` in this process group, made by the first call.

    Meshes are, since DTensor remembers the mesh of what it has done, and does it over that one, and no equal one, ever
    after: a mesh whose groups are destroyed would be met again.
    """
    global _kept  # noqa: PLW0603 - of the process group of the process
    if _kept[0] is not dist.group.WORLD:
        _kept = (dist.group.WORLD, {})
    if key not in _kept[1]:
        _kept[1][key] = make()
    return _kept[1][key]  # type: ignore[no-any-return]


def forget_process_group() -> None:
    """Let go of what was made once for a process group that was destroyed: threads of its groups would live on."""
    global _kept  # noqa: PLW0603
    _kept = (None, {})


def on_every_rank(action: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> T:
    """Let every rank act; if one fails, all raise. Every rank of `group` must call it.

    group: None for all ranks; where there is no process group, this process alone.
    """
    result: T | None = None
    error: BaseException | None = None
    try:
        result = action()
    except BaseException as caught:  # noqa: BLE001 - raised below, once the others know
        error = caught
    raise_together(error, group=group)
    return result  # type: ignore[return-value]


def on_rank_0(action: Callable[[], object], *, group: dist.ProcessGroup | None = None) -> None:
    """Let rank 0 act while the others wait; if it fails, every rank raises, as in `on_every_rank`."""
    first = not dist.is_initialized() or dist.get_rank(group) == 0
    on_every_rank(action if first else lambda: None, group=group)


def raise_together(error: BaseException | None, *, group: dist.ProcessGroup | None = None) -> None:
    """Raise on every rank if one of them has an error: this rank's own, or a RankError. All of `group` must call it."""
    texts = gather_text("" if error is None else f"{type(error).__name__}: {error}", group=group)
    if error is not None:
        raise error
    if failed := [f"rank {rank} failed: {text}" for rank, text in enumerate(texts) if text]:
        raise RankError("; ".join(failed))


def gather_text(text: str, *, group: dist.ProcessGroup | None = None) -> list[str]:
    """Every rank's text, by rank."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [text]
    data = text.encode()
    device = _device_of(group)
    length = torch.tensor(len(data), device=device)
    dist.all_reduce(length, op=dist.ReduceOp.MAX, group=group)
    if not length:
        return [""] * dist.get_world_size(group)
    padded = torch.frombuffer(bytearray(data.ljust(int(length), b"\0")), dtype=torch.uint8).to(device)
    gathered = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, padded, group=group)
    return [each.cpu().numpy().tobytes().rstrip(b"\0").decode() for each in gathered]


def told_by_last_rank(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, *, device: torch.device | str
) -> list[Tensor]:
    """What the last rank of `group`, such as the last stage of a pipeline, passes, on every rank; others pass none."""
    size = dist.get_world_size(group)
    if size == 1:
        return list(tensors)
    kinds = [[str(each.dtype).removeprefix("torch."), list(each.shape)] for each in tensors]
    kinds = json.loads(gather_text(json.dumps(kinds), group=group)[-1])
    if dist.get_rank(group) == size - 1:
        told = [each.detach().to(device).contiguous() for each in tensors]
    else:
        told = [torch.empty(shape, dtype=getattr(torch, dtype), device=device) for dtype, shape in kinds]
    for each in told:
        dist.broadcast(each, src=dist.get_global_rank(group, size - 1), group=group)
    return told


def largest_on_any_rank(number: Tensor) -> float:
    """The maximum over all ranks of a scalar on the device of their collectives; infinite where one of them is NaN."""
    largest = number.nan_to_num(nan=torch.inf)  # a maximum over ranks need not keep NaN
    if dist.get_world_size() > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def sums_of_last_rank(
    sums: Mapping[str, Tensor], group: dist.ProcessGroup, *, device: torch.device
) -> dict[str, Tensor]:
    """The same of named scalars."""
    names = json.loads(gather_text(json.dumps(list(sums)), group=group)[-1])
    told = told_by_last_rank([torch.stack(list(sums.values()))] if sums else [], group, device=device)
    return dict(zip(names, told[0].unbind(), strict=True)) if names else {}


def host_group() -> dist.ProcessGroup | None:
    """All ranks over the host's network, apart from the collectives of training; None without a process group.

    Made by the first call, which every rank must take part in. A rank waits for another as long as in training.
    """
    if not dist.is_initialized():
        return None

    def make() -> dist.ProcessGroup:
        world: Any = dist.group.WORLD
        options = world._get_backend(torch.device(_device_of(world))).options  # noqa: SLF001 - no public one
        made: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=options._timeout)  # noqa: SLF001
        return made

    return once_per_process_group("host group", make)


def _device_of(group: dist.ProcessGroup | None) -> str:
    """Where the tensors of collectives must lie."""
    backend = dist.get_backend(group)
    return "cuda" if "nccl" in backend and "gloo" not in backend else "cpu"


def require_same_model(model: nn.Module) -> None:
    """Compare names, shapes and dtypes of all parameters and buffers, and their bits where they have numbers.

    Every rank must call it. The weights are read once, through the host's memory.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    described = [f"{name} {each.dtype} {tuple(each.shape)} {each.is_meta}" for name, each in tensors.items()]
    if _differ(crc32("\n".join(described).encode())):
        numbers = sum(tensor.numel() for tensor in tensors.values())
        dtypes = ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}))
        on_meta = ", on the meta device" if any(tensor.is_meta for tensor in tensors.values()) else ""
        own_text = f"{type(model).__qualname__} of {len(tensors)} tensors, {numbers} numbers, {dtypes}{on_meta}"
        models = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(gather_text(own_text)))
        raise ModelError(f"every rank must be given the same model, and these are different ones: {models}")
    if all(map(has_numbers, tensors.values())):
        own = torch.tensor([_digest([tensor]) for tensor in tensors.values()], device=_device_of(None))
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, own)
        apart = torch.stack(gathered).cpu() != gathered[0].cpu()
        if apart.any():
            first = int(apart.any(0).int().argmax())
            ranks = apart[:, first].nonzero()[:, 0].tolist()
            shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
            raise ModelError(
                f"every rank must be given the same weights, and {list(tensors)[first]} of "
                f"rank{'s' if len(ranks) > 1 else ''} {shown} is not what rank 0 has: load the same files on every "
                f"rank, set the same seed before the model is made, or use from_pretrained"
            )


def require_same_batch(examples: TokenBatch, *, with_token_ids: bool = False) -> None:
    """Compare tokens, lengths and which tokens train; every rank must call it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
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


def require_same_deal(dealt: Any) -> None:
    """Compare what the ranks know of the whole batch; all must call it.

    dealt: `DealtRows`, of which lengths and trainable tokens of all rows are the same everywhere.
    """
    together = dist.is_initialized() and dist.get_world_size() > 1
    if together and _differ(_digest([dealt.lengths, dealt.asked], crc32(f"{dealt.examples.rows_per_unit}".encode()))):
        raise BatchError("the ranks were given rows of different batches: deal one batch to all of them")


def _differ(digest: int, group: dist.ProcessGroup | None = None) -> bool:
    """Whether ranks have other digests: one small reduction."""
    extremes = torch.tensor([digest, -digest], device=_device_of(group))
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    most, least = extremes.tolist()
    return bool(most != -least)


def _digest(tensors: Iterable[Tensor], start: int = 0) -> int:
    for tensor in tensors:
        start = crc32(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data, start)
    return start


def add_up(sums: Mapping[str, Tensor], group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Scalars by name, added over the ranks of `group`; float64, which counts every token."""
    names = sorted(sums)
    together = dist.get_world_size(group) > 1
    if together and _differ(crc32("\n".join(names).encode()), group):
        raise ValueError(
            f"ranks returned sums of different names, {names} here; a loss must return the same names for any rows"
        )
    if not names:
        return {}
    stacked = torch.stack([sums[name].to(torch.float64) for name in names])
    if together:
        dist.all_reduce(stacked, group=group)
    return dict(zip(names, stacked.unbind(), strict=True))
