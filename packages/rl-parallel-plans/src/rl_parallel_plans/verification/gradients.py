"""Whole gradients of all ranks beside the true ones, and a diagnosis of each wrong one.

A diagnosis is not guessed from the size of an error: every hypothesis (one term of a sum over tp, counted tp times,
reduced again at each microbatch, averaged over dp, the other half at the parameter's tied end) is computed from the
numbers at hand, and named only where it gives exactly what the ranks hold.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_parallel_plans.checkpoints import row_orders
from rl_parallel_plans.dtensor import is_dtensor
from rl_parallel_plans.plan.rows import in_words
from rl_parallel_plans.structure import joined
from rl_parallel_plans.verification.reference import Truth, gradient_scales
from rl_parallel_plans.verification.tasks import Request

MATCH = 2e-4
"""Relative deviation below which a hypothesis is taken to hold."""
AGREE = 1e-6
"""Relative deviation between ranks above which they disagree."""

ONE_TERM = (
    "each rank holds one term of a sum over tp, and nothing sums them: give its module the style "
    "'replicated_with_grad_allreduce' (ReplicatedParallel(partial_gradient=True))"
)
REDUCED_AGAIN = (
    "what earlier microbatches left in .grad was summed over tp again by each backward: sum only what is new, or sum "
    "once after the last"
)
UNTIED = "one tied parameter became two; shard both ends alike and make them one again"


def whole(tensor: Tensor) -> Tensor:
    """All of a DTensor, or a plain tensor as it is; collective."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def whole_rows(*models: nn.Module) -> Callable[[str, Tensor], Tensor]:
    """A function (name of a parameter, tensor like it) that gathers the tensor with its rows in order; collective.

    Fused parameters have other orders of rows when they are sharded.
    """
    orders = {
        joined(path, name): order
        for model in models
        for path, module in model.named_modules()
        for name, order in row_orders(module).items()
    }
    return lambda name, tensor: orders[name].undealt(whole(tensor)) if name in orders else whole(tensor)


def gradient_facts(model: nn.Module, truth: Truth, *, request: Request, frozen: set[str]) -> dict[str, Any]:
    """The gradients of every rank against the truth. Collective; the same on every rank."""
    gather = whole_rows(model)
    gradients: dict[str, Tensor] = {}
    misplaced, placed_gradients = {}, 0
    for name, parameter in model.named_parameters():
        gradient, true = parameter.grad, truth.gradients.get(name)
        # A name that the truth lacks is the other end of a tie that was lost.
        if name not in frozen and (true is not None or gradient is not None):
            gathered = None if gradient is None else gather(name, gradient).detach().float()
            if gathered is None or (true is not None and gathered.shape != true.shape):
                gathered = torch.full_like(true, torch.nan)  # type: ignore[arg-type]
            gradients[name] = gathered
        if gradient is not None and is_dtensor(gradient) and is_dtensor(parameter):
            placed_gradients += 1
            if gradient.placements != parameter.placements:
                misplaced[name] = [" ".join(map(in_words, tensor.placements)) for tensor in (gradient, parameter)]
    return {
        "rows": list(_compared(_of_all_ranks(gradients), truth, request)),
        "absent": [name for name in truth.gradients if name not in gradients and name not in frozen],
        "misplaced": misplaced,
        "placed_gradients": placed_gradients,
    }


def _of_all_ranks(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each gradient of every rank: name to [ranks, elements]."""
    if not gradients:
        return {}
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients.values()])
    every = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(every, flat)
    pieces = torch.stack(every).split([gradient.numel() for gradient in gradients.values()], dim=1)  # type: ignore[no-untyped-call]
    return dict(zip(gradients, pieces, strict=True))


def _compared(of_ranks: Mapping[str, Tensor], truth: Truth, request: Request) -> Iterator[dict[str, Any]]:
    scales = gradient_scales(truth.gradients)
    for name, values in of_ranks.items():
        if name not in truth.gradients:
            continue
        row = gradient_row(name, values, truth.gradients[name], scale=scales[name])
        if not row["error"] <= MATCH or row["spread"] > MATCH:
            row["diagnosis"] = _diagnosis(name, of_ranks, truth, request=request, scale=scales[name])
        yield row


def gradient_row(name: str, of_ranks: Tensor, true: Tensor, *, scale: float) -> dict[str, Any]:
    """How far a gradient [ranks, elements] is from the true one, and the ranks from one another."""
    true = true.reshape(-1).float()
    return {
        "name": name,
        "error": ((of_ranks - true).abs().max() / scale).item(),
        "noise": 0.0,
        "ratio": (of_ranks[0].norm() / true.norm().clamp_min(1e-30)).item(),
        "spread": ((of_ranks - of_ranks[0]).abs().max() / scale).item(),
        "diagnosis": "",
    }


def _diagnosis(name: str, of_ranks: Mapping[str, Tensor], truth: Truth, *, request: Request, scale: float) -> str:
    values = of_ranks[name]
    if torch.isnan(values).all():
        return "it has no gradient"
    if not torch.isfinite(values).all():
        return "its gradient is not finite"
    true = truth.gradients[name].reshape(-1).float()
    for corrected, sentence in _hypotheses(name, of_ranks, truth, request=request):
        if (corrected - true).abs().max() / scale < MATCH:
            return sentence
    disagree = ((values - values[0]).abs().max() / scale).item() > AGREE
    return "the ranks hold different gradients, so that their weights drift apart" if disagree else ""


def _hypotheses(
    name: str, of_ranks: Mapping[str, Tensor], truth: Truth, *, request: Request
) -> Iterator[tuple[Tensor, str]]:
    """What may have been done to the true gradient, undone: the first of each pair is the truth where it holds."""
    tp, dp = request.tp, request.dp
    on_mesh = of_ranks[name].view(dp, tp, -1)  # the order of the mesh's ranks
    mean = on_mesh.mean((0, 1))
    if not torch.equal(on_mesh, on_mesh[:, :1].expand_as(on_mesh)):
        yield on_mesh.sum(1).mean(0), ONE_TERM
    if not torch.equal(on_mesh, on_mesh[:1].expand_as(on_mesh)):
        yield on_mesh.sum(0).mean(0), "each dp rank holds the gradient of its own rows: nothing sums them"
        yield on_mesh.sum((0, 1)), "each rank holds one term of a sum over dp and tp, and nothing sums them"
    if tp > 1:
        yield mean / tp, f"it is {tp} times too large: summed over tp although each rank held all of it"
        yield mean * tp, f"it is {tp} times too small: averaged over tp, or one rank's part was lost"
    if dp > 1:
        yield mean * dp, "it is averaged over dp and not summed: the loss divides by the step's global count"
        yield mean / dp, "it is summed over dp twice"
    true = truth.gradients[name].reshape(-1).float()
    parts = [gradients[name].reshape(-1).float() for gradients in truth.by_microbatch if name in gradients]
    if len(parts) > 1:
        if tp > 1:  # each backward summed over tp once more what was there already: the sum of tp^(n - 1 - i) g_i
            reduced_again = sum(part * float(tp) ** (len(parts) - 1 - i) for i, part in enumerate(parts))
            yield true + (mean - reduced_again), REDUCED_AGAIN
        if name in truth.by_microbatch[-1]:
            yield true + (mean - parts[-1]), "it is the last microbatch's alone: earlier gradients were overwritten"
    for other, values in of_ranks.items():
        if other != name and values.shape == of_ranks[name].shape:
            yield of_ranks[name].mean(0) + values.mean(0), f"the rest of it lies at {other}: {UNTIED}"
