"""Norms, rotary embeddings and SwiGLU on a CPU in float32: what plain code computes, in fewer passes.

Autograd keeps each step of plain code for backward, and writes a tensor for each. The same numbers can be had from what
came in, one step after the other made in the same memory: a CPU is faster at numbers that it has just had, and memory
that was just given back may have to be taken from the system again, page by page. Only powers of two, signs and the
order of factors or terms differ, which no rounding sees; rotary embeddings round once where plain code rounds twice.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor


def runs_here(*tensors: Tensor) -> bool:
    """Whether they are for this file: whole tensors in float32 on a CPU."""
    return all(
        each.dtype == torch.float32 and each.device.type == "cpu" and not isinstance(each, DTensor) for each in tensors
    )


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., H], `hidden / rms(hidden) * weight` of hidden [..., H] and weight [H]; differentiable once."""
    # Twice, as two terms of its gradient: autograd adds them one after the other to those of others, and rounds so.
    normed: Tensor = _RMSNorm.apply(hidden, hidden, weight, eps)  # type: ignore[no-untyped-call]
    return normed


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, _: Tensor, weight: Tensor, eps: float) -> Tensor:  # noqa: PLR0917 - torch's protocol
        normed = hidden.pow(2)
        scale = normed.mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(hidden, weight, scale)
        return torch.mul(hidden, scale, out=normed).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, scale = ctx.saved_tensors
        through_product = through_scale = grad_weight = None
        room = hidden * scale
        if ctx.needs_input_grad[2]:
            grad_weight = (grad * room).sum(tuple(range(grad.ndim - 1)))  # in the order in which `grad` lies in memory
        if ctx.needs_input_grad[0]:
            # d scale / d hidden = -scale³ · hidden / H, in the order in which autograd rounds it.
            through_product = grad * weight
            of_scale = torch.mul(through_product, hidden, out=room).sum(-1, keepdim=True)
            through_product.mul_(scale)
            of_scale.mul_(-0.5).mul_(scale.pow(3)).div_(hidden.shape[-1]).mul_(2.0)
            through_scale = torch.mul(hidden, of_scale, out=room)
        return through_product, through_scale, grad_weight, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same of x [..., D], each half of whose last dim is turned against the other; differentiable once.

    cos: of the angles, both halves alike, [..., D] that x broadcasts to.
    sin: likewise, with a minus in the first half.
    """
    turned: Tensor = _Rotation.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return turned


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # noqa: PLR0917 - torch's protocol
        ctx.save_for_backward(cos, sin)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((second, first), dim=-1).mul_(sin).addcmul_(x, cos)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        first, second = grad.chunk(2, dim=-1)
        return torch.cat((second, first), dim=-1).mul_(-sin).addcmul_(grad, cos), None, None


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """The product silu(gate) * up; differentiable once.

    up: of the shape of `gate`; None where `gate` [..., 2 I] holds both, one after the other in its last dim, into whose
        gradient backward then writes both halves.
    """
    activated: Tensor = _SwiGLU.apply(gate, up)  # type: ignore[no-untyped-call]
    return activated


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate, up)
        gate, up = gate.chunk(2, dim=-1) if up is None else (gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        gate, up = ctx.saved_tensors
        out = of_gate, of_up = torch.empty_like(gate), None if up is None else torch.empty_like(up)
        if up is None:
            (gate, up), (of_gate, of_up) = gate.chunk(2, dim=-1), of_gate.chunk(2, dim=-1)
        torch.ops.aten.silu.out(gate, out=of_up).mul_(grad)
        torch.mul(grad, up, out=of_gate)
        torch.ops.aten.silu_backward.grad_input(of_gate, gate, grad_input=of_gate)
        return out
