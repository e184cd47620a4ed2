"""Hugging Face's tensor-parallel styles that neither torch nor the blocks have, each complete by itself.

A style of theirs does its module's communication alone, where ours leaves it to the borders of a block. What each does
is theirs (`transformers/distributed/tensor_parallel.py`, and `integrations/tensor_parallel.py` before 5.18); the
gradients are those of the unsharded model, also where theirs are not (`replicated_with_grad_allreduce` reduces an
accumulated gradient again; `gather` of 4.51-5.0 never reduces that of its input).

Inside a module everything is a plain tensor. Strings on parameters (`experts.gate_up_proj`) become rules of the module
that holds them: `own`, the parameter's name to the string.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.utils._pytree import tree_map

from rl_parallel_plans.checkpoints import halves_in_order, segments_read
from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.styles.in_block import own_names
from rl_parallel_plans.styles.local_parameters import (
    REPLICATED,
    REPLICATED_PARTIAL,
    LocalParameters,
    ParameterRule,
)
from rl_parallel_plans.styles.sharded_forward import wrap_forward
from rl_parallel_plans.styles.sums import sum_over_ranks, with_summed_gradient

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Counts = dict[str, int]

COLWISE = frozenset({"colwise", "local_colwise"})
ROWWISE = frozenset({"rowwise", "local_rowwise"})
PACKED_COLWISE = frozenset({"packed_colwise"})
PACKED_ROWWISE = frozenset({"packed_rowwise", "local_packed_rowwise"})
WHOLE = frozenset({"replicate", "sequence_parallel"})
PACKED = 2
"""Matrices in a packed weight: gate and up."""


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
        if name == "bias":
            return ParameterRule(placement=Replicate(), first_rank_only=True)
        return ParameterRule(placement=Shard(ndim - 1))
    if style in PACKED_COLWISE | PACKED_ROWWISE and ndim > 1:
        dim = ndim - 2 if style in PACKED_COLWISE else ndim - 1
        return ParameterRule(placement=Shard(dim), row_order=halves_in_order)
    raise PlanError(f"Hugging Face style {style!r} cannot place the {ndim}-dimensional parameter {name!r}")


def contracts(style: str, ndim: int) -> bool:
    """Whether a layer whose parameter is cut so puts out one term of a sum over ranks."""
    return ndim > 1 and style in ROWWISE | PACKED_ROWWISE


def uneven(module: nn.Module, rules: Mapping[str, ParameterRule], tp: int) -> list[str]:
    """A sentence for each parameter whose features tp does not divide."""
    found = []
    for name, rule in rules.items():
        dim = getattr(rule.placement, "dim", None)
        if dim is None:
            continue
        size = module.get_parameter(name).shape[dim]
        units = tp if rule.row_order is None else PACKED * tp
        if size % units:
            what = f"tp={tp}" if units == tp else f"tp={tp} times {units // tp} packed matrices"
            found.append(f"has {name} with {size} features, which {what} does not divide: choose a tp that does")
    return found


class OwnParameters(LocalParameters):
    """Compute with this rank's part of the module's own parameters, and communicate nothing (`local_params`)."""

    def __init__(self, own: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.own = dict(own or {})

    def rules(self, module: nn.Module) -> Mapping[str, ParameterRule]:
        """Those of `own` that the module has."""
        return own_rules(module, self.own)

    def problems(self, module: nn.Module, tp: int) -> list[str]:
        """Features that tp does not divide."""
        return uneven(module, self.rules(module), tp)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({_listed(self.own)})"


class SummedModule(OwnParameters):
    """A module whose parameters are cut so that its output is one term of a sum: experts, or shared experts.

    `moe_tp_experts`, and `all_reduce` on a module that holds the cut parameters itself. Every input that wants a
    gradient (hidden states, routing weights) has it summed over the ranks, and the output is summed.

    inputs: how many inputs want a gradient.
    """

    def __init__(self, own: Mapping[str, str] | None = None, *, inputs: int = 2) -> None:
        super().__init__(own)
        self.inputs = inputs

    def collectives(self) -> tuple[Counts, Counts]:
        """The output forward; hidden states and routing weights backward."""
        return {"all_reduce": 1}, {"all_reduce": self.inputs}

    def _apply(self, module: nn.Module, device_mesh: "DeviceMesh") -> nn.Module:
        super()._apply(module, device_mesh)
        self.communicate(module, device_mesh)
        return module

    def communicate(self, module: nn.Module, mesh: "DeviceMesh") -> None:
        """Sum over the ranks what `module` puts out, and the gradients of what enters it."""
        wrap_forward(module, partial(_sum_input_gradients, mesh=mesh))
        wrap_forward(module, partial(_sum_output, mesh=mesh))


class SummedOutput(LocalParameters):
    """Sum a module's output over the ranks (`all_reduce`); its parameters are its children's."""

    def rules(self, module: nn.Module) -> Mapping[str, ParameterRule]:
        """None."""
        del module
        return {}

    def collectives(self) -> tuple[Counts, Counts]:
        """One all-reduce forward."""
        return {"all_reduce": 1}, {}

    def _apply(self, module: nn.Module, device_mesh: "DeviceMesh") -> nn.Module:
        wrap_forward(module, partial(_sum_output, mesh=device_mesh))
        return module

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


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


class PackedColwise(LocalParameters):
    """A linear layer that packs [gate | up], each cut by columns (`packed_colwise`): puts out [gate_r | up_r]."""

    def rules(self, module: nn.Module) -> Mapping[str, ParameterRule]:
        """Rows of both matrices; a bias, being small, whole."""
        return {
            name: ParameterRule(placement=Shard(0), row_order=halves_in_order)
            if p.ndim > 1
            else ParameterRule(placement=Replicate(), reads=segments_read([len(p) // PACKED] * PACKED))
            for name, p in module.named_parameters(recurse=False)
        }

    def problems(self, module: nn.Module, tp: int) -> list[str]:
        """Rows that tp does not divide."""
        return uneven(module, self.rules(module), tp)

    def collectives(self) -> tuple[Counts, Counts]:
        """The input's gradient."""
        return {}, {"all_reduce": 1}

    def _apply(self, module: nn.Module, device_mesh: "DeviceMesh") -> nn.Module:
        super()._apply(module, device_mesh)
        wrap_forward(module, partial(_sum_input_gradients, mesh=device_mesh))
        return module

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class LocalColwise(LocalParameters):
    """A linear layer cut by columns inside a block (`local_colwise`): the block's borders communicate."""

    def rules(self, module: nn.Module) -> Mapping[str, ParameterRule]:
        """Rows of weight and bias."""
        return dict.fromkeys(own_names(module), ParameterRule(placement=Shard(0)))

    def problems(self, module: nn.Module, tp: int) -> list[str]:
        """Rows that tp does not divide."""
        return uneven(module, self.rules(module), tp)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class LatentAttentionDown(LocalParameters):
    """The down-projection of latent attention, whole on every rank (`mla_kv_a_proj`): [..., latent + rope].

    The latent part goes on through a layer cut by columns, which sums its gradient; the `rope_features` last ones go
    straight to this rank's heads, so that their gradient is summed here.
    """

    def __init__(self, *, rope_features: int) -> None:
        super().__init__()
        self.rope_features = rope_features

    def rules(self, module: nn.Module) -> Mapping[str, ParameterRule]:
        """Everything whole, and so is its gradient."""
        return dict.fromkeys(own_names(module), REPLICATED)

    def collectives(self) -> tuple[Counts, Counts]:
        """The gradient of the rope features."""
        return {}, {"all_reduce": 1}

    def _apply(self, module: nn.Module, device_mesh: "DeviceMesh") -> nn.Module:
        super()._apply(module, device_mesh)
        wrap_forward(module, partial(_sum_rope_gradient, mesh=device_mesh, features=self.rope_features))
        return module

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rope_features={self.rope_features})"


