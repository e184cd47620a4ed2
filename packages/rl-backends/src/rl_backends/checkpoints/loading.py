"""Load a checkpoint on any mesh, or refuse it before anything is changed.

`open_checkpoint`, `check_holds` and `read_shards` serve any backend; `load_checkpoint` says which tensors and figures
of a model of torch are read. Each rank reads the boxes that it holds, and the ranks share the digests to be checked.
"""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from rl_backends.checkpoints.dcp import CheckpointReader, ShardLoadPlanner, describe_failure, metadata_of
from rl_backends.checkpoints.folders import check_file
from rl_backends.checkpoints.manifest import DAMAGED, INDEX, STATE, Manifest, check_model, read_json, read_manifest
from rl_backends.checkpoints.optimizer_state import (
    CheckpointedOptimizers,
    check_hyperparameters,
    describe_optimizers,
    new_states,
    put_states,
)
from rl_backends.checkpoints.saving import idle_group, other_ranks_failures
from rl_backends.checkpoints.shards import (
    TensorShard,
    check_frozen_weights,
    described_by_all_ranks,
    device_of,
    fingerprint,
    has_rng,
    mesh_of,
    model_shards,
    num_ranks,
    numbered,
    rng_shards,
    set_rng,
    this_rank,
)
from rl_backends.errors import CheckpointError, RankError
from rl_backends.rank_agreement import gather_text, on_every_rank
from rl_parallel_plans import named_shards, stage_info


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointState:
    """What a checkpoint says besides its tensors."""

    version: int
    """Optimizer steps that the weights have seen."""
    extra: dict[str, Any]
    """What `save_checkpoint` was given."""
    mesh: dict[str, Any]
    """Of the ranks that wrote it: `ranks`, and `axes` with their sizes."""
    rng_restored: bool
    """Whether the random-number generators were restored; only on as many ranks as wrote it, and on the same kind of
    device."""
    torch: str
    """Release of torch that wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCheckpoint:
    """A checkpoint that is complete and undamaged; whether it fits is not checked yet."""

    source: Path
    manifest: Manifest
    state: dict[str, Any]
    """Everything that is not a tensor: `extra`, `optimizers`, `schedule`."""
    index: dict[str, Any]
    """Dtype, shape and boxes of each tensor."""
    group: dist.ProcessGroup | None
    """Over which the ranks coordinate."""

    def result(self, *, rng_restored: bool) -> CheckpointState:
        """What the caller of `load_checkpoint` is given."""
        return CheckpointState(
            version=self.manifest.version,
            extra=self.state["extra"],
            mesh=self.manifest.mesh,
            rng_restored=rng_restored,
            torch=self.manifest.torch,
        )


@other_ranks_failures()
def load_checkpoint(
    model: nn.Module,
    optimizers: CheckpointedOptimizers | None,
    folder: str | Path,
    *,
    optimizer: bool = True,
    verify: bool = True,
) -> CheckpointState:
    """Restore a model, its optimizers and the random-number generators from a checkpoint, in place.

    Every rank must call it; the mesh may be any. Gradients are cleared. Betas, weight decay and the other options of
    parameter groups must be those of the checkpoint. Its learning rate holds until the schedule, which continues from
    the checkpoint's step, sets another.

    Args:
        model: built like the one that wrote it, sharded in any way.
        optimizers: as when it was written; None if there is none.
        folder: of the checkpoint.
        optimizer: False leaves optimizers and schedule as they are, whatever the checkpoint has of them.
        verify: compare the digest of every file, which reads each once more.

    Raises:
        CheckpointError: on every rank, with the reason: absent, unfinished, damaged, of another model, of other
            optimizers or hyperparameters, of an unknown format, without what was asked for, or with more. Nothing has
            changed then, unless a file became unreadable after it was checked, which the message says.
    """
    opened = open_checkpoint(folder, verify=verify)
    held = model_shards(model)
    restored = optimizers if optimizer else None
    saved = opened.state["optimizers"] or []

    def describe() -> list[dict[str, Any]] | None:
        bound = [False for _ in optimizers.each] if optimizers is not None else []
        return None if restored is None else describe_optimizers(restored, held, bound=bound)

    names, described = fingerprint(held), on_every_rank(describe, group=opened.group)
    if stage_info(model) is not None:
        names, described = described_by_all_ranks(names, described, group=opened.group)

    def check() -> None:
        check_model(opened.source, opened.manifest.model, names)
        check_holds(opened, optimizer=optimizer, has_optimizers=optimizers is not None)
        if described is not None:
            check_hyperparameters(opened.source, described, saved, same_mesh=opened.manifest.mesh == mesh_of(held))

    on_every_rank(check, group=opened.group)
    frozen: dict[str, int] = opened.state.get("frozen", {})
    if frozen:
        check_frozen_weights(opened.source, frozen, named_shards(model), group=opened.group)
    rng = rng_shards(device_of(held)) if has_rng(opened.index, device_of(held)) else {}
    states = on_every_rank(lambda: [] if restored is None else new_states(restored, held, saved), group=opened.group)
    filled = numbered([shard for state in states for shard in (*state.scalars, *state.shards)])
    filled |= {f"weights/{name}": each.of() for name, each in held.items() if name not in frozen}
    read_shards(opened, rng | filled, schedule=restored)
    put_states(states, saved)
    set_rng(rng)
    model.zero_grad()
    return opened.result(rng_restored=bool(rng))


def open_checkpoint(folder: str | Path, *, verify: bool) -> OpenCheckpoint:
    """Check that every rank was given the same complete checkpoint; every rank must call it.

    verify: compare the digest of every file, which reads each once more.
    """
    group = idle_group()
    source = Path(folder)
    manifest = on_every_rank(lambda: read_manifest(source), group=group)
    if len(set(gather_text(str(manifest.written_at_ns), group=group))) > 1:
        raise CheckpointError(f"the ranks were given different checkpoints ({source} here): give all the same one")

    def check_files() -> None:
        for number, (name, record) in enumerate(manifest.files.items()):
            digest = verify and number % num_ranks() == this_rank()
            check_file(source / name, record, remedy=DAMAGED, digest=digest)

    on_every_rank(check_files, group=group)
    state, index = on_every_rank(lambda: (read_json(source / STATE), read_json(source / INDEX)), group=group)
    return OpenCheckpoint(source=source, manifest=manifest, state=state, index=index, group=group)


def check_holds(opened: OpenCheckpoint, *, optimizer: bool, has_optimizers: bool) -> None:
    """Check that the checkpoint has what is asked for, and no optimizer state that would be lost."""
    source, saved = opened.source, opened.state["optimizers"]
    if optimizer and not has_optimizers and saved is not None:
        raise CheckpointError(
            f"{source} holds the state of an optimizer, and there is none here to take it: call start_training "
            f"first, or leave it behind with optimizer=False"
        )
    if optimizer and has_optimizers and saved is None:
        raise CheckpointError(
            f"{source} holds no state of optimizers, only weights: load it with optimizer=False, and training starts "
            f"with fresh moments"
        )


@torch.no_grad()
def read_shards(
    opened: OpenCheckpoint, shards: dict[str, TensorShard], *, schedule: CheckpointedOptimizers | None
) -> None:
    """Fill this rank's shards, in place, after all ranks have found theirs; every rank must call it.

    schedule: continues where that of the checkpoint stood; None leaves it.
    """
    source, index, group = opened.source, opened.index, opened.group

    def plan() -> CheckpointReader:
        reader = CheckpointReader(source, index, files=opened.manifest.files)
        planner = ShardLoadPlanner()
        planner.set_up_planner(shards, metadata_of(index))
        try:
            planner.create_local_plan()
        except CheckpointError as error:
            raise CheckpointError(f"{source}: {error}") from error
        return reader

    reader = on_every_rank(plan, group=group)
    if schedule is not None:  # before anything is read, since it may refuse; then it is put back on every rank
        before = schedule.schedule_state()
        try:
            on_every_rank(lambda: schedule.load_schedule_state(opened.state["schedule"]), group=group)
        except (CheckpointError, RankError):
            if schedule.schedule_state() != before:
                schedule.load_schedule_state(before)
            raise
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # on one rank without a group
            load(shards, storage_reader=reader, planner=ShardLoadPlanner(), process_group=group)
    except (CheckpointException, RuntimeError) as error:
        raise CheckpointError(
            f"{source} could not be read: {describe_failure(error)}. Weights may be in part those of the checkpoint: "
            f"build the model anew before you go on"
        ) from error
