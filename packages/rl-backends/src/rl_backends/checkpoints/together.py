"""Failures of checkpoints as every rank is told them: always a CheckpointError, always with the reason."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from rl_backends.checkpoints.pieces import Held
from rl_backends.errors import CheckpointError, RankError
from rl_backends.rank_agreement import gather_text, on_every_rank, on_rank_0

__all__ = ["described_by_all", "fingerprint", "of_stage", "on_all", "on_first", "told"]

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


def described_by_all(
    model: Mapping[str, list[Any]], optimizers: Sequence[Mapping[str, Any]] | None, *, group: dist.ProcessGroup | None
) -> tuple[dict[str, list[Any]], list[dict[str, Any]] | None]:
    """Fingerprint and description of the optimizers of all pipeline stages, from those of each; a collective."""
    names: dict[str, list[Any]] = {}
    merged: list[dict[str, Any]] | None = None if optimizers is None else []
    for text in gather_text(json.dumps([dict(model), optimizers]), group=group):
        theirs, described = json.loads(text)
        names |= theirs
        for index, each in enumerate(described or ()):
            assert merged is not None
            if index == len(merged):
                merged.append({**each, "groups": [], "state": {}})
            merged[index]["state"] |= each["state"]
            for part in each["groups"]:
                same = [group for group in merged[index]["groups"] if group["options"] == part["options"]]
                if not same:
                    merged[index]["groups"].append({"names": [], "options": part["options"]})
                known = (same or merged[index]["groups"][-1:])[0]["names"]
                known += [name for name in part["names"] if name not in known]
    return names, merged


def of_stage(saved: Sequence[Mapping[str, Any]], held: Mapping[str, Held]) -> list[dict[str, Any]]:
    """What a checkpoint says of the optimizers, of the parameters that one pipeline stage holds."""
    parts = []
    for each in saved:
        groups = [{**group, "names": [name for name in group["names"] if name in held]} for group in each["groups"]]
        state = {name: values for name, values in each["state"].items() if name in held}
        parts.append({**each, "groups": [group for group in groups if group["names"]], "state": state})
    return parts


def fingerprint(held: Mapping[str, Held]) -> dict[str, list[Any]]:
    """What makes a model this one: dtype and shape of each parameter and buffer."""
    return {name: [each.dtype, list(each.shard.shape)] for name, each in held.items()}
