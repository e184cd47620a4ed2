"""Whole gradients of all ranks beside the true ones, and for each wrong one the sentence that says what it is.

What is wrong is not guessed from its size: every hypothesis (one term of a sum over tp, counted tp times, reduced again
at each microbatch, averaged over dp, the other half at the parameter's tied end) is computed from the numbers at hand
and named only where it gives exactly what the ranks hold.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_parallel_plans.checkpoints import RowOrder, row_orders
from rl_parallel_plans.dtensor import is_dtensor
from rl_parallel_plans.plan.rows import in_words
from rl_parallel_plans.structure import joined
from rl_parallel_plans.verification.question import Question
from rl_parallel_plans.verification.subject import Truth, gradient_scales

MATCH = 2e-4
"""Relative deviation below which a hypothesis is taken to hold."""
AGREE = 1e-6
"""Relative deviation between ranks above which they disagree."""


def whole(tensor: Tensor) -> Tensor:
    """All of a DTensor, a plain tensor as it is; collective."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def orders_of(model: nn.Module) -> dict[str, RowOrder]:
    """Order of the rows of each fused parameter that a plan has dealt to the ranks."""
    return {
        joined(path, name): order
        for path, module in model.named_modules()
        for name, order in row_orders(module).items()
    }


def in_order(tensor: Tensor, order: RowOrder | None) -> Tensor:
    """Rows back where the unsharded model has them."""
    return tensor if order is None else order.undealt(tensor)


def collected(model: nn.Module, truth: Truth, *, question: Question, frozen: set[str]) -> dict[str, Any]:
    """The gradients of every rank against the truth. Collective; the same on every rank."""
    orders = orders_of(model)
    names, gradients, missing, misplaced, placed_gradients = [], [], [], {}, 0
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        true = truth.gradients.get(name)
        # A name that the truth lacks is the other end of a tie that was lost.
        if name not in frozen and (true is not None or gradient is not None):
            held = None if gradient is None else in_order(whole(gradient), orders.get(name)).detach()
            shape = held.shape if true is None and held is not None else true.shape  # type: ignore[union-attr]
            names.append(name)
            gradients.append(held.float() if held is not None and held.shape == shape else torch.full(shape, torch.nan))
        if gradient is None:
            missing.append(name)
        elif is_dtensor(gradient) and is_dtensor(parameter):
            placed_gradients += 1
            if gradient.placements != parameter.placements:
                misplaced[name] = [_words(gradient), _words(parameter)]
    of_ranks = _gathered(names, gradients)
    absent = [name for name in truth.gradients if name not in names and name not in frozen]
    rows = list(_rows(of_ranks, truth, question))
    return {
        "rows": rows,
        "missing": [name for name in missing if name in truth.gradients and name not in frozen],
        "absent": absent,
        "misplaced": misplaced,
        "placed_gradients": placed_gradients,
        "plain": sorted(n for n, p in model.named_parameters() if not is_dtensor(p)),
    }


def _words(tensor: Any) -> str:
    return " ".join(map(in_words, tensor.placements))


def _gathered(names: list[str], gradients: list[Tensor]) -> dict[str, Tensor]:
    """Each gradient on every rank: name to [ranks, elements]."""
    if not gradients:
        return {}
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    every = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(every, flat)
    pieces = torch.stack(every).split([gradient.numel() for gradient in gradients], dim=1)  # type: ignore[no-untyped-call]
    return dict(zip(names, pieces, strict=True))


def _rows(of_ranks: Mapping[str, Tensor], truth: Truth, question: Question) -> Iterator[dict[str, Any]]:
    """One row of facts for each gradient."""
    scales = gradient_scales(truth.gradients)
    explain = _Explain(of_ranks, truth, question)
    for name, found in of_ranks.items():
        if name not in truth.gradients:
            continue
        true = truth.gradients[name].reshape(-1).float()
        error = ((found - true).abs().max() / scales[name]).item()
        spread = ((found - found[0]).abs().max() / scales[name]).item()
        wrong = not error <= MATCH or spread > MATCH
        yield {
            "name": name,
            "error": error,
            "noise": 0.0,
            "ratio": (found[0].norm() / true.norm().clamp_min(1e-30)).item(),
            "spread": spread,
            "diagnosis": explain(name, scales[name]) if wrong else "",
        }


