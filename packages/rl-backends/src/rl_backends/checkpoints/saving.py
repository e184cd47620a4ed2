"""Save a model of torch, its optimizers and the generators of random numbers.

Knows which tensors and figures a checkpoint has; how it is written is the affair of `writing`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from rl_backends.checkpoints.bound_state import holds_subclasses
from rl_backends.checkpoints.optimizer_state import CheckpointedOptimizers, describe_optimizers, optimizer_pieces
from rl_backends.checkpoints.pieces import Piece, device_of, held_by, mesh_of, rng_pieces
from rl_backends.checkpoints.storage import Contents
from rl_backends.checkpoints.together import fingerprint, on_all
from rl_backends.checkpoints.writing import CheckpointWrite, as_json, write_checkpoint
from rl_backends.rank_agreement import gather_text

__all__ = ["save_checkpoint"]


def save_checkpoint(
    model: nn.Module,
    optimizers: CheckpointedOptimizers | None,
    folder: str | Path,
    *,
    version: int,
    weights: bool = True,
    asynchronous: bool = False,
    extra: Mapping[str, Any] | None = None,
    frozen: Mapping[str, int] | None = None,
) -> CheckpointWrite:
    """Write weights, optimizers, schedule and random-number generators into a new folder; every rank must call it.

    Args:
        model: sharded by rl_parallel_plans, or plain.
        optimizers: None saves the weights alone.
        folder: the checkpoint to be; its parent belongs to this run, which removes what killed saves left there.
        version: optimizer steps that the weights have seen.
        weights: False leaves them out, where they lie elsewhere; the model is still remembered by names and shapes.
        asynchronous: return when everything is copied to host memory, and write while training goes on. The host needs
            room for this rank's shards of weights and moments.
        extra: what else belongs to the run, as JSON.
        frozen: weights that are left out, since they never change: their digests by name, as `frozen_digests` gives
            them. A model that loads the checkpoint must have them.

    Returns:
        The write; already complete unless `asynchronous`.

    Raises:
        CheckpointError: on every rank: it cannot be written, something is there already, or the asynchronous save
            before this one failed and nobody has been told; nothing was saved then.
    """

    def collect(group: dist.ProcessGroup | None) -> tuple[dict[str, Piece], Contents]:
        return _collect(
            model, optimizers, group, version=version, weights=weights, extra=dict(extra or {}), frozen=frozen or {}
        )

    return write_checkpoint(collect, folder, asynchronous=asynchronous)


def _collect(
    model: nn.Module,
    optimizers: CheckpointedOptimizers | None,
    group: dist.ProcessGroup | None,
    *,
    version: int,
    weights: bool,
    extra: dict[str, Any],
    frozen: Mapping[str, int],
) -> tuple[dict[str, Piece], Contents]:
    flags = [holds_subclasses(optimizer) for optimizer in optimizers.each] if optimizers is not None else []
    bound = [
        any(flags)
        for flags in zip(*(json.loads(text) for text in gather_text(json.dumps(flags), group=group)), strict=True)
    ]

    def collect() -> tuple[dict[str, Piece], Contents]:
        held = held_by(model)
        pieces = rng_pieces(device_of(held))
        state: dict[str, Any] = {"extra": as_json("extra", extra, exact=True), "optimizers": None, "schedule": None}
        state["frozen"] = dict(frozen) if weights else {}
        if weights:
            pieces |= {f"weights/{name}": each.piece() for name, each in held.items() if name not in frozen}
        if optimizers is not None:
            pieces |= optimizer_pieces(optimizers, held, bound=bound)
            state["optimizers"] = as_json("the optimizers", describe_optimizers(optimizers, held, bound=bound))
            state["schedule"] = as_json("the schedule's state", optimizers.schedule_state())
        contents = Contents(version=version, mesh=mesh_of(held), model=fingerprint(held), weights=weights, state=state)
        return pieces, contents

    return on_all(collect, group=group)
