"""What ranks do together such that none waits for one that has failed: each learns of any failure, in words.

Knows process groups; does not know what is done. Nothing is pickled: text crosses between ranks as bytes.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rl_backends.errors import RankError

__all__ = ["forget_host_group", "gather_text", "host_group", "on_every_rank", "on_rank_0", "raise_together"]

T = TypeVar("T")

_host_groups: dict[int, tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}
"""The world that a group spans, and the group, by the identity of that world."""


def on_every_rank(action: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> T:
    """Let every rank act; if one fails, all raise. Every rank of `group` must call it.

    group: None for all ranks; where there is no process group, this process alone.

    Raises:
        BaseException: this rank's own.
        RankError: other ranks', told in words.
    """
    result: T | None = None
    error: BaseException | None = None
    try:
        result = action()
    except BaseException as caught:  # noqa: BLE001 - raised below, once the others know
        error = caught
    texts = gather_text("" if error is None else f"{type(error).__name__}: {error}", group=group)
    if error is not None:
        raise error
    if failed := [f"rank {rank} failed: {text}" for rank, text in enumerate(texts) if text]:
        raise RankError("; ".join(failed))
    return result  # type: ignore[return-value]


def on_rank_0(action: Callable[[], object], *, group: dist.ProcessGroup | None = None) -> None:
    """Let rank 0 act while the others wait; if it fails, every rank raises, as in `on_every_rank`."""
    first = not dist.is_initialized() or dist.get_rank(group) == 0
    on_every_rank(action if first else lambda: None, group=group)


def raise_together(error: BaseException | None, *, group: dist.ProcessGroup | None = None) -> None:
    """Raise on every rank where one of them has an error, as `on_every_rank` would have."""

    def raise_it() -> None:
        if error is not None:
            raise error

    on_every_rank(raise_it, group=group)


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
    return [bytes(each.tolist()).rstrip(b"\0").decode() for each in gathered]


def host_group() -> dist.ProcessGroup | None:
    """All ranks over the host's network, apart from the collectives of training; None without a process group.

    Made by the first call, which every rank must take part in. A rank waits for another as long as in training.
    """
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None:
        return None
    if id(world) not in _host_groups:
        _host_groups.clear()  # those of a process group that was destroyed
        _host_groups[id(world)] = world, dist.new_group(backend="gloo", timeout=_timeout_of(world))
    return _host_groups[id(world)][1]


def forget_host_group() -> None:
    """Let go of it, whose process group was destroyed: its threads would live on."""
    _host_groups.clear()


def _device_of(group: dist.ProcessGroup | None) -> str:
    """Where the tensors of collectives must lie."""
    backend = dist.get_backend(group)
    return "cuda" if "nccl" in backend and "gloo" not in backend else "cpu"


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    options: Any = group._get_backend(torch.device(_device_of(group))).options  # noqa: SLF001 - no public one
    timeout: timedelta = options._timeout  # noqa: SLF001
    return timeout
