"""What a loss is given and must return, checked before any rank continues: an error is reported to all ranks."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, Literal

import torch
from torch import Tensor

from rl_backends.batching.microbatches import moved
from rl_backends.examples import BatchT, TokenBatch

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
                result = self._loss(leaf, moved(rows, device=self._device))
                total, parts = through_outputs(
                    result, leaf=leaf, outputs=outputs, counted=counted, reserved=self._reserved
                )
        except Exception as error:  # noqa: BLE001 - anybody's loss; raised later, on all ranks
            self.failure = error
            return outputs.sum() * 0.0
        self.add(parts, counted=counted)
        return total

    def add(self, parts: Mapping[str, Tensor], *, counted: bool) -> None:
        """Add named scalars of one microbatch to `sums`; 0 for one that does not count."""
        for name, part in parts.items():
            self.sums[name] = self.sums.get(name, 0.0) + (part if counted else torch.zeros_like(part))


def through_outputs(
    result: Any, *, leaf: Tensor, outputs: Tensor, counted: bool, reserved: tuple[str, ...] = ()
) -> tuple[Tensor, Sums]:
    """Check what a loss returned; give a scalar whose gradient in `outputs` is that of the loss, and the loss's sums.

    The backward pass of the loss itself runs here, apart from the model's, so an error in it can be reported to the
    ranks that take part in the model's.

    Args:
        result: what the loss returned for `leaf`.
        leaf: `outputs`, detached from the model.
        outputs: of the model, for the rows of one microbatch.
        counted: False for a microbatch whose gradient shall be 0.
        reserved: names of sums that the loss may not use.
    """
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
        raise TypeError(f"a loss returns (scalar, {{name: scalar}}), and this one returned a {type(result).__name__}")
    total, given = result
    if not isinstance(total, Tensor) or total.numel() != 1:
        what = f"a tensor of shape {list(total.shape)}" if isinstance(total, Tensor) else f"a {type(total).__name__}"
        raise TypeError(f"a loss returns a scalar tensor first, and this one returned {what}")
    if leaf.requires_grad and not total.requires_grad:
        raise ValueError(
            "no gradient flows from what the loss returned: it was detached, or made of constants; for rows without a "
            "loss return outputs.sum() * 0"
        )
    if taken := sorted(set(given) & set(reserved)):
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
    if not counted:
        return outputs.sum() * 0.0, sums
    torch.autograd.backward(total.reshape(()))
    gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    return (outputs * gradient).sum(), sums


def last_tokens(examples: TokenBatch) -> Tensor:
    """Where each row ends: bool [B, T]."""
    return torch.arange(examples.tokens.shape[1], device=examples.lengths.device) == examples.lengths[:, None] - 1
