"""The policy's weights as a refit reads them: each rank's own shards, under Hugging Face's names, nothing gathered."""

from collections.abc import Iterator

from torch import Tensor, nn

from rl_backends import DTensorBackend
from rl_refit import Binding, Region, StateDictSource

__all__ = ["weight_source"]


def weight_source(policy: DTensorBackend) -> StateDictSource:
    """A `WeightSource` over the policy's shards, of the values of the latest `policy.shards()`.

    Adapters are merged; call `policy.shards()` before each refit to merge them anew. Fused weights whose rows tensor
    parallelism has put in another order are sent box by box, in the order of the unsharded model.
    """
    shards = policy.shards()
    tensors = {shard.name: shard.tensor for shard in shards} | _transient_buffers(policy.model)
    reordered = [shard for shard in shards if shard.row_order is not None]

    def bindings(_: nn.Module) -> Iterator[Binding]:
        for shard in reordered:
            for box in shard.boxes():
                region = Region(shard.name, box.offsets, box.sizes)
                yield Binding(region, shape=shard.shape, tensor=box.of_local(shard.local))

    return StateDictSource(tensors, bindings=bindings if reordered else None)


def _transient_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that no state dict has, such as rotary frequencies: an engine of the same class has them too."""
    transient = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set  # noqa: SLF001 - no public one
    }
    return {name: buffer for name, buffer in model.named_buffers() if name in transient}
