"""Hugging Face's tensor-parallel styles as tables of ours, each complete by itself.

A style of theirs does its module's communication alone, where ours leaves it to the borders of a block. What each does
is theirs (`transformers/distributed/tensor_parallel.py`, and `integrations/tensor_parallel.py` before 5.18); the
gradients are those of the unsharded model, also where theirs are not (`replicated_with_grad_allreduce` reduces an
accumulated gradient again; `gather` of 4.51-5.0 never reduces that of its input).

Inside a module everything is a plain tensor. Strings on parameters (`experts.gate_up_proj`) become rules of the module
that holds them: `own`, the parameter's name to the string.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel

from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.row_order import halves_in_order
from rl_parallel_plans.styles import LocalParameters, ParameterRule, ReplicatedParallel
from rl_parallel_plans.styles.forward import (
    SUM_INPUT_GRADIENTS,
    SUM_OUTPUT,
    Communication,
    Counts,
    sum_over_ranks,
    with_summed_gradient,
)
from rl_parallel_plans.styles.table import FIRST_RANK_ONLY, REPLICATED, REPLICATED_PARTIAL, uneven

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

COLWISE = frozenset({"colwise", "local_colwise"})
ROWWISE = frozenset({"rowwise", "local_rowwise"})
PACKED_COLWISE = frozenset({"packed_colwise"})
PACKED_ROWWISE = frozenset({"packed_rowwise", "local_packed_rowwise"})
WHOLE = frozenset({"replicate", "sequence_parallel"})


def parameter_rule(style: str, name: str, ndim: int) -> ParameterRule:
    """What a style string makes of a parameter that it names, or that a module with it holds.

    Features that are cut by columns are the last dim but one, by rows the last; experts are stacked in front of both.
    Raises PlanError for a string that says nothing of a parameter.
    """
    if style in WHOLE:
        return REPLICATED
    if style == "replicated_with_grad_allreduce":
        return REPLICATED_PARTIAL
    if style in COLWISE:
        return ParameterRule(placement=Shard(max(ndim - 2, 0)))
    if style in ROWWISE:
        return FIRST_RANK_ONLY if name == "bias" else ParameterRule(placement=Shard(ndim - 1))
    if style in PACKED_COLWISE | PACKED_ROWWISE and ndim > 1:
        dim = ndim - 2 if style in PACKED_COLWISE else ndim - 1
        return ParameterRule(placement=Shard(dim), row_order=halves_in_order)
    raise PlanError(f"Hugging Face style {style!r} cannot place the {ndim}-dimensional parameter {name!r}")


def contracts(style: str, ndim: int) -> bool:
    """Whether a layer whose parameter is cut so puts out one term of a sum over ranks."""
    return ndim > 1 and style in ROWWISE | PACKED_ROWWISE


@dataclass(eq=False, repr=False)
class OwnParameters(LocalParameters):
    """Compute with this rank's part of the module's own parameters, and communicate nothing (`local_params`)."""

    own: Mapping[str, str] = field(default_factory=dict)

    def rules(self, module: nn.Module) -> Mapping[str, ParameterRule]:
        """Those of `own` that the module has."""
        parameters = dict(module.named_parameters(recurse=False))
        return {
            name: parameter_rule(self.own[name], name, p.ndim) for name, p in parameters.items() if name in self.own
        }

    def problems(self, module: nn.Module, tp: int) -> list[str]:
        """Features that tp does not divide."""
        return uneven(module, self.rules(module), tp)


@dataclass(eq=False, repr=False)
class SummedModule(OwnParameters):
    """A module whose parameters are cut so that its output is one term of a sum: experts, or shared experts.

    `moe_tp_experts`, and `all_reduce` on a module that holds the cut parameters itself. Every input that wants a
    gradient (hidden states, routing weights) has it summed over the ranks, and the output is summed.

    inputs: how many inputs want a gradient.
    """

    inputs: int = 2

    def communications(self) -> tuple[Communication, ...]:
        """The gradients of what enters, and the output."""
        return (SUM_INPUT_GRADIENTS, SUM_OUTPUT)

    def collectives(self) -> tuple[Counts, Counts]:
        """The output forward; hidden states and routing weights backward."""
        return {"all_reduce": 1}, {"all_reduce": self.inputs}


@dataclass(eq=False, repr=False)
class SummedOutput(LocalParameters):
    """Sum a module's output over the ranks (`all_reduce`); its parameters are its children's."""

    def communications(self) -> tuple[Communication, ...]:
        """The output."""
        return (SUM_OUTPUT,)


class SummedRowwise(RowwiseParallel):
    """torch's `RowwiseParallel` of a linear layer, whose output may be changed in place (Llama 4 does).

    split_input: every rank has the whole input and takes its slice of it (`rowwise_split_input`).
    """

    def __init__(self, *, split_input: bool = False) -> None:
        super().__init__(input_layouts=Replicate() if split_input else None)

    @staticmethod
    def _prepare_output_fn(  # noqa: PLR0917 - torch's signature
        output_layouts: object, use_local_output: object, mod: nn.Module, outputs: Any, device_mesh: "DeviceMesh"
    ) -> Tensor:
        del output_layouts, use_local_output, mod
        return sum_over_ranks(outputs.to_local(grad_placements=[Replicate()]), device_mesh)


@dataclass(eq=False, repr=False, kw_only=True)
class LatentAttentionDown(ReplicatedParallel):
    """The down-projection of latent attention, whole on every rank (`mla_kv_a_proj`): [..., latent + rope].

    The latent part goes on through a layer cut by columns, which sums its gradient; the `rope_features` last ones go
    straight to this rank's heads, so that their gradient is summed here.
    """

    rope_features: int

    def communications(self) -> tuple[Communication, ...]:
        """The gradient of the rope features."""
        leave = partial(_sum_rope_gradient, features=self.rope_features)
        return (Communication(leave=leave, backward={"all_reduce": 1}),)


def _sum_rope_gradient(output: Tensor, mesh: "DeviceMesh", *, features: int) -> Tensor:
    latent, rope = torch.split(output, [output.shape[-1] - features, features], dim=-1)
    return torch.cat([latent, with_summed_gradient(rope, mesh)], dim=-1)
