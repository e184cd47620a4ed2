"""Load a checkpoint into a model of Megatron and its optimizer on any layout, or refuse it before anything is changed.

What is read goes into the parameters, into the optimizer's float32 copies of them and into state made here, in place;
Megatron's own loading, which needs a step to have been taken, has no part in it. A parameter that holds several tensors
of Hugging Face, as q, k and v, has one state, filled from three.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_backends.checkpoints import CheckpointState
from rl_backends.checkpoints.loading import OpenCheckpoint, check_holds, open_checkpoint, read_shards
from rl_backends.checkpoints.manifest import check_model
from rl_backends.checkpoints.optimizer_state import check_hyperparameters
from rl_backends.checkpoints.saving import other_ranks_failures
from rl_backends.checkpoints.shards import TensorShard, has_rng, num_ranks, rng_shards, set_rng, whole_tensor
from rl_backends.errors import CheckpointError
from rl_backends.megatron.checkpoint.description import (
    ADAMW_WITH_MASTERS,
    MASTER,
    Description,
    describe,
    device_of,
    held_with,
)
from rl_backends.megatron.checkpoint.masters import Master, masters_of
from rl_backends.megatron.mapping import HeldTensor
from rl_backends.megatron.optimizer import MegatronOptimizers
from rl_backends.rank_agreement import on_every_rank

__all__ = ["load_checkpoint"]

MIXED = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Dtypes in which one weight may be kept here and in a checkpoint: masters are rounded for the model, or begin from
it."""


@other_ranks_failures()
def load_checkpoint(
    held: Sequence[HeldTensor],
    optimizers: MegatronOptimizers | None,
    folder: str | Path,
    *,
    weights: bool = True,
    optimizer: bool = True,
    verify: bool = True,
) -> CheckpointState:
    """Put what a checkpoint holds into a model, its optimizer and the generators of random numbers, in place.

    Every rank must call it; the layout may be any, and the checkpoint may be one of DTensors, where AdamW was its
    optimizer. Gradients are cleared. What is saved in float32 is rounded for a model in 16 bits, and its optimizer goes
    on from the float32; a model in float32 takes float32 alone.

    Args:
        held: everything that this rank holds of the model, duplicates too.
        optimizers: as when it was written; None where there is none.
        folder: of the checkpoint.
        weights: False leaves the weights as they are, unless masters were saved for them.
        optimizer: False leaves moments and schedule as they are, whatever the checkpoint has of them.
        verify: compare the digest of every file, which reads each once more.

    Raises:
        CheckpointError: on every rank: see `rl_backends.checkpoints.load_checkpoint`.
    """
    opened = open_checkpoint(folder, verify=verify)
    masters = [] if optimizers is None else masters_of(optimizers)
    description = describe(held, optimizers, masters, group=opened.group)
    kept = optimizers if optimizer else None

    def check() -> None:
        check_model(opened.source, opened.manifest.model, _fingerprint(opened, description))
        check_holds(opened, weights=weights, optimizer=optimizer, has_optimizers=optimizers is not None)
        if kept is not None:
            _check_optimizers(opened, description)

    on_every_rank(check, group=opened.group)
    device = device_of(held)
    rng = rng_shards(device) if has_rng(opened.index, device) else {}
    saved = opened.state["optimizers"][0]["state"] if kept is not None else {}
    states = on_every_rank(lambda: _new_states(held, masters, saved), group=opened.group) if kept is not None else []
    if kept is not None:
        _read_steps(opened, states)
    filled = [piece for state in states for piece in state.pieces]
    if weights:
        filled += _weight_pieces(held, masters, name="weights/{}")
    else:
        mastered = [each for each in held if MASTER in saved.get(each.name, {})]
        filled += _weight_pieces(mastered, masters, name=f"optimizer/{{}}/{MASTER}")
    read_shards(opened, rng | _numbered(filled), schedule=kept)
    _put(states)
    set_rng(rng)
    _clear_gradients(held)
    return opened.result(rng_restored=bool(rng))


@dataclass(frozen=True, slots=True, kw_only=True)
class _NewState:
    """State of one parameter, made to be filled."""

    master: Master
    moments: dict[str, Tensor]
    steps: dict[str, Tensor]
    """Of each tensor of Hugging Face that the parameter holds."""
    pieces: list[TensorShard]
    """Where the moments go."""


