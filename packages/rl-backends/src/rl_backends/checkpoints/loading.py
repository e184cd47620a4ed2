"""Load a checkpoint on any mesh, or refuse it before anything is changed.

Each rank reads the boxes that it holds, and the ranks share the digests to be checked.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from rl_backends.checkpoints.contents import CheckpointContents, TorchContents
from rl_backends.checkpoints.folders import check_file
from rl_backends.checkpoints.optimizer_state import CheckpointedOptimizers, check_hyperparameters, put_states
from rl_backends.checkpoints.saving import idle_group, other_ranks_failures
from rl_backends.checkpoints.shards import (
    check_frozen_weights,
    has_rng,
    num_ranks,
    rng_shards,
    set_rng,
    this_rank,
)
from rl_backends.checkpoints.storage import (
    DAMAGED,
    STATE,
    check_model,
    plan_reads,
    read_boxes,
    read_index,
    read_json,
    read_manifest,
)
from rl_backends.errors import CheckpointError, RankError
from rl_backends.rank_agreement import gather_text, on_every_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointState:
    """What a checkpoint says besides its tensors."""

    version: int
    """Optimizer steps that the weights have seen."""
    extra: dict[str, Any]
    """What `save_checkpoint` was given."""
    rng_restored: bool
    """Whether the random-number generators were restored; only on as many ranks as wrote it, and on the same kind of
    device."""


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
    return read_checkpoint(TorchContents(model, optimizers), folder, optimizer=optimizer, verify=verify)


@other_ranks_failures()
def read_checkpoint(
    contents: CheckpointContents, folder: str | Path, *, optimizer: bool, verify: bool
) -> CheckpointState:
    """As `load_checkpoint`, into what any backend has laid out."""
    # The same complete checkpoint on every rank.
    group, source = idle_group(), Path(folder)
    manifest = on_every_rank(lambda: read_manifest(source), group=group)
    if len(set(gather_text(str(manifest.written_at_ns), group=group))) > 1:
        raise CheckpointError(f"the ranks were given different checkpoints ({source} here): give all the same one")

    def check_files() -> None:
        for number, (name, record) in enumerate(manifest.files.items()):
            digest = verify and number % num_ranks() == this_rank()
            check_file(source / name, record, remedy=DAMAGED, digest=digest)

    on_every_rank(check_files, group=group)
    state, index = on_every_rank(lambda: (read_json(source / STATE), read_index(source, manifest)), group=group)

    # Does it fit?
    restored, saved = contents.optimizers if optimizer else None, state["optimizers"]
    names, described = contents.described_by_all(optimizers=optimizer, saved=manifest.model, group=group)

    def check() -> None:
        check_model(source, manifest.model, names)
        if optimizer and restored is None and saved is not None:
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
            check_hyperparameters(source, described, saved or [], same_mesh=manifest.mesh == contents.mesh)

    on_every_rank(check, group=group)
    digests: dict[str, int] = state.get("frozen", {})
    if digests:
        check_frozen_weights(source, digests, contents.held(), group=group)
    rng = rng_shards(contents.device) if has_rng(index, contents.device) else []
    made = on_every_rank(lambda: [] if restored is None else contents.new_states(saved), group=group)
    if any(len(each.scalars) > 1 for each in made):
        # How many steps were taken of each tensor is read before anything else: they may not fit.
        counts = [shard for each in made for shard in each.scalars]
        on_every_rank(lambda: read_boxes(source, plan_reads(source, index, counts)), group=group)

        def check_steps() -> None:
            for each in made:
                steps = {count.saved_as.split("/")[1]: int(count.local) for count in each.scalars}
                if len(set(steps.values())) > 1:
                    counted = ", ".join(f"{step} of {name}" for name, step in steps.items())
                    raise CheckpointError(
                        f"the optimizer has taken other numbers of steps of what is one parameter of Megatron "
                        f"({counted}): load the weights alone by optimizer=False"
                    )

        on_every_rank(check_steps, group=group)

    # What is read, and where to. Of the optimizers nothing has changed until all was read.
    filled = [*rng, *(shard for each in made for shard in (*each.scalars, *each.shards))]
    filled += [shard for shard in contents.weights() if shard.weight not in digests]
    reads = on_every_rank(lambda: plan_reads(source, index, filled), group=group)
    if restored is not None:  # before anything is read, since it may refuse; then it is put back on every rank
        before = restored.schedule_state()
        try:
            on_every_rank(lambda: restored.load_schedule_state(state["schedule"]), group=group)
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
    contents.clear_gradients()
    return CheckpointState(
        version=manifest.version,
        extra=state["extra"],
        rng_restored=bool(rng),
    )
