"""What each of Hugging Face's style strings is in our tables, from transformers 4.50 to 5.23.

Imports none of it. The table does not depend on the release: a string that was renamed (5.2: `*_rep` became
`colwise_gather_output` and `rowwise_split_input`) stands here under both names. One changed its meaning:
`sequence_parallel` cut a whole input and gathered the output again (4.51-4.57), and takes an input that is cut already
since 5.0, which no other string makes, so that either way its module computes the same as on whole tensors.

A style of theirs does its module's communication alone, where ours leaves it to the borders of a block. What each does
is theirs (`transformers/distributed/tensor_parallel.py`, and `integrations/tensor_parallel.py` before 5.18); the
gradients are those of the unsharded model, also where theirs are not (`replicated_with_grad_allreduce` reduces an
accumulated gradient again; `gather` of 4.51-5.0 never reduces that of its input). Strings on parameters
(`experts.gate_up_proj`) become rows of the module that holds them: `own`, the parameter's name to the string.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from rl_parallel_plans.checkpoints import halves_in_order
from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.styles import (
    Block,
    Colwise,
    LocalParameters,
    PackedColwise,
    ParameterRule,
    ReplicatedParallel,
    Rowwise,
    SharedIdentity,
    VocabularyParallelEmbedding,
)
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
WHOLE = frozenset({"replicate", "sequence_parallel"})
GATHERED = frozenset({"colwise_gather_output", "colwise_rep", "embedding_colwise"})
SPLIT_INPUT = frozenset({"rowwise_split_input", "rowwise_rep"})
EXPERT_PARALLEL = frozenset({"grouped_gemm", "ep_router", "ep_dispatch_experts", "megamoe_router", "megamoe_experts"})
BLOCK = "gather"
IN_BLOCK = frozenset({"local_colwise", "local_rowwise", "local_packed_rowwise", "local"})
PARAMETERS_ONLY = frozenset({"packed_rowwise", "local_packed_rowwise"})


@dataclass(eq=False, repr=False)
class OwnParameters(LocalParameters):
    """Compute with this rank's part of the module's own parameters, and communicate nothing (`local_params`)."""

    own: Mapping[str, str] = field(default_factory=dict)

    def rules(self, module: nn.Module) -> Mapping[str, ParameterRule]:
        """Those of `own` that the module has."""
        own = {name: p for name, p in module.named_parameters(recurse=False) if name in self.own}
        return {name: parameter_rule(self.own[name], name, p.ndim) for name, p in own.items()}

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
    around = (SUM_INPUT_GRADIENTS, SUM_OUTPUT)

    def collectives(self) -> tuple[Counts, Counts]:
        """The output forward; hidden states and routing weights backward."""
        return {"all_reduce": 1}, {"all_reduce": self.inputs}


@dataclass(eq=False, repr=False)
class SummedOutput(LocalParameters):
    """Sum a module's output over the ranks (`all_reduce`); its parameters are its children's."""

    around = (SUM_OUTPUT,)


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


_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": SummedRowwise,
    **dict.fromkeys(GATHERED, lambda: ColwiseParallel(output_layouts=Replicate())),
    **dict.fromkeys(SPLIT_INPUT, lambda: SummedRowwise(split_input=True)),
    "embedding_rowwise": VocabularyParallelEmbedding,
    "replicated_with_grad_allreduce": lambda: ReplicatedParallel(partial_gradient=True),
    "replicate": ReplicatedParallel,
    "sequence_parallel": ReplicatedParallel,
    "packed_colwise": lambda: PackedColwise(sum_input_gradients=True),
    "moe_tp_experts": SummedModule,
    "moe_identity_expert": SharedIdentity,
    "all_reduce": SummedOutput,
    "local_params": OwnParameters,
    BLOCK: Block,
    "local_colwise": Colwise,
    "local_rowwise": Rowwise,
    "local": OwnParameters,
}
KNOWN = tuple(sorted({*_STYLES, "mla_kv_a_proj", *PARAMETERS_ONLY}))


def translate_parallel_style(style: str, *, config: object | None = None) -> ParallelStyle:
    """A new style that does to a module exactly what the Hugging Face style of this name does.

    config: the model's configuration, which `mla_kv_a_proj` asks for `qk_rope_head_dim`; no other needs it.

    Raises PlanError for a string of expert parallelism, for one that only a parameter can have, and for an unknown one.
    """
    check_known(style)
    if style in PARAMETERS_ONLY:
        raise PlanError(f"Hugging Face style {style!r} is one of a stacked parameter, and not of a module")
    if style == "mla_kv_a_proj":
        return LatentAttentionDown(rope_features=_rope_features(config))
    return _STYLES[style]()


def check_known(style: str) -> None:
    """Raise PlanError for a string of expert parallelism and for an unknown one."""
    if style in EXPERT_PARALLEL:
        raise PlanError(
            f"Hugging Face style {style!r} is expert parallelism, which is no style of the tp axis: it shares experts "
            "out over an axis of its own (plan_for's ep=)"
        )
    if style not in KNOWN:
        raise PlanError(f"Hugging Face style {style!r} is unknown: known are {', '.join(KNOWN)}")


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
    if style in PARAMETERS_ONLY | {"packed_colwise"} and ndim > 1:
        dim = ndim - 1 if style in PARAMETERS_ONLY else ndim - 2
        return ParameterRule(placement=Shard(dim), row_order=halves_in_order)
    raise PlanError(f"Hugging Face style {style!r} cannot place the {ndim}-dimensional parameter {name!r}")


def contracts(style: str, ndim: int) -> bool:
    """Whether a layer whose parameter is cut so puts out one term of a sum over ranks."""
    return ndim > 1 and style in ROWWISE | PARAMETERS_ONLY


def release() -> str:
    """The release of transformers that is installed."""
    try:
        return version("transformers")
    except PackageNotFoundError:
        return "not installed"


def _rope_features(config: object | None) -> int:
    text = getattr(config, "get_text_config", lambda: config)()
    size = getattr(text, "qk_rope_head_dim", None)
    if not isinstance(size, int):
        raise PlanError(
            "Hugging Face style 'mla_kv_a_proj' sums the gradient of the rope features and needs to know how many: "
            "pass config= a configuration with qk_rope_head_dim"
        )
    return size
