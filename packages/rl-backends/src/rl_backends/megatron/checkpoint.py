"""Checkpoints of Megatron's training in the coordinates of Hugging Face, which any layout and other backends resume.

A rank of Megatron has its own layers, experts and ranges alone, so all ranks first describe together what there is, in
the names of Hugging Face; optimizers are described as torch's AdamW is elsewhere. Every box is written once, whichever
ranks hold it. Weights that the optimizer keeps in float32 are saved in float32, and nothing in 16 bits beside them.

What is read goes into the parameters, into the optimizer's float32 copies of them and into new state, in place. A
parameter that holds several tensors of Hugging Face, as q, k and v, has one state, filled from three.

Megatron's own checkpoints are not used: they are pickles, their loading needs a step to have been taken, and without
Transformer Engine those of the distributed optimizer do not come back as they were (seen in 0.16.1).
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

from rl_backends.checkpoints import CheckpointState, CheckpointWrite
from rl_backends.checkpoints.dcp import Contents
from rl_backends.checkpoints.frozen_weights import check_frozen_weights
from rl_backends.checkpoints.loading import OpenCheckpoint, check_holds, open_checkpoint, read_shards
from rl_backends.checkpoints.manifest import check_model
from rl_backends.checkpoints.optimizer_state import NOT_RESTORED, check_hyperparameters
from rl_backends.checkpoints.saving import as_json, other_ranks_failures, write_checkpoint
from rl_backends.checkpoints.shards import (
    TensorShard,
    dtype_name,
    has_rng,
    num_ranks,
    rng_shards,
    set_rng,
    whole_tensor,
)
from rl_backends.errors import CheckpointError
from rl_backends.megatron.mapping import HeldTensor
from rl_backends.megatron.optimizer import Master, MegatronOptimizers, masters_of
from rl_backends.rank_agreement import gather_text, on_every_rank

ADAMW = f"{AdamW.__module__}.{AdamW.__qualname__}"
"""What every backend calls it; Transformer Engine's and Apex's compute the same."""
ADAMW_WITH_MASTERS = f"{ADAMW} with float32 masters"
"""The same where the weights lie elsewhere, in 16 bits, and the checkpoint holds the numbers that are stepped."""
MASTER = "master"
"""Their name in a parameter's state."""
MIXED = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Dtypes in which one weight may be kept here and in a checkpoint: masters are rounded for the model, or begin from
it."""


# -- what all ranks hold -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """Of the model and the optimizers, on all ranks."""

    model: dict[str, list[Any]] = field(default_factory=dict)
    """Name -> [dtype, shape] of each weight as the model holds it."""
    trained: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name -> options of each weight that an optimizer steps."""
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name -> key -> what the optimizer keeps of it."""
    copies: dict[str, str] = field(default_factory=dict)
    """Name -> dtype of each weight that an optimizer keeps in more digits than the model."""

    def weights(self) -> dict[str, list[Any]]:
        """The model's fingerprint, with the dtypes in which a checkpoint keeps the weights."""
        return {name: [self.copies.get(name, dtype), shape] for name, (dtype, shape) in self.model.items()}

    def optimizers(self, *, masters: bool) -> list[dict[str, Any]]:
        """As `state.json` has them.

        masters: the checkpoint holds what is stepped as state, since it holds no weights.
        """
        masters = masters and bool(self.copies)
        state = self.state
        if masters:
            state = {
                name: {**state.get(name, {}), MASTER: {"dtype": dtype, "sharded": True}}
                for name, dtype in self.copies.items()
            } | {name: values for name, values in state.items() if name not in self.copies}
        kind = ADAMW_WITH_MASTERS if masters else ADAMW
        return [{"kind": kind, "bound_to_mesh": False, "groups": self._groups(), "state": state}]

    def _groups(self) -> list[dict[str, Any]]:
        groups: dict[str, dict[str, Any]] = {}
        for name, options in self.trained.items():
            group = groups.setdefault(json.dumps(options, sort_keys=True), {"names": [], "options": options})
            group["names"].append(name)
        return list(groups.values())


def describe(
    held: Sequence[HeldTensor],
    optimizers: MegatronOptimizers | None,
    masters: Iterable[Master],
    *,
    group: dist.ProcessGroup | None,
) -> Description:
    """What all ranks hold; every rank must call it."""
    text = on_every_rank(lambda: json.dumps(asdict(_describe(held, optimizers, masters))), group=group)
    found = Description()
    for each in map(json.loads, gather_text(text, group=group)):
        for name, part in each.items():
            getattr(found, name).update(part)
    return found


def device_of(held: Sequence[HeldTensor]) -> str:
    """Type of device that the model lies on."""
    return held[0].parameter.device.type if held else "cpu"


