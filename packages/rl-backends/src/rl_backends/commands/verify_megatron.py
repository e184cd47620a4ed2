"""What `verify` asks of the Megatron backend on one rank: to be made, and the parts that it holds."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from rl_backends.megatron.backend import MegatronBackend
from rl_backends.megatron.config import MegatronConfig
from rl_backends.megatron.gradients import summed_gradients

__all__ = ["gradients", "load", "weights"]

Part = tuple[str, tuple[int, ...], Tensor]


def load(model: Path, config: dict[str, Any]) -> MegatronBackend:
    """The backend over a folder, by way of a conversion; its weights are saved again beside it before they train."""
    backend = MegatronBackend.from_pretrained(str(model), MegatronConfig(**config))
    backend.save_pretrained(model.parent / "untrained")
    return backend


def weights(backend: MegatronBackend) -> Iterator[Part]:
    """Name, offsets and numbers of every part of a weight that this rank holds."""
    for held in backend.shards():
        for box in held.boxes():
            yield held.name, tuple(box.offsets), box.of_local(held.local)


def gradients(backend: MegatronBackend) -> Iterator[Part]:
    """The same of gradients, which ranks sum up for it: the backend must forget them before it goes on."""
    optimizers = backend._optimizers  # noqa: SLF001 - ours
    assert optimizers is not None
    return summed_gradients(backend._distributed, optimizers)  # noqa: SLF001 - ours
