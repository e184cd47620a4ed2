"""Failures of checkpoints as every rank is told them: always a CheckpointError, always with the reason."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from rl_backends.checkpoints.pieces import Held
from rl_backends.errors import CheckpointError, RankError
from rl_backends.rank_agreement import on_every_rank, on_rank_0

__all__ = ["fingerprint", "on_all", "on_first", "told"]

T = TypeVar("T")


def on_all(action: Callable[[], T], *, group: dist.ProcessGroup | None) -> T:
    """Let every rank act.

    Raises:
        BaseException: this rank's own.
        CheckpointError: another rank failed.
    """
    try:
        return on_every_rank(action, group=group)
    except RankError as error:
        raise CheckpointError(str(error)) from error


def on_first(action: Callable[[], object], *, group: dist.ProcessGroup | None) -> None:
    """Let rank 0 act; errors as in `on_all`."""
    try:
        on_rank_0(action, group=group)
    except RankError as error:
        raise CheckpointError(str(error)) from error


def told(error: BaseException) -> str:
    """What torch's Distributed Checkpoint raises, without its tracebacks."""
    if isinstance(error, CheckpointException):
        failures = (f"rank {rank}: {type(each).__name__}: {each}" for rank, (each, _) in error.failures.items())
        return "; ".join(failures)
    return f"{type(error).__name__}: {error}"


def fingerprint(held: Mapping[str, Held]) -> dict[str, list[Any]]:
    """What makes a model this one: dtype and shape of each parameter and buffer."""
    return {name: [each.dtype, list(each.shard.shape)] for name, each in held.items()}
