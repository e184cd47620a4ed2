"""Load a checkpoint on any mesh, or refuse it before anything is changed.

`open_checkpoint` and `restore` serve any backend; `load_checkpoint` says which tensors and figures of a model of torch
are read. Each rank reads the boxes that it holds, and the ranks share the digests to be checked.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from rl_backends.checkpoints.folders import check_file
from rl_backends.checkpoints.optimizer_state import (
    CheckpointedOptimizers,
    NewState,
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
from rl_backends.checkpoints.storage import (
    DAMAGED,
    STATE,
    Manifest,
    check_model,
    plan_reads,
    read_boxes,
    read_index,
    read_json,
    read_manifest,
)
from rl_backends.errors import CheckpointError, RankError
from rl_backends.loading.weights import Shard
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
        return None if restored is None else describe_optimizers(restored, held)

    names, described = fingerprint(held), on_every_rank(describe, group=opened.group)
    if stage_info(model) is not None:
        names, described = described_by_all_ranks(names, described, group=opened.group)
    state = restore(
        opened,
        optimizers,
        optimizer=optimizer,
        names=names,
        described=described,
        same_mesh=opened.manifest.mesh == mesh_of(held),
        device=device_of(held),
        weights={f"weights/{name}": each.of() for name, each in held.items()},
        frozen=lambda: named_shards(model),
        states=lambda: [] if restored is None else new_states(restored, held, saved),
    )
    model.zero_grad()
    return state


def restore(
    opened: OpenCheckpoint,
    optimizers: CheckpointedOptimizers | None,
    *,
    optimizer: bool,
    names: Mapping[str, list[Any]],
    described: Sequence[Mapping[str, Any]] | None,
    same_mesh: bool,
    device: str,
    weights: Mapping[str, TensorShard],
    frozen: Callable[[], Iterable[Shard]],
    states: Callable[[], list[NewState]],
) -> CheckpointState:
    """Check that the checkpoint fits, and fill what this rank holds; every rank must call it.

    Args:
        opened: the checkpoint.
        optimizers: that there are here.
        optimizer: whether they and their schedule are restored.
        names: dtype and shape of each weight of all ranks.
        described: the optimizers, if they are restored.
        same_mesh: whether this is the mesh that wrote it.
        device: type of the one whose random-number generator is restored too.
        weights: what this rank holds of them; those that the checkpoint leaves out are not read.
        frozen: what this rank holds of all weights, where the checkpoint has digests of some.
        states: makes what the optimizers' state is read into.
    """
    source, group, saved = opened.source, opened.group, opened.state["optimizers"]
    restored = optimizers if optimizer else None

    def check() -> None:
        check_model(source, opened.manifest.model, names)
        if optimizer and optimizers is None and saved is not None:
            raise CheckpointError(
                f"{source} holds the state of an optimizer, and there is none here to take it: call start_training "
                f"first, or leave it behind with optimizer=False"
            )
        if restored is not None and saved is None:
            raise CheckpointError(
                f"{source} holds no state of optimizers, only weights: load it with optimizer=False, and training "
                f"starts with fresh moments"
            )
        if described is not None:
            check_hyperparameters(source, described, saved or [], same_mesh=same_mesh)

    on_every_rank(check, group=group)
    digests: dict[str, int] = opened.state.get("frozen", {})
    if digests:
        check_frozen_weights(source, digests, frozen(), group=group)
    rng = rng_shards(device) if has_rng(opened.index, device) else {}
    made = on_every_rank(states, group=group)
    if any(len(each.scalars) > 1 for each in made):
        # How many steps were taken of each tensor is read before anything else: they may not fit.
        counts = numbered([shard for state in made for shard in state.scalars])
        on_every_rank(lambda: read_boxes(source, plan_reads(source, opened.index, counts)), group=group)

        def check_steps() -> None:
            for state in made:
                steps = {str(each.saved_as).split("/")[1]: int(each.local) for each in state.scalars}
                if len(set(steps.values())) > 1:
                    counted = ", ".join(f"{step} of {name}" for name, step in steps.items())
                    raise CheckpointError(
                        f"the optimizer has taken other numbers of steps of what is one parameter of Megatron "
                        f"({counted}): load the weights alone by optimizer=False"
                    )

        on_every_rank(check_steps, group=group)
    filled = rng | numbered([shard for state in made for shard in (*state.scalars, *state.shards)])
    filled |= {
        name: shard for name, shard in weights.items() if (shard.saved_as or name)[len("weights/") :] not in digests
    }
    reads = on_every_rank(lambda: plan_reads(source, opened.index, filled), group=group)
    if restored is not None:  # before anything is read, since it may refuse; then it is put back on every rank
        before = restored.schedule_state()
        try:
            on_every_rank(lambda: restored.load_schedule_state(opened.state["schedule"]), group=group)
        except (CheckpointError, RankError):
            if restored.schedule_state() != before:
                restored.load_schedule_state(before)
            raise
    try:
        on_every_rank(lambda: read_boxes(source, reads), group=group)
    except (CheckpointError, RankError) as error:
        raise CheckpointError(
            f"{source} could not be read: {error}. Weights may be in part those of the checkpoint: build the model "
            f"anew before you go on"
        ) from error
    put_states(made, saved or [])
    set_rng(rng)
    return CheckpointState(
        version=opened.manifest.version,
        extra=opened.state["extra"],
        mesh=opened.manifest.mesh,
        rng_restored=bool(rng),
        torch=opened.manifest.torch,
    )


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
    state, index = on_every_rank(lambda: (read_json(source / STATE), read_index(source, manifest)), group=group)
    return OpenCheckpoint(source=source, manifest=manifest, state=state, index=index, group=group)