class _Explain:
    """Which hypothesis gives exactly the gradient that the ranks hold."""

    def __init__(self, of_ranks: Mapping[str, Tensor], truth: Truth, question: Question) -> None:
        self.of_ranks, self.truth, self.question = of_ranks, truth, question

    def __call__(self, name: str, scale: float) -> str:
        found = self.of_ranks[name]
        if torch.isnan(found).all():
            return "it has no gradient"
        if not torch.isfinite(found).all():
            return "its gradient is not finite"
        for hypothesis, sentence in self._hypotheses(name, found):
            expected = hypothesis()
            if expected is not None and ((expected - self._true(name)).abs().max() / scale) < MATCH:
                return sentence
        disagree = ((found - found[0]).abs().max() / scale).item() > AGREE
        return "the ranks hold different gradients, so that their weights drift apart" if disagree else ""

    def _true(self, name: str) -> Tensor:
        return self.truth.gradients[name].reshape(-1).float()

    def _hypotheses(self, name: str, found: Tensor) -> Iterator[tuple[Callable[[], Tensor | None], str]]:
        """What was done to the true gradient, undone: each gives the truth where it holds."""
        tp, dp = self.question.tp, self.question.dp
        on_mesh = found.view(dp, tp, -1)  # the order of the mesh's ranks
        mean = on_mesh.mean((0, 1))
        if not torch.equal(on_mesh, on_mesh[:, :1].expand_as(on_mesh)):
            yield lambda: on_mesh.sum(1).mean(0), _TERM_OF_A_SUM
        if not torch.equal(on_mesh, on_mesh[:1].expand_as(on_mesh)):
            yield lambda: on_mesh.sum(0).mean(0), "each dp rank holds the gradient of its own rows: nothing sums them"
            yield lambda: on_mesh.sum((0, 1)), "each rank holds one term of a sum over dp and tp, and nothing sums them"
        if tp > 1:
            yield lambda: mean / tp, f"it is {tp} times too large: summed over tp although each rank held all of it"
            yield lambda: mean * tp, f"it is {tp} times too small: averaged over tp, or one rank's part was lost"
        if dp > 1:
            yield (
                lambda: mean * dp,
                "it is averaged over dp and not summed: the loss divides by the step's global count",
            )
            yield lambda: mean / dp, "it is summed over dp twice"
        yield lambda: self._as_if_reduced_again(name, mean), _REDUCED_AGAIN
        yield (
            lambda: self._last_alone(name, mean),
            "it is the last microbatch's alone: earlier gradients were overwritten",
        )
        for other in self.of_ranks:
            yield lambda other=other: self._with_other_end(name, other), f"the rest of it lies at {other}: {_UNTIED}"  # type: ignore[misc]

    def _as_if_reduced_again(self, name: str, mean: Tensor) -> Tensor | None:
        """Each backward summed what was there already over tp once more: the sum of tp^(n - 1 - i) g_i."""
        parts = [g[name].reshape(-1).float() for g in self.truth.by_microbatch if name in g]
        if len(parts) < 2 or self.question.tp == 1:
            return None
        again = sum(part * float(self.question.tp) ** (len(parts) - 1 - i) for i, part in enumerate(parts))
        return self._true(name) + (mean - again)

    def _last_alone(self, name: str, mean: Tensor) -> Tensor | None:
        if len(self.truth.by_microbatch) < 2 or name not in self.truth.by_microbatch[-1]:
            return None
        return self._true(name) + (mean - self.truth.by_microbatch[-1][name].reshape(-1).float())

    def _with_other_end(self, name: str, other: str) -> Tensor | None:
        ends = self.of_ranks[name].mean(0), self.of_ranks[other].mean(0)
        return ends[0] + ends[1] if other != name and ends[0].shape == ends[1].shape else None


_TERM_OF_A_SUM = (
    "each rank holds one term of a sum over tp, and nothing sums them: give its module the style "
    "'replicated_with_grad_allreduce' (ReplicatedParallel(partial_gradient=True))"
)
_REDUCED_AGAIN = (
    "what earlier microbatches left in .grad was summed over tp again by each backward: sum only what is new, or sum "
    "once after the last"
)
_UNTIED = "one tied parameter became two; shard both ends alike and make them one again"
