"""Whether the optimizers of a checkpoint are those of this run, by their kinds and the options of their groups.

Knows what a checkpoint says of optimizers, and what is said alike of those that there are; does not know optimizers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rl_backends.errors import CheckpointError

__all__ = ["LEARNING_RATES", "NOT_RESTORED", "check_hyperparameters", "options_by_name"]

NOT_RESTORED = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})
"""Of a parameter group: how a step is computed, which is a matter of the machine."""
LEARNING_RATES = frozenset({"lr", "initial_lr"})
"""Of a parameter group: what the schedule decides; the checkpoint's, until the next step."""


def check_hyperparameters(
    here: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]], *, same_mesh: bool
) -> None:
    """The optimizers of the checkpoint are these: `kind` and `groups` of each, a group being `names` and `options`.

    Raises:
        CheckpointError: they are others, or theirs is a state that this mesh cannot take.
    """
    advice = "start training with the optimizer of the checkpoint, or load the weights alone by optimizer=False"
    kinds = [each["kind"] for each in here], [each["kind"] for each in saved]
    if kinds[0] != kinds[1]:
        raise CheckpointError(f"the checkpoint has state of {kinds[1]}, and this run optimizes by {kinds[0]}: {advice}")
    for ours, theirs in zip(here, saved, strict=True):
        if theirs["bound_to_mesh"] and not same_mesh:
            raise CheckpointError(
                f"the state of {theirs['kind']} is quantized in blocks of each rank's shards and cannot be cut for "
                f"another mesh: resume on the mesh that wrote it, or load the weights alone by optimizer=False"
            )
        try:
            _check_groups(ours["groups"], options_by_name(theirs["groups"]))
        except CheckpointError as error:
            raise CheckpointError(
                f"the hyperparameters of {theirs['kind']} cannot be restored: {error}: {advice}"
            ) from error


def options_by_name(groups: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The options of each parameter, whose groups may be cut otherwise."""
    return {name: group["options"] for group in groups for name in group["names"]}


def _check_groups(groups: Sequence[Mapping[str, Any]], saved: Mapping[str, Mapping[str, Any]]) -> None:
    """Each parameter has its hyperparameters of the checkpoint; groups may be cut otherwise, as they are by mesh."""
    here = options_by_name(groups)
    if only := [*(here.keys() - saved.keys()), *(saved.keys() - here.keys())]:
        raise CheckpointError(f"{len(only)} parameters are optimized in one of the two runs only ({min(only)} is one)")
    for group in groups:
        first, *others = [saved[name] for name in group["names"]] or [group["options"]]
        if first.keys() != group["options"].keys():
            different = sorted(first.keys() ^ group["options"].keys())
            raise CheckpointError(f"only one of the two runs has {', '.join(different)}")
        for name in group["names"]:
            _check_same(name, group["options"], saved[name])
        if any(first[key] != other[key] for other in others for key in LEARNING_RATES & first.keys()):
            raise CheckpointError(
                f"what is one group here, that of {group['names'][0]}, had not one learning rate for all there"
            )


def _check_same(name: str, here: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    for key in sorted(here.keys() - LEARNING_RATES):
        ours = list(here[key]) if isinstance(here[key], tuple) else here[key]
        if ours != saved[key]:
            raise CheckpointError(f"{key} of {name} is {saved[key]} in the checkpoint and {ours} here")
