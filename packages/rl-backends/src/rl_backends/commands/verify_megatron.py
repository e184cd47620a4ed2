"""What `verify` asks of the Megatron backend on one rank: to be made, and the parts that it holds."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_backends.megatron.backend import MegatronBackend
from rl_backends.megatron.checkpoint.masters import masters_of
from rl_backends.megatron.config import MegatronConfig
from rl_backends.megatron.cpu_compat import cpu_compat

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


@torch.no_grad()
def gradients(backend: MegatronBackend) -> Iterator[Part]:
    """The same of gradients, which ranks sum up for it: the backend must forget them before it goes on."""
    from megatron.core.distributed import finalize_model_grads

    model, optimizers = backend._model, backend._require_optimizers()  # noqa: SLF001 - ours
    with cpu_compat():
        finalize_model_grads([model.ddp], None)
        optimizers.inner.prepare_grads()
    held = backend.shards()
    for master in masters_of(optimizers):
        assert master.tensor.grad is not None
        for each in held:
            if each.parameter is master.parameter:
                piece = master.piece(each, master.tensor.grad)
                for box in piece.boxes:
                    yield each.name, tuple(box.offsets), box.of_local(piece.local)
