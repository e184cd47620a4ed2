"""A frozen copy of a sharded model: the reference that a policy is compared with."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from rl_backends.dtensor.sharded_model import ShardedModel
from rl_parallel_plans import to_local_if_dtensor

__all__ = ["copy_of"]


def copy_of(sharded: ShardedModel, skeleton: nn.Module, *, offload: bool) -> ShardedModel:
    """A second model of the same weights on the same mesh, shard by shard.

    Args:
        sharded: whose weights are taken.
        skeleton: `without_weights` of the model that it was made of.
        offload: keep the copy's shards in host memory; each layer visits the device when it runs.
    """
    config = replace(sharded.config, cpu_offload=offload or sharded.config.cpu_offload, activation_checkpointing=None)
    with _frozen(skeleton):
        fill = lambda model: _copy_weights(sharded, model)  # noqa: E731
        return ShardedModel(skeleton, config, fill=fill, membership=sharded.membership)


def _copy_weights(sharded: ShardedModel, target: nn.Module) -> None:
    """Parameters and all buffers, also those that no file holds or that have changed since the model was made."""
    sharded.reshard()
    held = dict(sharded.model.named_parameters())
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            to_local_if_dtensor(parameter).copy_(to_local_if_dtensor(held[name].detach()))
    _copy_buffers(sharded.model, target)


def _copy_buffers(model: nn.Module, target: nn.Module) -> None:
    copies: dict[int, Tensor] = {}
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if id(buffer) not in copies:
                copies[id(buffer)] = buffer.detach().clone()
            persistent = name not in module._non_persistent_buffers_set  # noqa: SLF001 - no public one
            target.get_submodule(path).register_buffer(name, copies[id(buffer)], persistent=persistent)


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    model.requires_grad_(requires_grad=False)
    yield