def _fingerprint(opened: OpenCheckpoint, description: Description) -> dict[str, list[Any]]:
    """Of the model here, in the dtypes of the checkpoint where they may be read."""
    saved = opened.manifest.model
    here: dict[str, list[Any]] = {}
    for name, (dtype, shape) in description.model.items():
        theirs = saved[name][0] if name in saved else dtype
        here[name] = [theirs if dtype != "float32" and theirs in {"float32", dtype} else dtype, shape]
    return here


def _check_optimizers(opened: OpenCheckpoint, description: Description) -> None:
    saved = opened.state["optimizers"]
    masters = [each["kind"] for each in saved] == [ADAMW_WITH_MASTERS]
    same_mesh = opened.manifest.mesh["ranks"] == num_ranks()
    try:
        check_hyperparameters(description.optimizers(masters=masters), saved, same_mesh=same_mesh)
    except CheckpointError as error:
        raise CheckpointError(f"{opened.source}: {error}") from error


def _new_states(held: Sequence[HeldTensor], masters: Sequence[Master], saved: dict[str, Any]) -> list[_NewState]:
    """State of every parameter of this rank, none of it the optimizer's yet."""
    by_master: dict[int, list[HeldTensor]] = {}
    for each, master in held_with(held, masters):
        by_master.setdefault(id(master), []).append(each)
    return [_new_state(master, by_master[id(master)], saved) for master in masters if id(master) in by_master]


def _new_state(master: Master, held: Sequence[HeldTensor], saved: dict[str, Any]) -> _NewState:
    keys = {each.name: saved.get(each.name, {}).keys() - {MASTER} for each in held}
    first = keys[held[0].name]
    if any(each != first for each in keys.values()):
        raise CheckpointError(
            f"the checkpoint has other state of each of {', '.join(keys)}, which are one parameter of Megatron: load "
            f"the weights alone by optimizer=False"
        )
    moments = {key: torch.zeros_like(master.tensor.detach()) for key in first if key != "step"}
    steps = {each.name: master.new_step() for each in held if "step" in first}
    pieces = [
        replace(master.piece(each, tensor), saved_as=f"optimizer/{each.name}/{key}")
        for each in held
        for key, tensor in moments.items()
    ]
    return _NewState(master=master, moments=moments, steps=steps, pieces=pieces)


def _read_steps(opened: OpenCheckpoint, states: Sequence[_NewState]) -> None:
    """How many steps were taken of each tensor, before anything else is read: they may not fit."""
    pieces = [
        replace(whole_tensor(step), saved_as=f"optimizer/{name}/step")
        for state in states
        for name, step in state.steps.items()
    ]
    read_shards(opened, _numbered(pieces), schedule=None)
    on_every_rank(lambda: _check_steps(states), group=opened.group)


def _numbered(pieces: Sequence[TensorShard]) -> dict[str, TensorShard]:
    """By names of their own, since one tensor of a checkpoint may go to several places here, as experts' do."""
    return {f"{index} {each.saved_as}": each for index, each in enumerate(pieces)}


def _check_steps(states: Sequence[_NewState]) -> None:
    for state in states:
        if len({int(step) for step in state.steps.values()}) > 1:
            counted = ", ".join(f"{int(step)} of {name}" for name, step in state.steps.items())
            raise CheckpointError(
                f"the optimizer has taken other numbers of steps of what is one parameter of Megatron ({counted}): "
                f"load the weights alone by optimizer=False"
            )


def _put(states: Sequence[_NewState]) -> None:
    """Give the optimizers what was read."""
    for state in states:
        step = next(iter(state.steps.values()), None)
        state.master.put_state(state.moments if step is None else {"step": step, **state.moments})


def _weight_pieces(held: Sequence[HeldTensor], masters: Sequence[Master], *, name: str) -> Iterator[TensorShard]:
    """The parameters, and what the optimizer keeps of them in more digits: both are filled from one source."""
    for each in held:
        piece = TensorShard(local=each.local, shape=each.shape, boxes=each.parts, saved_as=name.format(each.name))
        yield replace(piece, takes=MIXED) if each.parameter.dtype in MIXED - {torch.float32} else piece
    for each, master in held_with(held, masters):
        if master.is_copy:
            yield replace(master.piece(each), saved_as=name.format(each.name), takes=MIXED)


def _clear_gradients(held: Sequence[HeldTensor]) -> None:
    for each in held:
        each.parameter.grad = None
        if (summed := getattr(each.parameter, "main_grad", None)) is not None:
            summed.zero_()
