"""What this rank holds of each tensor of a checkpoint, in the coordinates of the unsharded model.

A piece is named by what it is part of:

    weights/<name>                              a parameter or persistent buffer
    optimizer/<name>/<key>                      the optimizer's state of that parameter
    optimizer/<name>/<key>/rank-<r>/<inner>     state that cannot be cut otherwise, as that rank holds it
    rng/rank-<r>/<device>                       a generator of random numbers
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_backends.checkpoints.flat_boxes import FlatBox
from rl_parallel_plans import Box, NamedShard, local_boxes, named_shards, stage_info

__all__ = [
    "Held",
    "Piece",
    "device_of",
    "has_rng",
    "held_by",
    "mesh_of",
    "num_ranks",
    "rng_pieces",
    "set_rng",
    "this_rank",
    "whole_piece",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """This rank's part of one tensor."""

    local: Tensor
    """This rank's memory: what is written, or where what is read goes."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    boxes: tuple[Box | FlatBox, ...]
    """The parts of the whole that lie in `local`."""
    saved_as: str | None = None
    """The tensor of the checkpoint that it is part of, where several pieces are of one, or one is not named by it."""
    takes: frozenset[torch.dtype] = frozenset()
    """Dtypes besides its own that may be read into it, and are rounded or widened to its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What this rank holds of one parameter or buffer, its boxes worked out once."""

    shard: NamedShard
    boxes: tuple[Box, ...]

    @property
    def dtype(self) -> str:
        """Its name without `torch.`."""
        return dtype_name(self.shard.tensor.dtype)

    def piece(self, tensor: Tensor | None = None) -> Piece:
        """Of the parameter, or of another tensor that is sharded alike."""
        if tensor is None:
            return Piece(local=self.shard.local, shape=self.shard.shape, boxes=self.boxes)
        tensor = tensor.detach()
        alike = getattr(tensor, "placements", None) == getattr(self.shard.tensor, "placements", None)
        boxes = self.boxes if alike else tuple(self.shard.boxes(tensor))
        return Piece(local=self.shard.local_of(tensor), shape=self.shard.shape, boxes=boxes)


def held_by(model: nn.Module) -> dict[str, Held]:
    """Everything that this rank holds of the model's state, by name.

    A pipeline stage may hold a copy of a tied weight that an earlier one has under another name, which counts.
    """
    info = stage_info(model)
    first = {} if info is None else {name: holders[0][1] for name, holders in info.tied.items()}
    return {
        first.get(each.name, each.name): Held(shard=each, boxes=tuple(each.boxes())) for each in named_shards(model)
    }


def whole_piece(tensor: Tensor) -> Piece:
    """A tensor that is not cut."""
    return Piece(local=tensor.detach(), shape=tuple(tensor.shape), boxes=tuple(local_boxes(tensor)))


def rng_pieces(device: str) -> dict[str, Piece]:
    """The state of this rank's generators of random numbers, a copy: torch's own, and the device's."""
    states = {"cpu": torch.get_rng_state()}
    if device != "cpu":
        states[device] = torch.get_device_module(device).get_rng_state()
    return {f"rng/rank-{this_rank()}/{name}": whole_piece(state) for name, state in states.items()}


def has_rng(saved: Collection[str], device: str) -> bool:
    """Whether `saved` names a state of every generator of as many ranks, on the devices, as there are here."""
    wanted = {f"rng/rank-{rank}/{kind}" for rank in range(num_ranks()) for kind in ("cpu", device)}
    return wanted == {name for name in saved if name.startswith("rng/")}


def set_rng(pieces: Mapping[str, Piece]) -> None:
    """Put back what `rng_pieces` gave."""
    for name, piece in pieces.items():
        device = name.rpartition("/")[2]
        set_state = torch.set_rng_state if device == "cpu" else torch.get_device_module(device).set_rng_state
        set_state(piece.local)


def device_of(held: Mapping[str, Held]) -> str:
    """Type of device that the model computes on; offloaded shards lie elsewhere."""
    for each in held.values():
        mesh = getattr(each.shard.tensor, "device_mesh", None)
        return str(each.shard.tensor.device.type if mesh is None else mesh.device_type)
    return "cpu"


def mesh_of(held: Mapping[str, Held]) -> dict[str, object]:
    """How many ranks there are, and the axes that any tensor is laid over, as JSON."""
    axes: dict[str, int] = {}
    for each in held.values():
        mesh = getattr(each.shard.tensor, "device_mesh", None)
        if mesh is not None:
            names: Sequence[str] = mesh.mesh_dim_names or [f"axis {index}" for index in range(mesh.ndim)]
            axes |= dict(zip(names, mesh.shape, strict=True))
    return {"ranks": num_ranks(), "axes": axes}


def this_rank() -> int:
    """0 where there is no process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks() -> int:
    """1 where there is no process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def dtype_name(dtype: torch.dtype) -> str:
    """Without `torch.`."""
    return str(dtype).removeprefix("torch.")
