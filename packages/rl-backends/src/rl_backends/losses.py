"""What a loss is given and must return, checked before any rank goes on with it: an error here is told to all ranks."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from rl_backends.examples import BatchT, TokenBatch

__all__ = ["ROUTER_LOSS", "LossFunction", "Output", "Sums", "ask", "checked", "last_tokens", "through_outputs"]

Sums = dict[str, Tensor]
Output = Literal["logp", "logp_and_entropy", "logp_of_token_ids", "value", "score"]
LossFunction = Callable[[Tensor, BatchT], tuple[Tensor, Sums]]

ROUTER_LOSS = "router_aux_loss"
"""The name under which the auxiliary loss of a mixture is among the sums."""


def checked(result: Any, *, outputs: Tensor, reserved: tuple[str, ...] = ()) -> tuple[Tensor, dict[str, Tensor]]:
    """The scalar and the sums that a loss has returned, the sums as tensors.

    Args:
        result: of the loss.
        outputs: what the loss was given.
        reserved: names that are not the loss's to give.

    Raises:
        TypeError: it is no pair of a tensor and named numbers.
        ValueError: a number is not a single one, no gradient flows from the scalar, or a name is taken.
    """
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
        raise TypeError(f"a loss returns (scalar, {{name: scalar}}), and this one returned a {type(result).__name__}")
    total, parts = result
    if not isinstance(total, Tensor) or total.numel() != 1:
        what = f"a tensor of shape {list(total.shape)}" if isinstance(total, Tensor) else f"a {type(total).__name__}"
        raise TypeError(f"a loss returns a scalar tensor first, and this one returned {what}")
    if outputs.requires_grad and not total.requires_grad:
        raise ValueError(
            "no gradient flows from what the loss returned: it was detached, or made of constants; for rows without a "
            "loss return outputs.sum() * 0"
        )
    if taken := sorted(set(parts) & set(reserved)):
        raise ValueError(f"the loss names a sum {taken[0]}, which the backend reports itself; give it another name")
    return total.reshape(()), {name: _number(name, part, device=outputs.device) for name, part in parts.items()}


def ask(loss: LossFunction[BatchT], outputs: Tensor, rows: BatchT, *, counted: bool) -> tuple[Tensor, Sums]:
    """Call the loss on the model's outputs for the rows of one microbatch; see `through_outputs`."""
    leaf = outputs.detach().requires_grad_(outputs.requires_grad)
    return through_outputs(loss(leaf, rows), leaf=leaf, outputs=outputs, counted=counted)


def through_outputs(
    result: Any, *, leaf: Tensor, outputs: Tensor, counted: bool, reserved: tuple[str, ...] = ()
) -> tuple[Tensor, Sums]:
    """A scalar whose gradient in `outputs` is that of the loss, and the loss's sums.

    The backward pass of the loss itself runs here, apart from the model's, so an error in it can be reported to the
    ranks that take part in the model's.

    Args:
        result: what the loss returned for `leaf`.
        leaf: `outputs`, detached from the model.
        outputs: of the model, for the rows of one microbatch.
        counted: False for a microbatch whose gradient shall be 0.
        reserved: names of sums that the loss may not use.

    Raises:
        Exception: what `checked` raises, and what the loss's backward pass raises.
    """
    total, parts = checked(result, outputs=leaf, reserved=reserved)
    if not counted:
        return outputs.sum() * 0.0, parts
    torch.autograd.backward(total)
    gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    return (outputs * gradient).sum(), parts


def _number(name: str, part: Any, *, device: torch.device) -> Tensor:
    if isinstance(part, Tensor) and part.ndim == 0:
        return part.detach().to(device)
    if isinstance(part, int | float):
        return torch.tensor(part, device=device)
    what = f"of shape {list(part.shape)}" if isinstance(part, Tensor) else f"a {type(part).__name__}"
    raise TypeError(f"the sum {name!r} that the loss returned is {what}; reduce it to a single number in the loss")


def last_tokens(examples: TokenBatch) -> Tensor:
    """Where each row ends: bool [B, T]."""
    return torch.arange(examples.tokens.shape[1], device=examples.lengths.device) == examples.lengths[:, None] - 1
