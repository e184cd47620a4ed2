"""The load-balancing loss of a mixture's routers, sequence by sequence, so that no cut of a batch changes it.

DeepSeek-V3's sequence-wise balance loss (arXiv:2412.19437, eq. 17-20). For a sequence of T tokens at a router of N
experts of which each token takes K,

    L = sum over i of f_i · P_i                                   1 where experts are used evenly, N/K at worst
    f_i = N / (K·T) · number of the tokens that take expert i     a count, without a gradient
    P_i = 1 / T · sum over tokens of s'_i                         s' the token's scores, scaled to sum to 1

with s' = s / sum(s) for s = sigmoid(logits), as in the paper, and s' = softmax(logits), which sums to 1 already, where
the model routes by softmax (also where it normalises over the chosen experts only). L is averaged over the routers of
the model, and summed over sequences; the backend divides by the step's number of sequences. Hugging Face's own
`load_balancing_loss_func` multiplies means over all tokens of a microbatch instead, and so depends on the cut.

Axes: b rows of a microbatch, t tokens that the model reads at a time.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn

from rl_backends.batching.microbatches import ModelInputs
from rl_backends.errors import ModelError
from rl_backends.packing.enable import source_of
from rl_parallel_plans import ParallelPlan
from rl_parallel_plans.structure import matching_modules


class RouterWatch:
    """Reads what the routers of `model` decide in a forward that is recorded, and makes a loss of it.

        watch = RouterWatch(model, plan=plan)
        with watch.recording():
            hidden = model(...)
        (loss + coefficient / num_sequences * watch.loss(inputs, lengths)).backward()

    Under tensor parallelism every rank routes all tokens, and what reaches a router and its input is summed over ranks:
    the gradient of the loss is divided by their number, its value is not. Recomputation in backward (activation
    checkpointing) is not recorded. Both losses must go through one backward, before the next recording.
    """

    def __init__(self, model: nn.Module, *, plan: ParallelPlan | None = None) -> None:
        self._routers = find_routers(model)
        self._gradient_share = 1.0 if plan is None or plan.tp == 1 else 1.0 / plan.tp
        if plan is not None and plan.tp > 1:
            _require_summed_gradients(model, self._routers, plan)
        self._recording = False
        self._seen: dict[str, tuple[Tensor, Tensor]] = {}
        self._counts: dict[str, Tensor] = {}
        for router in self._routers:
            router.module.register_forward_hook(partial(self._note, router))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around one forward, whose routers `loss` will speak of."""
        self._seen.clear()
        self._recording = True
        try:
            yield
        finally:
            self._recording = False

    def loss(
        self,
        inputs: ModelInputs,
        lengths: Int[Tensor, " b"],
        *,
        counted: bool = True,
        context_group: dist.ProcessGroup | None = None,
    ) -> Float[Tensor, ""]:
        """The sum over the recorded sequences of their balance loss, differentiable; forgets the recording.

        lengths: tokens of each row that are not padding, on the host.
        counted: whether these rows are in the statistics; multiply the loss by it too.
        context_group: ranks that hold other tokens of the same rows (context parallelism); each one's loss is then a
            term of the sum over them, and so is its gradient.
        """
        if missing := [router.path for router in self._routers if router.path not in self._seen]:
            raise RuntimeError(
                f"{len(missing)} of {len(self._routers)} routers were not seen ({missing[0]}): run the model inside "
                f"`with watch.recording():`, once, before each loss"
            )
        lengths = lengths.to(inputs.tokens.device)
        terms = [
            self._loss_of(router, inputs, lengths, counted=counted, group=context_group) for router in self._routers
        ]
        self._seen.clear()
        return torch.stack(terms).mean()

    def take_counts(self) -> dict[str, Float[Tensor, " experts"]]:
        """How often this rank's counted rows have chosen each expert since the last call, by router; begins anew.

        Add them up over the ranks that have other rows or tokens (not over tensor-parallel ones) for `router_metrics`.
        """
        counts, self._counts = self._counts, {}
        return counts

    def _loss_of(
        self, router: "Router", inputs: ModelInputs, lengths: Tensor, *, counted: bool, group: dist.ProcessGroup | None
    ) -> Tensor:
        logits, chosen = self._seen[router.path]
        num_experts, top_k = logits.shape[-1], chosen.shape[-1]
        taken = torch.zeros(logits.shape, device=logits.device).scatter_(1, chosen, 1.0)
        took = _by_sequence(taken, inputs, lengths)
        if counted:
            self._counts[router.path] = self._counts.get(router.path, 0) + took.sum(0)
        if group is not None:
            took = took.contiguous()
            dist.all_reduce(took, group=group)
        num_tokens = lengths.float()[:, None]
        # s' of the paper: of each token, and summing to 1, in float32.
        scores = logits.float().softmax(-1) if router.affinity == "softmax" else torch.sigmoid(logits.float())
        if router.affinity == "sigmoid":
            scores = scores / scores.sum(-1, keepdim=True)
        share = _by_sequence(scores, inputs, lengths) / num_tokens
        return (took * (num_experts / top_k) / num_tokens * share).sum()

    def _note(self, router: "Router", _module: nn.Module, _args: object, output: object) -> None:
        if not self._recording:
            return
        if router.path in self._seen:
            raise RuntimeError(f"{router.path} ran twice in one recording: record one forward at a time")
        logits, chosen = router.read(output)
        if self._gradient_share != 1.0 and logits.requires_grad:
            logits = logits.view_as(logits)  # only what goes into this loss
            logits.register_hook(lambda gradient: gradient * self._gradient_share)  # type: ignore[no-untyped-call]
        self._seen[router.path] = logits, chosen


