# ruff: noqa: D102 - methods are documented by `CheckpointContents`
"""Checkpoints of Megatron's training in the coordinates of Hugging Face, which any layout and other backends resume.

A rank of Megatron has its own layers, experts and ranges alone, so all ranks first describe together what there is, in
the names of Hugging Face; optimizers are described as torch's AdamW is elsewhere. Every box is written once, whichever
ranks hold it. Weights that the optimizer keeps in float32 are saved in float32, and nothing in 16 bits beside them.

What is read goes into the parameters, into the optimizer's float32 copies of them and into new state, in place. A
parameter that holds several tensors of Hugging Face, as q, k and v, has one state, filled from three.

Megatron's own checkpoints are not used: they are pickles, their loading needs a step to have been taken, and without
Transformer Engine those of the distributed optimizer do not come back as they were (seen in 0.16.1).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

from rl_backends.checkpoints.contents import CheckpointContents, Description
from rl_backends.checkpoints.optimizer_state import NOT_RESTORED, NewState, describe_state, new_state, state_shards
from rl_backends.checkpoints.shards import WEIGHTS, TensorShard, dtype_name, num_ranks
from rl_backends.megatron.mapping import HeldTensor
from rl_backends.megatron.optimizer import Master, MegatronOptimizers, masters_of

ADAMW = f"{AdamW.__module__}.{AdamW.__qualname__}"
"""What every backend calls it; Transformer Engine's and Apex's compute the same."""
MIXED = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Dtypes in which one weight may be kept here and in a checkpoint: masters are rounded for the model, or begin from
it."""


class MegatronContents(CheckpointContents):
    """What this rank holds of the Hugging Face model, and what Megatron's optimizer steps of it.

    A checkpoint of DTensors is read too, where AdamW was its optimizer. What is saved in float32 is rounded for a model
    in 16 bits, and its optimizer goes on from the float32; a model in float32 takes float32 alone.

    layout: sizes of the axes that the model is laid over, for people.
    """

    in_parts = True

    def __init__(
        self, held: Sequence[HeldTensor], optimizers: MegatronOptimizers | None, *, layout: Mapping[str, int]
    ) -> None:
        self.optimizers: MegatronOptimizers | None = optimizers
        self.mesh = {"ranks": num_ranks(), "axes": dict(layout)}
        self.device = held[0].parameter.device.type if held else "cpu"
        self._held = held

    def _masters(self, held: Sequence[HeldTensor]) -> list[Master]:
        """Everything that is stepped on this rank of these tensors, and which parts of which of them that is."""
        if self.optimizers is None:
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
            for master in masters_of(self.optimizers)
        ]
        return [master for master in masters if master.parts]

    def _saved_in(self, each: HeldTensor) -> torch.dtype:
        """The dtype that a weight is written in: of those in 16 bits that train, what is stepped."""
        stepped = self.optimizers is not None and each.parameter.requires_grad
        return torch.float32 if stepped else each.parameter.dtype

    def describe(self, *, optimizers: bool, saved: Mapping[str, list[Any]] | None) -> Description:
        names = {}
        for each in (each for each in self._held if not each.duplicate):
            dtype = dtype_name(self._saved_in(each) if saved is None else each.parameter.dtype)
            if saved is not None and dtype != "float32":  # that of the checkpoint, where it may be read
                theirs = saved[each.name][0] if each.name in saved else dtype
                dtype = theirs if theirs == "float32" else dtype
            names[each.name] = [dtype, list(each.shape)]
        if self.optimizers is None or not optimizers:
            return names, None
        masters = self._masters(self._held)
        groups = [{"names": list(each.parts), "options": self._options(each.group)} for each in masters]
        return names, [{"kind": ADAMW, "bound_to_mesh": False, "groups": groups, "state": describe_state(masters)}]

    def _options(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Those of torch's AdamW, of which Megatron does not use all, and has others that are its own affair."""
        assert self.optimizers is not None
        config = self.optimizers.config
        standard = AdamW([nn.Parameter(torch.zeros(()))], betas=config.betas, eps=config.eps).param_groups[0]
        options = {key: value for key, value in standard.items() if key not in NOT_RESTORED}
        return {**options, "lr": float(group["lr"]), "weight_decay": config.weight_decay * group["wd_mult"]}

    def shards(self, *, left_out: Collection[str]) -> list[TensorShard]:
        own = [each for each in self._held if not each.duplicate]
        shards = state_shards(masters := self._masters(own))
        for master in (each for each in masters if each.is_copy):
            shards += [_weight(part(master.tensor), name) for name, part in master.parts.items()]
        others = [each for each in own if each.parameter.dtype == self._saved_in(each) and each.name not in left_out]
        return shards + [_weight(_whole(each), each.name) for each in others]

    def weights(self) -> list[TensorShard]:
        # The parameters, and what the optimizer keeps of them in more digits: both are filled from one source.
        found = []
        for each in self._held:
            takes = MIXED if each.parameter.dtype in MIXED - {torch.float32} else frozenset()
            found.append(_weight(_whole(each), each.name, takes=takes))
        for master in (each for each in self._masters(self._held) if each.is_copy):
            found += [_weight(part(master.tensor), name, takes=MIXED) for name, part in master.parts.items()]
        return found

    def new_states(self, saved: Sequence[Mapping[str, Any]]) -> list[NewState]:
        return [new_state(each, saved[0]["state"]) for each in self._masters(self._held)]

    def held(self, *, frozen: bool = False) -> list[HeldTensor]:
        return [each for each in self._held if not (frozen and each.parameter.requires_grad)]

    def clear_gradients(self) -> None:
        for each in self._held:
            each.parameter.grad = None
            if (summed := getattr(each.parameter, "main_grad", None)) is not None:
                summed.zero_()


def _whole(held: HeldTensor) -> TensorShard:
    return TensorShard(local=held.local, shape=held.shape, boxes=held.parts)


def _weight(shard: TensorShard, name: str, *, takes: frozenset[torch.dtype] = frozenset()) -> TensorShard:
    return replace(shard, saved_as=f"{WEIGHTS}{name}", takes=takes)
