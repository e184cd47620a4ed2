"""What a sharded, wrapped and adapted model holds, under the names of the model that it was made from."""

import re
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from rl_backends.errors import ModelError
from rl_parallel_plans import Box, NamedShard, named_shards, stage_info

__all__ = ["Shard", "first_names", "shards_by_name", "write_whole"]

ADAPTER = re.compile(r"(^|[._])lora_")
"""In the names of what adapters add to a model."""

WRAPPED = re.compile(r"(\.(base_layer|original_module|modules_to_save\.[^.]+))+(?=\.)")
"""What adapters put into the names of the parameters that they wrap or copy."""


@runtime_checkable
class Shard(Protocol):
    """This rank's part of one tensor, whatever has cut it."""

    @property
    def local(self) -> Tensor:
        """This rank's memory."""

    def boxes(self) -> list[Box]:
        """The parts of the whole that it consists of."""


def first_names(skeleton: nn.Module) -> dict[str, str]:
    """Each name of a parameter or persistent buffer to the first name of that tensor: itself, if it is not tied."""
    first: dict[int, str] = {}
    tensors = skeleton.state_dict(keep_vars=True)
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}


def shards_by_name(model: nn.Module, skeleton: nn.Module) -> dict[str, list[NamedShard]]:
    """What this rank holds of each tensor of `skeleton`, by its first name; adapters are left out.

    Several shards are of one tensor where an adapter keeps a copy of it. A pipeline stage has some of the tensors.

    Raises:
        ModelError: the model is not `skeleton` sharded, or its parameters have no memory yet.
    """
    first = first_names(skeleton)
    shapes = {name: tuple(tensor.shape) for name, tensor in skeleton.state_dict().items()}
    found: dict[str, list[NamedShard]] = {}
    for shard in named_shards(model):
        if ADAPTER.search(shard.name):
            continue
        name = WRAPPED.sub("", shard.name.removeprefix("base_model.model."))
        if shapes.get(name) != tuple(shard.shape):
            known = f"is {list(shapes[name])} there" if name in shapes else "is unknown there"
            raise ModelError(
                f"{shard.name} {list(shard.shape)} {known}: the model is no {type(skeleton).__name__} of this source"
            )
        if shard.local.is_meta:
            raise ModelError(f"{shard.name} lies on the meta device: call materialize(model, device) first")
        found.setdefault(first[name], []).append(shard)
    if (absent := sorted(set(first.values()) - found.keys())) and stage_info(model) is None:
        raise ModelError(f"the model has no {_some(absent)}, which {type(skeleton).__name__} has")
    return found


@torch.no_grad()
def write_whole(whole: Tensor, shards: Iterable[Shard]) -> None:
    """Copy this rank's parts of `whole` into its shards."""
    for shard in shards:
        local = shard.local
        for box in shard.boxes():
            box.of_local(local).copy_(box.of_whole(whole))


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