def _by_sequence(
    values: Float[Tensor, "tokens experts"], inputs: ModelInputs, lengths: Int[Tensor, " b"]
) -> Float[Tensor, "b experts"]:
    """The sum over each row's own tokens, padding left out."""
    if (starts := inputs.cu_seq_lens) is not None:
        # Of each row a context-parallel rank holds an equal share, with padding.
        held = starts.diff() * values.shape[0] // starts[-1]
        rows = torch.repeat_interleave(held, output_size=values.shape[0])
        assert inputs.position_ids is not None
        values = values * (inputs.position_ids[0] < lengths[rows])[:, None]
        # unsafe: without a look at the lengths, for which a GPU would have to wait
        return torch.segment_reduce(values, "sum", lengths=held, axis=0, unsafe=True)
    num_rows, num_tokens = inputs.tokens.shape
    positions = inputs.position_ids
    if positions is None:
        positions = torch.arange(num_tokens, device=values.device)[None]
    real = positions < lengths[:, None]
    return (values.view(num_rows, num_tokens, -1) * real[..., None]).sum(1)


def _require_summed_gradients(model: nn.Module, routers: "Sequence[Router]", plan: ParallelPlan) -> None:
    """Inside a block that is a sum over ranks, whole parameters have partial gradients; elsewhere we do not know."""
    styles: dict[int, list[object]] = {}
    for pattern, style in plan.styles.items():
        for _, module in matching_modules(model, pattern):
            styles.setdefault(id(module), []).append(style)
    for router in routers:
        for module in router.module.modules():
            names = [name for name, _ in module.named_parameters(recurse=False)]
            found = styles.get(id(module), [])
            rules = [style.rules(module) for style in found if hasattr(style, "rules")]
            if names and not any(all(rule.partial_gradient for rule in each.values()) and each for each in rules):
                raise ModelError(
                    f"the router {router.path} is under the style {', '.join(map(repr, found)) or 'of no rule'}, which "
                    f"does not say that its gradient is summed over tensor-parallel ranks: use the built-in plan, or "
                    f"set router_aux_loss_coef to 0"
                )


def router_metrics(counts: Mapping[str, Float[Tensor, " experts"]]) -> dict[str, float]:
    """What to report of a step.

    counts: by router, how often each expert was chosen, added up over all rows of the step.

    Returns "router_max_load", the busiest expert's share of its router's tokens over an even share, averaged over
    routers (1 is even, the number of experts over top_k the worst), "router_worst_load", the same of the worst router,
    and "router_idle_experts", the share of experts that got no token. Nothing is dropped: Hugging Face's mixtures
    compute whatever is routed.
    """
    loads = [count / count.mean().clamp(min=1) for count in counts.values()]
    busiest = torch.stack([load.max() for load in loads])
    idle = torch.cat([load == 0 for load in loads])
    return {
        "router_max_load": busiest.mean().item(),
        "router_worst_load": busiest.max().item(),
        "router_idle_experts": idle.float().mean().item(),
    }


