"""Save a model of Megatron, its optimizer and the generators of random numbers, in the coordinates of Hugging Face.

Every box is written once, whichever ranks hold it. Weights that the optimizer keeps in float32 are saved in float32,
and nothing in 16 bits beside them. Megatron's own checkpoints are not used: they are pickles, and without Transformer
Engine those of the distributed optimizer do not come back as they were (seen in 0.16.1).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rl_backends.checkpoints import CheckpointWrite
from rl_backends.checkpoints.dcp import Contents
from rl_backends.checkpoints.saving import as_json, other_ranks_failures, write_checkpoint
from rl_backends.checkpoints.shards import TensorShard, num_ranks, rng_shards, whole_tensor
from rl_backends.megatron.checkpoint.description import MASTER, Description, describe, device_of, held_with
from rl_backends.megatron.checkpoint.masters import Master, masters_of
from rl_backends.megatron.mapping import HeldTensor
from rl_backends.megatron.optimizer import MegatronOptimizers
from rl_backends.rank_agreement import on_every_rank

__all__ = ["save_checkpoint"]


@other_ranks_failures()
def save_checkpoint(
    held: Sequence[HeldTensor],
    optimizers: MegatronOptimizers | None,
    folder: str | Path,
    *,
    version: int,
    layout: Mapping[str, int],
    weights: bool = True,
    asynchronous: bool = False,
    extra: Mapping[str, Any] | None = None,
) -> CheckpointWrite:
    """Write weights, optimizer, schedule and random-number generators into a new folder; every rank must call it.

    Args:
        held: everything that this rank holds of the model.
        optimizers: None saves the weights alone.
        folder: the checkpoint to be; its parent belongs to this run, which removes what killed saves left there.
        version: optimizer steps that the weights have seen.
        layout: sizes of the axes that the model is laid over, for people.
        weights: False leaves them out, where they lie elsewhere; float32 masters are then saved as state.
        asynchronous: return when everything is copied to host memory, and write while training goes on.
        extra: what else belongs to the run, as JSON.

    Returns:
        The write; already complete unless `asynchronous`.

    Raises:
        CheckpointError: on every rank: see `rl_backends.checkpoints.save_checkpoint`.
    """

    def collect(group: dist.ProcessGroup | None) -> tuple[dict[str, TensorShard], Contents]:
        masters = [] if optimizers is None else masters_of(optimizers)
        description = describe(held, optimizers, masters, group=group)

        def contents() -> Contents:
            state: dict[str, Any] = {"optimizers": None, "schedule": None}
            if optimizers is not None:
                state["optimizers"] = description.optimizers(masters=not weights)
                state["schedule"] = as_json("the schedule's state", optimizers.schedule_state())
            return Contents(
                version=version,
                mesh={"ranks": num_ranks(), "axes": dict(layout)},
                model=description.weights() if weights else description.model,
                weights=weights,
                state={"extra": as_json("extra", dict(extra or {}), exact=True), **state},
            )

        return _pieces(held, masters, description, weights=weights), on_every_rank(contents, group=group)

    return write_checkpoint(collect, folder, asynchronous=asynchronous)


def _pieces(
    held: Sequence[HeldTensor], masters: Sequence[Master], description: Description, *, weights: bool
) -> dict[str, TensorShard]:
    """What this rank holds of everything; of one tensor several pieces, where it is several parameters of Megatron."""
    own = [each for each in held if not each.duplicate]
    pieces: list[TensorShard] = []
    steps: dict[str, TensorShard] = {}
    for each, master in held_with(own, masters):
        for key, value in master.state().items():
            name = f"optimizer/{each.name}/{key}"
            if value.ndim == 0:
                steps[name] = whole_tensor(value)
            else:
                pieces.append(replace(master.piece(each, value), saved_as=name))
        if master.is_copy:
            name = f"weights/{each.name}" if weights else f"optimizer/{each.name}/{MASTER}"
            pieces.append(replace(master.piece(each), saved_as=name))
    if weights:
        pieces += [
            TensorShard(local=each.local, shape=each.shape, boxes=each.parts, saved_as=f"weights/{each.name}")
            for each in own
            if each.name not in description.copies
        ]
    numbered = {f"{index} {piece.saved_as}": piece for index, piece in enumerate(pieces)}
    return rng_shards(device_of(own)) | steps | numbered
