"""What a loss is given and must return, checked before any rank continues: an error is reported to all ranks."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, Literal

import torch
from torch import Tensor

from rl_backends.examples import BatchT, TokenBatch, changed

Sums = dict[str, Tensor]
Output = Literal["logp", "logp_and_entropy", "logp_of_token_ids", "value", "score"]
LossFunction = Callable[[Tensor, BatchT], tuple[Tensor, Sums]]

ROUTER_LOSS = "router_aux_loss"
"""The name under which the auxiliary loss of a mixture is among the sums."""


class LossOverMicrobatches(Generic[BatchT]):
    """The caller's loss, called for microbatch after microbatch of this rank.

    A loss that raises must not stop its rank alone, since other ranks wait in the collectives of the model's backward:
    the first error is kept in `failure`, and this rank goes on with a loss of 0 until all ranks can raise together.
    """

    def __init__(
        self,
        loss: LossFunction[BatchT],
        *,
        device: str,
        reserved: tuple[str, ...] = (),
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._loss, self._device, self._reserved, self._around = loss, device, reserved, around
        self.sums: Sums = {}
        """Of the microbatches so far that count."""
        self.failure: Exception | None = None
        """What the loss raised first."""

    def __call__(self, outputs: Tensor, rows: BatchT, *, counted: bool) -> Tensor:
        """A scalar whose gradient in `outputs`, those of `rows`, is that of the loss; 0 after a failure."""
        if self.failure is not None:
            return outputs.sum() * 0.0
        leaf = outputs.detach().requires_grad_(outputs.requires_grad)
        try:
            with self._around():
                result = self._loss(leaf, changed(rows, lambda _, tensor: tensor.to(self._device)))
                loss, parts = self._checked(result, leaf)
                if counted:  # the backward of the loss alone: in the model's an error would stop this rank alone
                    torch.autograd.backward(loss.reshape(()))
        except Exception as error:  # noqa: BLE001 - anybody's loss; raised later, on all ranks
            self.failure = error
            return outputs.sum() * 0.0
        self.add(parts, counted=counted)
        return outputs.sum() * 0.0 if leaf.grad is None else (outputs * leaf.grad).sum()

    def add(self, parts: Mapping[str, Tensor], *, counted: bool) -> None:
        """Add named scalars of one microbatch to `sums`; 0 for one that does not count."""
        for name, part in parts.items():
            self.sums[name] = self.sums.get(name, 0.0) + (part if counted else torch.zeros_like(part))

    def _checked(self, result: Any, leaf: Tensor) -> tuple[Tensor, Sums]:
        """What the loss returned for `leaf`: its scalar, and its sums as tensors on the device."""
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
            raise TypeError(
                f"a loss returns (scalar, {{name: scalar}}), and this one returned a {type(result).__name__}"
            )
        total, given = result
        if not isinstance(total, Tensor) or total.numel() != 1:
            shape = f"tensor of shape {list(total.shape)}" if isinstance(total, Tensor) else type(total).__name__
            raise TypeError(f"a loss returns a scalar tensor first, and this one returned a {shape}")
        if leaf.requires_grad and not total.requires_grad:
            raise ValueError(
                "no gradient flows from what the loss returned: it was detached, or made of constants; for rows "
                "without a loss return outputs.sum() * 0"
            )
        if taken := sorted(set(given) & set(self._reserved)):
            raise ValueError(f"the loss names a sum {taken[0]}, which the backend reports itself; give it another name")
        sums: Sums = {}
        for name, part in given.items():
            if isinstance(part, Tensor) and part.ndim == 0:
                sums[name] = part.detach().to(leaf.device)
            elif isinstance(part, int | float):
                sums[name] = torch.tensor(part, device=leaf.device)
            else:
                what = f"of shape {list(part.shape)}" if isinstance(part, Tensor) else f"a {type(part).__name__}"
                raise TypeError(
                    f"the sum {name!r} that the loss returned is {what}; reduce it to a single number in the loss"
                )
        return total, sums


def last_tokens(examples: TokenBatch) -> Tensor:
    """Where each row ends: bool [B, T]."""
    return torch.arange(examples.tokens.shape[1], device=examples.lengths.device) == examples.lengths[:, None] - 1