# ---- The routers of a Hugging Face model, and how to read what each decides: from names and the source of forwards.
#
# A router is the child `gate` or `router` of a block that has `experts`: a module that returns logits, mostly with the
# chosen experts.

_NAMES = ("gate", "router")
_TOP_K = ("top_k", "moe_top_k", "num_experts_per_tok")
_LOGITS = re.compile(r"logits")
_CHOSEN = re.compile(r"ind(ex|ices)|selected")
_OF_LOGITS = re.compile(r"(softmax|sigmoid)\((?:input=)?\w*logits|logits(?:\.float\(\))?\.(softmax|sigmoid)\(")
_EITHER = re.compile(r"\b(softmax|sigmoid)\(")
_CORRECTED = re.compile(r"correction_bias|moe_statics|expert_bias")


@dataclass(frozen=True, slots=True)
class Router:
    """Where a router stands, and how its output is read."""

    path: str
    module: nn.Module
    """Whose output is read."""
    affinity: Literal["softmax", "sigmoid"]
    """What the model makes of a token's logits."""
    logits_at: int | None
    """Place of the logits in what it returns; None where it returns nothing else."""
    chosen_at: int | None
    """Place of the chosen experts; None where they are the `top_k` largest logits."""
    top_k: int | None
    """Experts of a token, where `chosen_at` is None."""

    def read(self, output: object) -> tuple[Tensor, Tensor]:
        """Logits [N, experts] and the experts chosen for each of N tokens [N, K]."""
        logits = output if self.logits_at is None else output[self.logits_at]  # type: ignore[index]
        assert isinstance(logits, Tensor)
        logits = logits.flatten(0, -2)
        if self.chosen_at is not None:
            return logits, output[self.chosen_at].flatten(0, -2)  # type: ignore[index]
        assert self.top_k is not None
        return logits, logits.detach().topk(self.top_k, dim=-1).indices


def find_routers(model: nn.Module) -> list[Router]:
    """Every router of `model`, in its order."""
    found = [
        _router(f"{path}.{name}", child, block)
        for path, block in model.named_modules()
        if "experts" in (children := dict(block.named_children()))
        for name, child in children.items()
        if name in _NAMES
    ]
    if not found:
        raise ModelError(
            f"{type(model).__qualname__} has no router (a block with `experts` and a `gate` or `router`), so that "
            f"router_aux_loss_coef > 0 has nothing to act on; set it to 0"
        )
    return found


def _router(path: str, module: nn.Module, block: nn.Module) -> Router:
    def unreadable(why: str) -> ModelError:
        return ModelError(
            f"the router {path} cannot be watched: {type(module).__name__} {why}; set router_aux_loss_coef to 0"
        )

    source = source_of(type(module).forward)
    of_logits = {name for match in _OF_LOGITS.finditer(source) for name in match.groups() if name}
    either = of_logits or set(_EITHER.findall(source))
    if either not in ({"softmax"}, {"sigmoid"}):
        raise unreadable("does not show whether scores are a softmax or a sigmoid of its logits")
    affinity: Literal["softmax", "sigmoid"] = "softmax" if either == {"softmax"} else "sigmoid"

    returned = re.findall(r"^ *return (.+)$", source, re.MULTILINE)
    names = [name.strip() for name in returned[-1].split(",")] if returned else []
    logits_at = next((place for place, name in enumerate(names) if _LOGITS.search(name)), None)
    if logits_at is None:
        raise unreadable(f"returns {', '.join(names) or 'nothing known'}, and no logits")
    chosen_at = next((place for place, name in enumerate(names) if _CHOSEN.search(name)), None)
    if chosen_at is not None and len(names) > 1:
        return Router(path, module, affinity, logits_at, chosen_at, None)
    if _CORRECTED.search(source_of(type(module))):
        raise unreadable("corrects its choice by a bias and does not return the experts chosen")
    counts = (getattr(owner, name, None) for owner in (module, block) for name in _TOP_K)
    top_k = next((count for count in counts if isinstance(count, int)), None)
    if top_k is None:
        raise unreadable("does not say how many experts it chooses (top_k)")
    return Router(path, module, affinity, logits_at if len(names) > 1 else None, None, top_k)
