"""Carry out a plan's styles on a model, module by module, and keep its ties.

Parameters that no pattern names become whole DTensors too, so that everything lies on one mesh: optimizers that fuse
parameters, and torch's own gradient norm, take no mixture.
"""

from typing import TYPE_CHECKING

from torch import nn

from rl_parallel_plans.dtensor import is_dtensor
from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.structure import matching_modules
from rl_parallel_plans.ties import retie, tied_names

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

    from rl_parallel_plans.styles.table import LocalView


def shard(
    model: nn.Module, tp_mesh: "DeviceMesh", styles: "Mapping[str, ParallelStyle]", *, src_data_rank: int | None
) -> None:
    """Apply `styles`, then keep whole what they leave out. The plan has been checked."""
    from torch.distributed.tensor.parallel import parallelize_module

    ties = tied_names(model)
    if any("experts" in pattern and getattr(style, "in_block", False) for pattern, style in styles.items()):
        model.register_forward_pre_hook(_refuse_router_loss, with_kwargs=True)
    for pattern, style in styles.items():
        for _, module in matching_modules(model, pattern):
            if getattr(style, "ep", 1) == 1:  # experts that are shared out over another axis are sharded already
                parallelize_module(module, tp_mesh, style, src_data_rank=src_data_rank)
    retie(model, ties)
    _replicate_the_rest(model, tp_mesh, src_data_rank=src_data_rank)
    retie(model, ties)


def _refuse_router_loss(model: nn.Module, _args: object, kwargs: dict[str, object]) -> None:
    """A router in a block gets the sum of all ranks' gradients: those of an auxiliary loss would count tp times."""
    config = getattr(model, "config", None)
    if kwargs.get("output_router_logits") or getattr(config, "output_router_logits", False):
        raise PlanError(
            "output_router_logits is True: under a plan by structure the gradient of an auxiliary loss of the router "
            "would be counted once per tp rank; pass False"
        )


def _replicate_the_rest(model: nn.Module, tp_mesh: "DeviceMesh", *, src_data_rank: int | None) -> None:
    from rl_parallel_plans.styles.table import (
        REPLICATED,
        compute_locally,
        local_views,
        place_parameters,
    )

    rest: dict[str, tuple[nn.Module, list[str]]] = {}
    for path, module in model.named_modules():
        names = [name for name, p in module.named_parameters(recurse=False) if not is_dtensor(p)]
        if names:
            rest[path] = (module, names)
    views: dict[str, tuple[nn.Module, tuple[LocalView, ...]]] = {}
    for path, (module, names) in rest.items():
        rules = dict.fromkeys(names, REPLICATED)
        place_parameters(module, tp_mesh, rules, src_data_rank=src_data_rank)
        views[path] = (module, local_views(tp_mesh, rules))
    # A parent may read a child's weight without calling the child (interpolated position embeddings, a router): the
    # parent itself, where FSDP may have gathered it, or the model.
    parents = {path.rpartition(".")[0] for path in rest if path}
    for parent in sorted(parents - {""}):
        children = [each for path, each in views.items() if path and path.rpartition(".")[0] == parent]
        compute_locally(model.get_submodule(parent), children)
    if rest:
        compute_locally(model, list(views.values()))
