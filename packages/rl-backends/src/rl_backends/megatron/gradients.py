"""Gradients by Hugging Face's names, as an optimizer step would use them: for verification, not for training."""

from collections.abc import Iterator

import torch
from torch import Tensor

from rl_backends.megatron.checkpoint.masters import masters_of
from rl_backends.megatron.cpu_compat import cpu_compat
from rl_backends.megatron.model import MegatronModel
from rl_backends.megatron.optimizer import MegatronOptimizers

__all__ = ["summed_gradients"]


@torch.no_grad()
def summed_gradients(
    model: MegatronModel, optimizers: MegatronOptimizers
) -> Iterator[tuple[str, tuple[int, ...], Tensor]]:
    """Name, offsets and numbers of every part of a gradient that this rank steps along, summed over all ranks.

    Every rank must call it. The sum is made in place: forget the gradient before another pass.
    """
    from megatron.core.distributed import finalize_model_grads

    with cpu_compat():
        finalize_model_grads([model.ddp], None)
        optimizers.inner.prepare_grads()
    for master in masters_of(optimizers):
        assert master.tensor.grad is not None
        for held in model.held:
            if held.parameter is master.parameter and not held.duplicate:
                piece = master.piece(held, master.tensor.grad)
                for box in piece.boxes:
                    yield held.name, tuple(box.offsets), box.of_local(piece.local)
