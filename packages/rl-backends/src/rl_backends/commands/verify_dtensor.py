"""What `verify` asks of the DTensor backend on one rank: to be made, and the parts that it holds."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from rl_backends.dtensor.backend import DTensorBackend
from rl_backends.dtensor.config import DTensorConfig
from rl_backends.kernels import KernelsConfig
from rl_parallel_plans import NamedShard, named_shards

__all__ = ["gradients", "load", "weights"]

Part = tuple[str, tuple[int, ...], Tensor]


def load(model: Path, config: dict[str, Any]) -> DTensorBackend:
    """The backend over a folder."""
    kernels = KernelsConfig(**config["kernels"])
    return DTensorBackend.from_pretrained(str(model), DTensorConfig(**{**config, "kernels": kernels}))


def weights(backend: DTensorBackend) -> Iterator[Part]:
    """Name, offsets and numbers of every part of a weight that this rank holds."""
    return _parts(backend, lambda shard: shard.tensor.detach())


def gradients(backend: DTensorBackend) -> Iterator[Part]:
    """The same of gradients."""
    return _parts(backend, lambda shard: shard.tensor.grad)


def _parts(backend: DTensorBackend, of: Callable[[NamedShard], Tensor | None]) -> Iterator[Part]:
    for shard in named_shards(backend.model):
        tensor = of(shard)
        if tensor is None or not tensor.is_floating_point():
            continue
        local = shard.local_of(tensor)
        for box in shard.boxes(tensor):
            yield shard.name, tuple(box.offsets), box.of_local(local)