class SharedIdentity(LocalParameters):
    """An expert that hands on its input, inside experts that are summed over ranks (`moe_identity_expert`).

    Every rank has the same output, so that each puts in its share: the input over the number of ranks.
    """

    def rules(self, module: nn.Module) -> Mapping[str, ParameterRule]:
        """None."""
        del module
        return {}

    def _apply(self, module: nn.Module, device_mesh: "DeviceMesh") -> nn.Module:
        wrap_forward(module, partial(_share, ranks=device_mesh.size()))
        return module

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def own_rules(module: nn.Module, own: Mapping[str, str]) -> dict[str, ParameterRule]:
    """The rules of the module's own parameters that `own` names."""
    parameters = dict(module.named_parameters(recurse=False))
    return {name: parameter_rule(own[name], name, p.ndim) for name, p in parameters.items() if name in own}


def _listed(own: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={style}" for name, style in own.items())


def _sum_input_gradients(
    _module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, mesh: "DeviceMesh"
) -> Any:
    def summed(value: Any) -> Any:
        wanted = isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()
        return with_summed_gradient(value, mesh) if wanted else value

    return call(*tree_map(summed, args), **tree_map(summed, kwargs))


def _sum_rope_gradient(
    _module: nn.Module,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    mesh: "DeviceMesh",
    features: int,
) -> Tensor:
    output = call(*args, **kwargs)
    latent, rope = torch.split(output, [output.shape[-1] - features, features], dim=-1)
    return torch.cat([latent, with_summed_gradient(rope, mesh)], dim=-1)


def _sum_output(
    _module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, mesh: "DeviceMesh"
) -> Any:
    output = call(*args, **kwargs)
    if isinstance(output, tuple | list):
        return type(output)([sum_over_ranks(output[0], mesh), *output[1:]])
    return sum_over_ranks(output, mesh)


def _share(
    _module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, ranks: int
) -> Any:
    hidden, *others = args
    return call(hidden / ranks, *others, **kwargs)
