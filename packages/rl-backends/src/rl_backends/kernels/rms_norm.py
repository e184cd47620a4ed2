"""RMS norms on a CPU, to the bit of what transformers' own code and torch's `F.rms_norm` compute, in half the time.

Autograd writes a dozen tensors of the size of the input in backward, where the same numbers can be had with four: a
factor of 2 is taken to the small side of a product, what is spread over features is not written out, and sums are made
in place. Only powers of two and the order of a product's factors differ, which no rounding sees.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor


def runs_here(hidden: Tensor, weight: Tensor) -> bool:
    """Whether `rms_norm` computes them: whole tensors in float32 on a CPU."""
    return (
        hidden.dtype == weight.dtype == torch.float32
        and hidden.device.type == "cpu"
        and not isinstance(hidden, DTensor)
        and not isinstance(weight, DTensor)
    )


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., H], `hidden / rms(hidden) * weight` of hidden [..., H] and weight [H]; differentiable once."""
    # Twice, as two terms of its gradient: autograd adds them one after the other to those of others, and rounds so.
    normed: Tensor = _RMSNorm.apply(hidden, hidden, weight, eps)  # type: ignore[no-untyped-call]
    return normed


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, _: Tensor, weight: Tensor, eps: float) -> Tensor:  # noqa: PLR0917 - torch's protocol
        scaled = hidden.pow(2)
        scale = scaled.mean(-1, keepdim=True).add_(eps).rsqrt_()
        torch.mul(hidden, scale, out=scaled)
        ctx.save_for_backward(hidden, weight, scale, scaled)
        return weight * scaled

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, scale, scaled = ctx.saved_tensors
        through_product = through_scale = grad_weight = None
        if ctx.needs_input_grad[2]:
            grad_weight = (grad * scaled).sum(tuple(range(grad.ndim - 1)))
        if ctx.needs_input_grad[0]:
            # d scale / d hidden = -scale³ · hidden / H, in the order in which autograd rounds it.
            through_product = grad * weight
            of_scale = (through_product * hidden).sum(-1, keepdim=True)
            through_product.mul_(scale)
            through_scale = hidden * of_scale.mul_(-0.5).mul_(scale.pow(3)).div_(hidden.shape[-1]).mul_(2.0)
        return through_product, through_scale, grad_weight, None
