"""The wiring of CUDA kernels without a GPU: functions with their published signatures, in plain torch.

The arguments that we give them are theirs, and so is what they promise and demand. Liger gives the negative
log-likelihood and a gradient of hidden that is summed over ranks; verl gives log-probabilities, leaves that sum to its
caller, and demands contiguous gradients. Both take the words of a rank to start at `rank * words`. The kernels
themselves are tested where there is a GPU.
"""

import sys
import types

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

from parallel_plans_cases.logp import error, head_of, numbers, placed_hidden, tp_mesh, weighted_sum, whole
from rl_parallel_plans.logp import linear, linear_logp


def distribution(hidden, weight, group, temperature):
    """log p of every word, from all ranks' weights."""
    if group is not None:
        parts = [torch.empty_like(weight) for _ in range(group.size())]
        dist.all_gather(parts, weight, group=group)
        weight = torch.cat(parts)
    return (hidden.float() @ weight.float().T / temperature).log_softmax(-1)


class Kernel(torch.autograd.Function):
    """(logp, entropy); the gradient of hidden is for the rank's own words, or summed if `summed`."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, group, summed):
        ctx.save_for_backward(hidden, weight, targets)
        ctx.rest = temperature, group, summed
        log_p = distribution(hidden, weight, group, temperature)
        return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)

    @staticmethod
    def backward(ctx, grad_logp, grad_entropy):
        hidden, weight, targets = ctx.saved_tensors
        temperature, group, summed = ctx.rest
        assert summed or (grad_logp.is_contiguous() and grad_entropy.is_contiguous())
        log_p = distribution(hidden, weight, group, temperature)
        p, entropy = log_p.exp(), -(log_p.exp() * log_p).sum(-1, keepdim=True)
        gradient = -grad_logp[:, None] * p - grad_entropy[:, None] * p * (log_p + entropy)
        gradient = gradient.scatter_add(-1, targets[:, None], grad_logp[:, None]) / temperature
        start = 0 if group is None else dist.get_rank(group) * len(weight)
        gradient = gradient[:, start : start + len(weight)]
        of_hidden = gradient @ weight
        if summed and group is not None:
            dist.all_reduce(of_hidden, group=group)
        return of_hidden, gradient.T @ hidden, None, None, None, None


class LigerTP:
    @staticmethod
    def apply(hidden, weight, target, tp_group, *, temperature, return_entropy):
        logp, entropy = Kernel.apply(hidden, weight, target, temperature, tp_group, True)
        return (-logp, entropy) if return_entropy else -logp


class Liger:
    @staticmethod
    def apply(hidden, weight, target, *, temperature, return_entropy):
        logp, entropy = Kernel.apply(hidden, weight, target, temperature, None, True)
        return (-logp, entropy) if return_entropy else -logp


def verl(hidden, weight, labels, temperature, reduction, dist_process_group):
    assert isinstance(temperature, float)
    assert reduction == "none"
    assert hidden.is_contiguous()
    return Kernel.apply(hidden, weight, labels, temperature, dist_process_group, False)


def install():
    ops, cross_entropy = types.ModuleType("liger_kernel.ops"), types.ModuleType("linear_cross_entropy")
    ops.LigerFusedLinearScaledCrossEntropyFunction = Liger
    ops.LigerFusedLinearScaledCrossEntropyTPFunction = LigerTP
    cross_entropy.linear_cross_entropy = verl
    sys.modules["liger_kernel.ops"] = ops
    sys.modules["verl.utils.kernel.linear_cross_entropy"] = cross_entropy
    linear.require_kernel = lambda *args, **kwargs: None  # there is no GPU


def wiring(*, kernel, hidden_placement, cut):
    """Deviations of the kernel's values and gradients from those of kernel="torch"."""
    install()
    mesh = tp_mesh()
    values, weight, _, targets = numbers(leading=(11,), vocabulary=40, words=0, ignored=0.2, dtype=torch.float32)
    outcomes = []
    for name in ("torch", kernel):
        head = head_of(weight, None, mesh, Shard(0) if cut else Replicate())
        hidden = placed_hidden(values, mesh, hidden_placement)
        outputs = linear_logp(hidden, head, targets, temperature=0.7, logit_scale=0.5, entropy=True, kernel=name)
        alone = linear_logp(hidden, head, targets, temperature=0.7, logit_scale=0.5, kernel=name)
        gradients = torch.autograd.grad(weighted_sum(outputs) + alone.sum(), [hidden, head.weight])
        outcomes.append([*outputs, alone, *(whole(gradient) for gradient in gradients)])
    return [error(found, truth.double()) for found, truth in zip(outcomes[1], outcomes[0], strict=True)]