def held_with(held: Sequence[HeldTensor], masters: Iterable[Master]) -> list[tuple[HeldTensor, Master]]:
    """What this rank holds and steps at least one number of, name by name."""
    by_parameter: dict[int, list[HeldTensor]] = {}
    for each in held:
        by_parameter.setdefault(id(each.parameter), []).append(each)
    return [
        (each, master)
        for master in masters
        for each in by_parameter.get(id(master.parameter), [])
        if master.piece(each).boxes
    ]


def _describe(
    held: Sequence[HeldTensor], optimizers: MegatronOptimizers | None, masters: Iterable[Master]
) -> Description:
    own = [each for each in held if not each.duplicate]
    model = {each.name: [dtype_name(each.parameter.dtype), list(each.shape)] for each in own}
    if optimizers is None:
        return Description(model=model)
    stepped = held_with(own, masters)
    return Description(
        model=model,
        trained={each.name: _options(optimizers, master.group) for each, master in stepped},
        state={
            each.name: {
                key: {"dtype": dtype_name(value.dtype), "sharded": value.ndim > 0} for key, value in state.items()
            }
            for each, master in stepped
            if (state := master.state())
        },
        copies={each.name: dtype_name(master.tensor.dtype) for each, master in stepped if master.is_copy},
    )


def _options(optimizers: MegatronOptimizers, group: Mapping[str, Any]) -> dict[str, Any]:
    """Those of torch's AdamW, of which Megatron does not use all, and has others that are its own affair.

    Weight decay is that of the settings, also where a schedule is changing it.
    """
    settings = optimizers.settings
    standard = AdamW(
        [nn.Parameter(torch.zeros(()))], betas=(settings.adam_beta1, settings.adam_beta2), eps=settings.adam_eps
    ).param_groups[0]
    options = {key: value for key, value in standard.items() if key not in NOT_RESTORED}
    return {**options, "lr": float(group["lr"]), "weight_decay": settings.weight_decay * group["wd_mult"]}


# -- saving ------------------------------------------------------------------------------------------------------------


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
    frozen: Mapping[str, int] | None = None,
) -> CheckpointWrite:
    """As `rl_backends.checkpoints.save_checkpoint`, of everything that this rank holds.

    layout: sizes of the axes that the model is laid over, for people.
    weights: False leaves them out, where they lie elsewhere; float32 masters are then saved as state.
    """
    left_out = dict(frozen or {}) if weights else {}

    def collect(group: dist.ProcessGroup | None) -> tuple[dict[str, TensorShard], Contents]:
        masters = [] if optimizers is None else masters_of(optimizers)
        description = describe(held, optimizers, masters, group=group)

        def contents() -> Contents:
            state: dict[str, Any] = {"optimizers": None, "schedule": None, "frozen": left_out}
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

        kept = [each for each in held if each.name not in left_out]
        return _pieces(kept, masters, description, weights=weights), on_every_rank(contents, group=group)

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


# -- loading -----------------------------------------------------------------------------------------------------------


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
    """As `rl_backends.checkpoints.load_checkpoint`, also of a checkpoint of DTensors where AdamW was its optimizer.

    What is saved in float32 is rounded for a model in 16 bits, and its optimizer goes on from the float32; a model in
    float32 takes float32 alone. Without `weights` they stay as they are, unless masters were saved for them.
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
    frozen: dict[str, int] = opened.state.get("frozen", {})
    if frozen:
        check_frozen_weights(opened.source, frozen, held, group=opened.group)
    device = device_of(held)
    rng = rng_shards(device) if has_rng(opened.index, device) else {}
    saved = opened.state["optimizers"][0]["state"] if kept is not None else {}
    states = on_every_rank(lambda: _new_states(held, masters, saved), group=opened.group) if kept is not None else []
    if kept is not None:
        _read_steps(opened, states)
    filled = [piece for state in states for piece in state.pieces]
    if weights:
        own = [each for each in held if each.name not in frozen]
        filled += _weight_pieces(own, masters, name="weights/{}")
    else:
        mastered = [each for each in held if MASTER in saved.get(each.name, {})]
        filled += _weight_pieces(mastered, masters, name=f"optimizer/{{}}/{MASTER}")
    read_shards(opened, rng | _numbered(filled), schedule=kept)
    for state in states:
        step = next(iter(state.steps.values()), None)
        state.master.put_state(state.moments if step is None else {"step": step, **state.moments})
    set_rng(rng)
    for each in held:
        each.parameter.grad = None
        if (summed := getattr(each.parameter, "main_grad", None)) is not None:
            summed.zero_()
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


def _weight_pieces(held: Sequence[HeldTensor], masters: Sequence[Master], *, name: str) -> Iterator[TensorShard]:
    """The parameters, and what the optimizer keeps of them in more digits: both are filled from one source."""
    for each in held:
        piece = TensorShard(local=each.local, shape=each.shape, boxes=each.parts, saved_as=name.format(each.name))
        yield replace(piece, takes=MIXED) if each.parameter.dtype in MIXED - {torch.float32} else piece
    for each, master in held_with(held, masters):
        if master.is_copy:
            yield replace(master.piece(each), saved_as=name.format(each.name), takes=MIXED)
