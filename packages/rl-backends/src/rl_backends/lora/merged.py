"""A model's weights with its adapters merged in: for engines, in the same memory at every refresh, and for files.

    W' = W + scaling * (B A)        in float32, rounded once; of DoRA with each row scaled to its magnitude

from the frozen W each time. W itself is never written, so nothing drifts, however often weights are sent. A rank
computes its own part of W' from its parts of W and B and the columns of A that it needs: A alone is gathered, over the
ranks that FSDP has cut its few rows over.
"""

from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor, nn

from rl_backends.checkpoints.shards import this_rank
from rl_backends.lora.layers import TAILS, AdaptedLayer, adapted_layers, base_name
from rl_parallel_plans import NamedShard, named_shards, to_local_if_dtensor
from rl_parallel_plans.dtensor import is_dtensor


@torch.no_grad()
def merged_weight(
    base: Tensor, lora_a: Tensor, lora_b: Tensor, *, scaling: float, magnitude: Tensor | None = None
) -> Tensor:
    """W + scaling * (B A), [out, in] in float32; W [out, in], A [rank, in], B [out, rank] in any dtype.

    Experts have a leading dim of experts in all of them. magnitude: of DoRA [out], the length that each row gets.
    """
    merged = base.float() + (lora_b.float() @ lora_a.float()) * scaling
    if magnitude is None:
        return merged
    scales: Tensor = magnitude.float() / torch.linalg.vector_norm(merged, dim=1)
    return merged * scales[:, None]


@final
class MergedWeights:
    """What this rank holds of a model with its adapters merged, by Hugging Face name: what an engine is fed from.

    Weights with an adapter have memory of their own here, as large as this rank's part of them and placed alike; all
    other tensors are the model's own. Both are the same objects at every refresh. ModelError of a model without
    adapters.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._merged = {
            layer.weight: torch.empty_like(layer.base, requires_grad=False) for layer in adapted_layers(model)
        }
        self._released = False
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Merge the adapters as they are now; every rank must call it. Call it before each refit.

        After `release` the same tensors have memory again.
        """
        for layer in adapted_layers(self._model):
            out = self._merged[layer.weight]
            local = to_local_if_dtensor(out)
            num_bytes = int(local.storage_offset() + local.numel()) * local.element_size()
            if local.untyped_storage().nbytes() < num_bytes:  # given up by `release`
                local.untyped_storage().resize_(num_bytes)
            _merge(layer, out=out)
        self._released = False

    def release(self) -> None:
        """Free the memory of the merged weights; their tensors stay, and must not be read until `refresh`."""
        for tensor in self._merged.values():
            to_local_if_dtensor(tensor).untyped_storage().resize_(0)
        self._released = True

    @property
    def extra_bytes(self) -> int:
        """Memory on this rank beside the model's."""
        return sum(to_local_if_dtensor(tensor).nbytes for tensor in self._merged.values())

    def shards(self) -> Iterator[NamedShard]:
        """What this rank holds of each parameter and persistent buffer, as `named_shards` of the merged model would."""
        if self._released:
            raise RuntimeError("the merged weights were released; call refresh() before they are read")
        for shard in named_shards(self._model):
            if not shard.name.endswith(TAILS):
                name = base_name(shard.name)
                tensor = self._merged.get(name, shard.tensor)
                yield NamedShard(name=name, tensor=tensor, shape=shard.shape, row_order=shard.row_order)


@torch.no_grad()
def export_merged(model: nn.Module, *, every_rank: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Names and whole tensors as of `rl_parallel_plans.export_state_dict`, on the CPU, adapters merged in float32.

    A collective: every rank must iterate to the end; only rank 0 is given anything, unless `every_rank`. Beside what is
    yielded, this rank's part of one merged weight is in memory.
    """
    layers = {layer.weight: layer for layer in adapted_layers(model)}
    for shard in named_shards(model):
        if shard.name.endswith(TAILS):
            continue
        name, tensor = base_name(shard.name), shard.tensor.detach()
        if name in layers:
            tensor = torch.empty_like(tensor)
            _merge(layers[name], out=tensor)
        if is_dtensor(tensor):
            # Offloaded shards lie in host memory, where the mesh of a GPU cannot gather them.
            tensor = tensor.to(tensor.device_mesh.device_type).full_tensor()  # type: ignore[attr-defined]
        if every_rank or this_rank() == 0:
            whole = tensor if shard.row_order is None else shard.row_order.undealt(tensor)
            yield name, whole.to("cpu")


def _merge(layer: AdaptedLayer, *, out: Tensor) -> None:
    if layer.kind == "embedding":
        _merge_embedding(layer, out=out)
        return
    if layer.kind == "experts":  # of all three this rank has the same experts
        base, lora_a, lora_b = (to_local_if_dtensor(each.detach()) for each in (layer.base, layer.lora_a, layer.lora_b))
        merged = merged_weight(base.mT if layer.transposed else base, lora_a, lora_b, scaling=layer.scaling)
        to_local_if_dtensor(out).copy_(merged.mT if layer.transposed else merged)
        return
    lora_a = _with_all_rows(layer.lora_a)
    base, lora_b = (to_local_if_dtensor(each.detach()).to(lora_a.device) for each in (layer.base, layer.lora_b))
    if base.ndim == 3:  # of a fused layer, registered as [rows / tp, tp, in]; this rank has its rows of both alike
        base, lora_b = base.squeeze(1), lora_b.squeeze(1)
    assert base.shape == (lora_b.shape[0], lora_a.shape[1]), f"{layer.name}: {base.shape}, {lora_b.shape}"
    local = to_local_if_dtensor(out)
    magnitude = None if layer.magnitude is None else to_local_if_dtensor(layer.magnitude.detach()).to(lora_a.device)
    local.copy_(merged_weight(base, lora_a, lora_b, scaling=layer.scaling, magnitude=magnitude).view(local.shape))


def _merge_embedding(layer: AdaptedLayer, *, out: Tensor) -> None:
    """A and B are gathered, since FSDP has cut A by its ranks and not by words as W is; they are small beside W."""
    lora_a, lora_b = _with_all_rows(layer.lora_a), _with_all_rows(layer.lora_b)
    shard = NamedShard(name=layer.name, tensor=layer.base.detach(), shape=tuple(layer.base.shape), row_order=None)
    base, local = shard.local.to(lora_a.device), to_local_if_dtensor(out)
    for box in shard.boxes():
        words = slice(box.offsets[0], box.offsets[0] + box.sizes[0])
        merged = merged_weight(box.of_local(base), lora_b.t(), lora_a[:, words].t(), scaling=layer.scaling)
        box.of_local(local).copy_(merged)


def _with_all_rows(lora_a: Tensor) -> Tensor:
    """A [rank, in] with every row, and of its columns those that this rank's part of W has."""
    if not is_dtensor(lora_a):
        return lora_a.detach()
    from torch.distributed.tensor import DTensor, Replicate

    # Offloaded shards lie in host memory, where the mesh of a GPU cannot gather them.
    sharded = lora_a.detach().to(lora_a.device_mesh.device_type)
    assert isinstance(sharded, DTensor)
    placements = [placed if placed.is_shard(1) else Replicate() for placed in sharded.placements]
    return sharded.redistribute(placements=placements).to_local()
