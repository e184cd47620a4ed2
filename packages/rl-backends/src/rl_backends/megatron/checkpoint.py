"""Checkpoints of Megatron's training in the coordinates of Hugging Face, which any layout and other backends resume.

A rank of Megatron has its own layers, experts and ranges alone, so all ranks first describe together what there is, in
the names of Hugging Face; optimizers are described as torch's AdamW is elsewhere. Every box is written once, whichever
ranks hold it. Weights that the optimizer keeps in float32 are saved in float32, and nothing in 16 bits beside them.

What is read goes into the parameters, into the optimizer's float32 copies of them and into new state, in place. A
parameter that holds several tensors of Hugging Face, as q, k and v, has one state, filled from three.

Megatron's own checkpoints are not used: they are pickles, their loading needs a step to have been taken, and without
Transformer Engine those of the distributed optimizer do not come back as they were (seen in 0.16.1).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

from rl_backends.checkpoints.loading import CheckpointState, open_checkpoint, restore
from rl_backends.checkpoints.optimizer_state import NOT_RESTORED, NewState, describe_state, new_state, state_shards
from rl_backends.checkpoints.saving import CheckpointWrite, Collected, other_ranks_failures, write_checkpoint
from rl_backends.checkpoints.shards import TensorShard, described_by_all_ranks, dtype_name, num_ranks, numbered
from rl_backends.megatron.mapping import HeldTensor
from rl_backends.megatron.optimizer import Master, MegatronOptimizers, masters_of
from rl_backends.rank_agreement import on_every_rank

ADAMW = f"{AdamW.__module__}.{AdamW.__qualname__}"
"""What every backend calls it; Transformer Engine's and Apex's compute the same."""
MIXED = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Dtypes in which one weight may be kept here and in a checkpoint: masters are rounded for the model, or begin from
it."""


# -- what there is -----------------------------------------------------------------------------------------------------


def stepped_by(held: Sequence[HeldTensor], optimizers: MegatronOptimizers | None) -> list[Master]:
    """Everything that is stepped on this rank of what it holds, and which parts of which tensors that is."""
    if optimizers is None:
        return []
    by_parameter: dict[int, list[HeldTensor]] = {}
    for each in held:
        by_parameter.setdefault(id(each.parameter), []).append(each)
    masters = [
        replace(
            master,
            parts={
                each.name: partial(master.piece, each)
                for each in by_parameter.get(id(master.parameter), [])
                if master.piece(each).boxes
            },
        )
        for master in masters_of(optimizers)
    ]
    return [master for master in masters if master.parts]


def describe(
    held: Sequence[HeldTensor],
    optimizers: MegatronOptimizers | None,
    masters: Sequence[Master],
    *,
    dtype_of: Callable[[HeldTensor], torch.dtype],
    group: dist.ProcessGroup | None,
) -> tuple[dict[str, list[Any]], list[dict[str, Any]] | None]:
    """Dtype and shape of each tensor, and the optimizer, of all ranks; every rank must call it."""

    def describe_here() -> tuple[dict[str, list[Any]], list[dict[str, Any]] | None]:
        model = {each.name: [dtype_name(dtype_of(each)), list(each.shape)] for each in held if not each.duplicate}
        if optimizers is None:
            return model, None
        groups = [{"names": list(each.parts), "options": _options(optimizers, each.group)} for each in masters]
        return model, [{"kind": ADAMW, "bound_to_mesh": False, "groups": groups, "state": describe_state(masters)}]

    model, described = on_every_rank(describe_here, group=group)
    return described_by_all_ranks(model, described, group=group)


def _options(optimizers: MegatronOptimizers, group: Mapping[str, Any]) -> dict[str, Any]:
    """Those of torch's AdamW, of which Megatron does not use all, and has others that are its own affair."""
    config = optimizers.config
    standard = AdamW([nn.Parameter(torch.zeros(()))], betas=config.betas, eps=config.eps).param_groups[0]
    options = {key: value for key, value in standard.items() if key not in NOT_RESTORED}
    return {**options, "lr": float(group["lr"]), "weight_decay": config.weight_decay * group["wd_mult"]}


def _device_of(held: Sequence[HeldTensor]) -> str:
    return held[0].parameter.device.type if held else "cpu"


