"""Expert parallelism: each rank of the ep axis holds some experts, and tokens travel to theirs and back.

The ranks of the ep axis are data-parallel: each has tokens of its own. For each of its N tokens and K choices, a rank
sends the hidden state to the rank of the expert (all-to-all), the experts there run on what has arrived, and their
outputs travel back, where they are weighted and summed: GShard (arXiv:2006.16668), as Hugging Face's
`ep_dispatch_experts`. An expert's gradient is then the sum over all tokens of the ep axis already.

The experts' own forward stays as it is: it meets local experts, one choice a token, and weights of 1. One row of zeros
travels along, so that a rank to which no token comes has gradients too, of zero, and takes part in every collective.
Axes: N tokens, K choices, H hidden, M rows that arrive.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Shard

from rl_parallel_plans.dtensor import has_numbers
from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.styles.forward import Call, Counts, wrap_forward
from rl_parallel_plans.styles.table import ROWS, LocalParameters, ParameterRule, own_names, place_parameters

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

COUNTS = ("num_experts", "num_local_experts")


@dataclass(eq=False, repr=False, kw_only=True)
class ExpertParallel(LocalParameters):
    """Share out stacked experts over the ep axis, and each of them over the tp axis as `features` says.

    ep: ranks of the ep axis; it must divide the number of experts.
    features: how one expert is sharded over tp: `Experts` inside a block, which communicates for it, or Hugging
        Face's `SummedModule`, which sums over tp what it puts out and the gradients of what enters. None at tp=1.
    """

    ep: int
    features: LocalParameters | None

    def rules(self, module: nn.Module) -> Mapping[str, ParameterRule]:
        """What happens on the tp axis; on the ep axis each parameter is Shard(0)."""
        return {} if self.features is None else self.features.rules(module)

    def parameter_placements(self, module: nn.Module) -> dict[str, Placement]:
        """On the tp axis where there is one; else on the ep axis."""
        return super().parameter_placements(module) or dict.fromkeys(own_names(module), Shard(0))

    def problems(self, module: nn.Module, tp: int) -> list[str]:
        """Experts that ep does not divide, and features that tp does not."""
        experts = next(module.parameters(recurse=False)).shape[0]
        found = [] if self.features is None else self.features.problems(module, tp)
        if experts % self.ep:
            found.append(f"has {experts} experts, which ep={self.ep} does not divide: choose one that does")
        return found

    def collectives(self) -> tuple[Counts, Counts]:
        """Over the ep axis, rows there and back; over the tp axis, what the features communicate by themselves."""
        forward, backward = ({}, {}) if self.features is None else self.features.collectives()
        return {"all_to_all": 2, **forward}, {"all_to_all": 2, **backward}

    def _apply(self, module: nn.Module, device_mesh: "DeviceMesh") -> nn.Module:
        """`device_mesh` has the ep axis first, and the tp axis after it where tp > 1."""
        experts = next(module.parameters(recurse=False)).shape[0]
        place_parameters(
            module,
            device_mesh,
            self.rules(module) or dict.fromkeys(own_names(module), ROWS),
            src_data_rank=self.src_data_rank,
            leading=() if self.features is None else (Shard(0),),
        )
        for name in COUNTS:
            if isinstance(module.__dict__.get(name), int):
                setattr(module, name, experts // self.ep)
        dispatch = Dispatch(group=device_mesh.get_group(0), ep=self.ep, experts=experts)
        wrap_forward(module, partial(_on_their_experts, dispatch=dispatch))
        if self.features is not None:  # around the dispatch: each tp rank sends the same tokens
            assert device_mesh.mesh_dim_names is not None
            self.features.communicate(module, device_mesh[device_mesh.mesh_dim_names[-1]])
        return module


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """Who holds which experts."""

    group: dist.ProcessGroup
    """The ranks of the ep axis."""
    ep: int
    """How many they are."""
    experts: int
    """How many experts there are on all of them together."""

    def __deepcopy__(self, memo: object) -> "Dispatch":
        """A copy of the model has the same process group, which cannot be copied."""
        return self


@dataclass(slots=True, kw_only=True)
class _Way:
    """How rows have travelled, to travel back."""

    order: Tensor
    """[N*K] position, among the choices of this rank's tokens, of each row sent."""
    sent: list[int]
    """Rows sent to each rank."""
    received: list[int]
    """Rows received from each rank."""
    weights: Tensor
    """[N, K] of the choices."""


