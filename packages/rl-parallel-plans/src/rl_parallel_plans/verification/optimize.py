"""What a trainer does with the gradients: norm, clipping, an optimizer step. Measured, not judged; collective."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_parallel_plans.checkpoints import RowOrder
from rl_parallel_plans.verification.gradients import in_order, orders_of, whole
from rl_parallel_plans.verification.question import Question
from rl_parallel_plans.verification.sharded import imported, shard
from rl_parallel_plans.verification.subject import Truth, relative_error

LARGEST_STEP = 0.1
"""Of any weight: far above the last bit of any other."""


def steps(question: Question, model: nn.Module, *, reference: nn.Module, truth: Truth) -> dict[str, Any]:
    """Norm, clipping to half of it, one SGD step and one of AdamW, on gradients that are there already."""
    held = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    orders = orders_of(model)
    facts: dict[str, Any] = {"true_norm": _norm(list(truth.gradients.values()))}
    facts["held_norm"] = _norm([whole(gradient) for gradient in held.values()])
    try:
        norm = norm_of(question, model.parameters())
        facts["norm"] = float(norm)
        clip(question, model.parameters(), max_norm=facts["true_norm"] / 2, total_norm=norm)
        facts["clipped"] = _norm([whole(gradient) for gradient in held.values()]) / max(facts["held_norm"], 1e-30)
        largest = max(gradient.abs().max().item() for gradient in truth.gradients.values()) / 2
        learning_rate = LARGEST_STEP / max(largest, 1e-30)
        torch.optim.SGD(model.parameters(), lr=learning_rate).step()
        expected = _stepped(reference, truth, learning_rate)
        facts["weights"] = _weight_errors(model, expected, orders)
        torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True).step()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        facts["optimizer_error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return facts
    facts["drift"] = _drift(model)
    return facts


def clip_in_bf16(question: Question, model: nn.Module) -> dict[str, Any]:
    """Gradients in bf16, put there by hand, halved by clipping: a clip that casts first scales a copy."""
    model = copy.deepcopy(model).to(torch.bfloat16)
    shard(question, model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
    before = _norm([whole(p.detach()) for p in model.parameters()])
    norm = norm_of(question, model.parameters())
    clip(question, model.parameters(), max_norm=before / 2, total_norm=norm)
    after = _norm([whole(p.grad) for p in model.parameters() if p.grad is not None])
    dtypes = sorted({str(p.grad.dtype).removeprefix("torch.") for p in model.parameters() if p.grad is not None})
    return {"bf16_norm": float(norm) / before, "bf16_clipped": after / before, "bf16_dtypes": dtypes}


def norm_of(question: Question, parameters: Any) -> Tensor:
    """The norm by the function under test."""
    from rl_parallel_plans.sharding.grad_norm import get_grad_norm

    norm: Tensor = imported(question.grad_norm or get_grad_norm)(parameters)
    return norm


def clip(question: Question, parameters: Any, *, max_norm: float, total_norm: Tensor) -> None:
    """Clip by the function under test."""
    from rl_parallel_plans.sharding.grad_norm import clip_grad_by_total_norm_

    imported(question.clip or clip_grad_by_total_norm_)(parameters, max_norm, total_norm)


def _norm(tensors: Sequence[Tensor]) -> float:
    return torch.stack([tensor.double().norm() for tensor in tensors]).norm().item() if tensors else 0.0


@torch.no_grad()
def _stepped(reference: nn.Module, truth: Truth, learning_rate: float) -> dict[str, Tensor]:
    """Weights after a step on half of the true gradient."""
    weights = dict(reference.named_parameters())
    return {name: weights[name] - learning_rate / 2 * gradient for name, gradient in truth.gradients.items()}


@torch.no_grad()
def _weight_errors(
    model: nn.Module, expected: dict[str, Tensor], orders: dict[str, RowOrder]
) -> list[tuple[str, float]]:
    """The largest deviations of the weights, relative to the largest step, largest first."""
    errors = []
    for name, parameter in model.named_parameters():
        found = in_order(whole(parameter.detach()), orders.get(name))
        if name in expected and found.shape == expected[name].shape:
            errors.append((name, (found - expected[name]).abs().max().item() / LARGEST_STEP))
    return sorted(errors, key=lambda item: -item[1])[:4]


@torch.no_grad()
def _drift(model: nn.Module) -> list[str]:
    """Names of the parameters that are no longer the same on every rank."""
    names, values = zip(*((n, whole(p.detach()).reshape(-1).float()) for n, p in model.named_parameters()), strict=True)
    flat = torch.cat(values)
    low, high = flat.clone(), flat.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    sizes = [value.numel() for value in values]
    pieces = zip(names, torch.split(low, sizes), torch.split(high, sizes), strict=True)
    return [name for name, least, most in pieces if relative_error(least, most) > 1e-6]
