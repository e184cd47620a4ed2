"""`linear_logp` by the CUDA kernels of other libraries, where they are installed.

    liger   LigerFusedLinearScaledCrossEntropy(TP)Function of liger-kernel >= 0.8.3 (linkedin/Liger-Kernel PR 1428):
            tiles on Hopper and Blackwell, 512 rows at a time elsewhere; over ranks it needs NCCL
    verl    verl.utils.kernel.linear_cross_entropy: a Triton kernel; hidden size a multiple of 128

Both take tokens `rank * size` onward for those of each rank, so the vocabulary must divide evenly. A kernel is imported
when it is asked for, and refused with the reason if it would not compute what was asked.
"""

import importlib
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.logp.chunks import Head, Options

if TYPE_CHECKING:
    from collections.abc import Callable

Kernel = Literal["torch", "liger", "verl"]

_HOMES = {
    "liger": ("liger_kernel.ops", "pip install 'liger-kernel>=0.8.3'"),
    "verl": ("verl.utils.kernel.linear_cross_entropy", "pip install verl"),
}
VERL_HIDDEN_MULTIPLE = 128


def require_kernel(kernel: Kernel, head: Head, *, hidden: Tensor, words: int, options: Options) -> None:
    """Refuse a kernel other than "torch" that is not installed or does not take these inputs.

    Raises ValueError for an unknown name, PlanError with every reason otherwise.
    """
    if kernel not in get_args(Kernel):
        raise ValueError(f"kernel is {kernel!r}: it may be one of {list(get_args(Kernel))}")
    reasons = [
        reason
        for holds, reason in (
            (hidden.device.type != "cuda", f"hidden is on {hidden.device}, and it runs on CUDA"),
            (hidden.dtype == torch.float64, "hidden is torch.float64, and it computes in fp32 at most"),
            (head.bias is not None, "the lm_head has a bias"),
            (options.softcap is not None, f"softcap is {options.softcap}"),
            (options.logit_scale <= 0, f"logit_scale is {options.logit_scale}, not above 0"),
            (words != 1, f"targets ask for {words} words in each row, not one"),
            (len(set(head.where.sizes())) > 1, f"the vocabulary is cut unevenly, into {head.where.sizes()} words"),
            (
                kernel == "verl" and hidden.shape[-1] % VERL_HIDDEN_MULTIPLE != 0,
                f"hidden size {hidden.shape[-1]} is no multiple of {VERL_HIDDEN_MULTIPLE}",
            ),
        )
        if holds
    ]
    if reasons:
        raise PlanError(f"kernel={kernel!r} does not take this: {'; '.join(reasons)}. kernel='torch' takes all of it")
    _imported(kernel)


def kernel_logp(
    kernel: Kernel, hidden: Tensor, head: Head, *, token_ids: Tensor, options: Options
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities [N, 1] and entropy [N] if asked for, of at least one row. The kernel has been required."""
    call = {"liger": _liger, "verl": _verl}[kernel]
    logp, entropy = call(
        hidden.contiguous(),
        head,
        token_ids.squeeze(-1),
        temperature=float(options.temperature / options.logit_scale),
        entropy=options.entropy,
    )
    return logp[:, None], entropy


def _liger(
    hidden: Tensor, head: Head, targets: Tensor, *, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradient of hidden comes back summed over ranks."""
    ops = _imported("liger")
    arguments: dict[str, Any] = {"temperature": temperature, "return_entropy": entropy}
    if head.where.group is None:
        found = ops.LigerFusedLinearScaledCrossEntropyFunction.apply(hidden, head.weight, targets, **arguments)
    else:
        call = ops.LigerFusedLinearScaledCrossEntropyTPFunction.apply
        found = call(hidden, head.weight, targets, head.where.group, **arguments)
    nll, entropies = found if entropy else (found, None)
    return -nll, None if entropies is None else entropies.float()


def _verl(
    hidden: Tensor, head: Head, targets: Tensor, *, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradient of hidden comes back for this rank's tokens alone."""
    call: Callable[..., tuple[Tensor, Tensor]] = _imported("verl").linear_cross_entropy
    logp, entropies = call(hidden, head.weight.contiguous(), targets, temperature, "none", head.where.group)
    # The kernel demands contiguous gradients of both outputs; that of a sum is one number seen many times.
    logp, entropies = _ContiguousGradients.apply(logp, entropies)  # type: ignore[no-untyped-call]
    return logp, entropies if entropy else None


class _ContiguousGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logp: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
        del ctx
        return logp.view_as(logp), entropy.view_as(entropy)

    @staticmethod
    def backward(ctx: Any, grad_logp: Tensor, grad_entropy: Tensor) -> tuple[Tensor, Tensor]:
        del ctx
        return grad_logp.contiguous(), grad_entropy.contiguous()


def _imported(kernel: str) -> Any:
    home, install = _HOMES[kernel]
    try:
        return importlib.import_module(home)
    except ImportError as error:
        raise PlanError(f"kernel={kernel!r} needs {home}, which cannot be imported ({error}): {install}") from error