def _on_their_experts(module: nn.Module, call: Call, /, *args: Any, dispatch: Dispatch, **kwargs: Any) -> Tensor:
    arrived, way = _dispatch(module, args, dispatch=dispatch)
    return _combine(call(*arrived, **kwargs), way, dispatch=dispatch)


def _dispatch(module: nn.Module, args: tuple[Any, ...], *, dispatch: Dispatch) -> tuple[tuple[Any, ...], _Way]:
    if len(args) != 3 or any(not isinstance(a, Tensor) for a in args) or args[1].is_floating_point():
        raise PlanError(
            f"{type(module).__name__} is not called as experts(hidden, top_k_index, top_k_weights): expert parallelism "
            "cannot tell which token goes where; plan with ep=1"
        )
    hidden, index, weights = args
    if hidden.ndim != 2 or index.shape != weights.shape or index.shape[0] != hidden.shape[0]:
        raise PlanError(
            f"{type(module).__name__} is called with {[list(a.shape) for a in args]}, and [N, H], [N, K] and [N, K] "
            "were expected: plan with ep=1"
        )
    local = dispatch.experts // dispatch.ep
    chosen = index.reshape(-1)
    order = chosen.argsort(stable=True)
    sent, received = _counts(chosen // local, dispatch)
    way = _Way(order=order, sent=sent, received=received, weights=weights)
    rows = _AllToAll.apply(hidden[order // index.shape[1]], way.received, way.sent, dispatch.group)  # type: ignore[no-untyped-call]
    experts = chosen.new_empty(sum(way.received))
    dist.all_to_all_single(experts, chosen[order] % local, way.received, way.sent, group=dispatch.group)
    arrived = (
        torch.cat([rows, rows.new_zeros(1, rows.shape[1])]),
        torch.cat([experts, experts.new_zeros(1)])[:, None],
        weights.new_ones(len(experts) + 1, 1),
    )
    return arrived, way


def _counts(ranks: Tensor, dispatch: Dispatch) -> tuple[list[int], list[int]]:
    """Rows that go to each rank, and that come from it; ranks: where each row goes."""
    if not has_numbers(ranks):  # a forecast: all ranks get as many
        even = [(len(ranks) + rank) // dispatch.ep for rank in range(dispatch.ep)]
        return even, even
    sent = torch.bincount(ranks, minlength=dispatch.ep)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=dispatch.group)
    return sent.tolist(), received.tolist()


def _combine(output: Tensor, way: _Way, *, dispatch: Dispatch) -> Tensor:
    rows = _AllToAll.apply(output[:-1], way.sent, way.received, dispatch.group)  # type: ignore[no-untyped-call]
    choices = torch.empty_like(rows).index_copy(0, way.order, rows).view(*way.weights.shape, -1)
    return (choices * way.weights[..., None].to(choices.dtype)).sum(1) + 0.0 * output[-1]


class _AllToAll(torch.autograd.Function):
    """Rows by the numbers of each rank; their gradients by the same way back."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes arguments by position
        ctx: Any, rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.received, ctx.sent, ctx.group = received, sent, group
        return _exchanged(rows, received, sent, group=group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _exchanged(gradient, ctx.sent, ctx.received, group=ctx.group), None, None, None


def _exchanged(rows: Tensor, received: list[int], sent: list[int], *, group: dist.ProcessGroup) -> Tensor:
    # A functional collective: selective checkpointing sees it, and saves its result.
    exchanged = funcol.all_to_all_single(rows.contiguous(), received, sent, group)
    result: Tensor = funcol.wait_tensor(exchanged)  # type: ignore[no-untyped-call]
    return result
