# ruff: noqa: D102 - methods are documented by `CheckpointContents`
"""What a rank has of a model and its optimizers: what a checkpoint is written from, and what it is read into."""

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn

from rl_backends.checkpoints.optimizer_state import (
    CheckpointedOptimizers,
    NewState,
    describe_optimizers,
    new_states,
    optimizer_shards,
)
from rl_backends.checkpoints.shards import WEIGHTS, TensorShard, dtype_name, model_shards, num_ranks
from rl_backends.loading.weights import Shard
from rl_backends.rank_agreement import gather_text, on_every_rank
from rl_parallel_plans import named_shards, stage_info

Description = tuple[dict[str, list[Any]], list[dict[str, Any]] | None]
"""Dtype and shape of each weight by name, which identify a model; and the optimizers, as JSON."""


class CheckpointContents(ABC):
    """This rank's part of a model and its optimizers, whatever has laid them out."""

    optimizers: CheckpointedOptimizers | None
    mesh: dict[str, Any]
    """`ranks`, and `axes` that the model is laid over with their sizes, as JSON."""
    device: str
    """Type of the one that the model computes on, wherever offloaded shards are."""
    in_parts: bool
    """Whether no rank knows of all weights, so that ranks describe the model together."""

    @abstractmethod
    def describe(self, *, optimizers: bool, saved: Mapping[str, list[Any]] | None) -> Description:
        """What this rank knows of.

        saved: dtype and shape of each weight of the checkpoint that is to be read; None for one that is to be written.
        """

    @abstractmethod
    def shards(self, *, left_out: Collection[str]) -> list[TensorShard]:
        """What is written of this rank's weights, but those `left_out`, and of the optimizers' state."""

    @abstractmethod
    def weights(self) -> Iterable[TensorShard]:
        """What weights are read into."""

    @abstractmethod
    def new_states(self, saved: Sequence[Mapping[str, Any]]) -> list[NewState]:
        """What the optimizers' state is read into, as a checkpoint has described it."""

    @abstractmethod
    def held(self, *, frozen: bool = False) -> Iterable[Shard]:
        """What this rank holds of the weights; only of those that do not train with `frozen`."""

    @abstractmethod
    def clear_gradients(self) -> None:
        """Forget them, as what they were gradients of has changed."""

    def described_by_all(
        self, *, group: dist.ProcessGroup | None, optimizers: bool, saved: Mapping[str, list[Any]] | None = None
    ) -> Description:
        """As `describe`, of all ranks; every rank must call it."""
        own = on_every_rank(lambda: self.describe(optimizers=optimizers, saved=saved), group=group)
        if not self.in_parts:
            return own
        names: dict[str, list[Any]] = {}
        merged: list[dict[str, Any]] | None = None if own[1] is None else []
        for text in gather_text(json.dumps(own), group=group):
            theirs, described = json.loads(text)
            names |= theirs
            for index, each in enumerate(described or ()):
                assert merged is not None
                if index == len(merged):
                    merged.append({**each, "groups": [], "state": {}})
                merged[index]["state"] |= each["state"]
                groups = merged[index]["groups"]
                for part in each["groups"]:
                    same = next((group for group in groups if group["options"] == part["options"]), None)
                    if same is None:
                        groups.append(same := {"names": [], "options": part["options"]})
                    same["names"] += [name for name in part["names"] if name not in same["names"]]
        return names, merged


class TorchContents(CheckpointContents):
    """Of a model that is sharded by rl_parallel_plans, or plain, and optimizers of its parameters."""

    def __init__(self, model: nn.Module, optimizers: CheckpointedOptimizers | None) -> None:
        self.optimizers = optimizers
        self._model = model
        self._shards = model_shards(model)
        tensors: list[Any] = [each.shard.tensor for each in self._shards.values()]
        meshes = [tensor.device_mesh for tensor in tensors if hasattr(tensor, "device_mesh")]
        self.device = str(meshes[0].device_type if meshes else tensors[0].device.type if tensors else "cpu")
        axes: dict[str, int] = {}
        for mesh in meshes:
            names: Sequence[str] = mesh.mesh_dim_names or [f"axis {index}" for index in range(mesh.ndim)]
            axes |= dict(zip(names, mesh.shape, strict=True))
        self.mesh = {"ranks": num_ranks(), "axes": axes}
        self.in_parts = stage_info(model) is not None

    def describe(self, *, optimizers: bool, saved: Mapping[str, list[Any]] | None) -> Description:
        del saved
        shards = self._shards
        names = {name: [dtype_name(each.shard.tensor.dtype), list(each.shard.shape)] for name, each in shards.items()}
        if self.optimizers is None or not optimizers:
            return names, None
        return names, describe_optimizers(self.optimizers, shards)

    def shards(self, *, left_out: Collection[str]) -> list[TensorShard]:
        weights = [each for each in self.weights() if each.weight not in left_out]
        return weights + ([] if self.optimizers is None else optimizer_shards(self.optimizers, self._shards))

    def weights(self) -> list[TensorShard]:
        return [replace(each.of(each.shard.tensor), saved_as=f"{WEIGHTS}{name}") for name, each in self._shards.items()]

    def new_states(self, saved: Sequence[Mapping[str, Any]]) -> list[NewState]:
        assert self.optimizers is not None
        return new_states(self.optimizers, self._shards, saved)

    def held(self, *, frozen: bool = False) -> list[Shard]:
        shards = named_shards(self._model)
        if not frozen:
            return list(shards)
        parameters = [each for each in shards if isinstance(each.tensor, nn.Parameter)]
        return [each for each in parameters if not each.tensor.requires_grad]

    def clear_gradients(self) -> None:
        self._model.zero_grad()