# -- saving ------------------------------------------------------------------------------------------------------------


@other_ranks_failures()
def save_checkpoint(
    held: Sequence[HeldTensor],
    optimizers: MegatronOptimizers | None,
    folder: str | Path,
    *,
    layout: Mapping[str, int],
    frozen: Mapping[str, int] | None = None,
    **asked: Any,
) -> CheckpointWrite:
    """As `rl_backends.save_checkpoint`, of everything that this rank holds.

    layout: sizes of the axes that the model is laid over, for people.
    """

    def dtype_of(each: HeldTensor) -> torch.dtype:  # of weights in 16 bits that train, what is saved is stepped
        stepped = optimizers is not None and each.parameter.requires_grad
        return torch.float32 if stepped else each.parameter.dtype

    def collect(group: dist.ProcessGroup | None) -> Collected:
        masters = stepped_by(own, optimizers)
        names, described = describe(held, optimizers, masters, dtype_of=dtype_of, group=group)
        shards = state_shards(masters)
        shards += [
            replace(part(each.tensor), saved_as=f"weights/{name}")
            for each in masters
            if each.is_copy
            for name, part in each.parts.items()
        ]
        shards += [
            TensorShard(local=each.local, shape=each.shape, boxes=each.parts, saved_as=f"weights/{each.name}")
            for each in own
            if each.parameter.dtype == dtype_of(each) and each.name not in (frozen or {})
        ]
        return shards, names, described

    own = [each for each in held if not each.duplicate]
    mesh = {"ranks": num_ranks(), "axes": dict(layout)}
    return write_checkpoint(collect, optimizers, folder, mesh=mesh, device=_device_of(own), frozen=frozen, **asked)


# -- loading -----------------------------------------------------------------------------------------------------------


@other_ranks_failures()
def load_checkpoint(
    held: Sequence[HeldTensor],
    optimizers: MegatronOptimizers | None,
    folder: str | Path,
    *,
    optimizer: bool = True,
    verify: bool = True,
) -> CheckpointState:
    """As `rl_backends.load_checkpoint`, also of a checkpoint of DTensors where AdamW was its optimizer.

    What is saved in float32 is rounded for a model in 16 bits, and its optimizer goes on from the float32; a model in
    float32 takes float32 alone.
    """
    opened = open_checkpoint(folder, verify=verify)
    masters = stepped_by(held, optimizers)
    names, described = describe(
        held, optimizers, masters, dtype_of=lambda each: each.parameter.dtype, group=opened.group
    )
    # In the dtypes of the checkpoint, where they may be read.
    theirs = {name: dtype for name, (dtype, _) in opened.manifest.model.items()}
    for name, (dtype, shape) in names.items():
        if dtype != "float32" and theirs.get(name) in {"float32", dtype}:
            names[name] = [theirs[name], shape]

    def states() -> list[NewState]:
        if not optimizer or optimizers is None:
            return []
        saved: dict[str, Any] = opened.state["optimizers"][0]["state"]
        return [new_state(each, saved) for each in masters]

    state = restore(
        opened,
        optimizers,
        optimizer=optimizer,
        names=names,
        described=described if optimizer else None,
        same_mesh=opened.manifest.mesh["ranks"] == num_ranks(),
        device=_device_of(held),
        weights=numbered(_weights(held, masters)),
        frozen=lambda: held,
        states=states,
    )
    for each in held:
        each.parameter.grad = None
        if (summed := getattr(each.parameter, "main_grad", None)) is not None:
            summed.zero_()
    return state


def _weights(held: Sequence[HeldTensor], masters: Sequence[Master]) -> Iterator[TensorShard]:
    """The parameters, and what the optimizer keeps of them in more digits: both are filled from one source."""
    for each in held:
        takes = MIXED if each.parameter.dtype in MIXED - {torch.float32} else frozenset()
        name = f"weights/{each.name}"
        yield TensorShard(local=each.local, shape=each.shape, boxes=each.parts, saved_as=name, takes=takes)
    for master in masters:
        for name, part in master.parts.items() if master.is_copy else ():
            yield replace(part(master.tensor), saved_as=f"weights/{name}", takes=MIXED)
