"""FSDP2 over the data-parallel axes of a mesh: each layer a unit, then the rest of the model as the last one.

Comes after tensor parallelism and needs it not. Knows modules, parameters and their names; knows no plan. It moves a
plain model to the mesh's device, loads no weights and makes no process group. What is gathered together, and what
apart since it stays in fp32, has another dtype or lies on another mesh, `fsdp_units` decides.

Gradients are SUMMED over the data-parallel ranks and not averaged, at every number of them: a loss that divides by the
step's global count gives results that do not depend on the ranks.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rl_parallel_plans.dtensor import submesh
from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.fp32_parameters import FP32_PARAMETERS, kept_in_fp32
from rl_parallel_plans.fsdp_units import Unit, fsdp_units
from rl_parallel_plans.pipeline.stages import stage_info
from rl_parallel_plans.ties import tied_names

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import OffloadPolicy

    Meshes = dict[tuple[str, ...], DeviceMesh]


def apply_fsdp(
    model: nn.Module,
    mesh: "DeviceMesh",
    *,
    dp_axis: str | tuple[str, ...] = "dp",
    dp_replicate_axis: str | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    output_dtype: torch.dtype | None = None,
    fp32_parameters: Sequence[str] = FP32_PARAMETERS,
    offload_policy: "OffloadPolicy | None" = None,
    reshard_after_forward: bool | int = True,
) -> nn.Module:
    """Shard every parameter over the axis `dp_axis` of `mesh`; sum gradients over it.

    dp_axis: axis that parameters are sharded over; several are sharded over as if they were one, and a parameter that
        is sharded over one of them already (experts over "ep") over the others.
    dp_replicate_axis: axis that each shard is copied over (HSDP): parameters are gathered inside a group of `dp_axis`
        only, and gradients are summed over both.
    param_dtype: dtype of the gathered parameters, hence of the computation, which is that of a model loaded in this
        dtype. The sharded parameters, their gradients and the optimizer's state keep their own. The model's
        floating-point inputs are cast to it, and nothing else: what a layer hands to the next stays as it is.
    reduce_dtype: dtype of the gradient reduction; None reduces in `param_dtype`.
    output_dtype: dtype of the model's output; None leaves the logits as they are, and copies nothing.
    fp32_parameters: names of parameters or modules that are never cast to `param_dtype`, beside those that the model's
        class names itself. Their gradients are reduced in fp32 too.
    offload_policy: `CPUOffloadPolicy(pin_memory=...)` of torch.distributed.fsdp keeps shards, gradients and optimizer
        state in CPU memory; pinned memory copies faster and cannot be swapped out.
    reshard_after_forward: free a layer's gathered parameters after its forward and gather them again in backward;
        False keeps them; a number keeps them sharded over that many ranks. The last unit (embedding, final norm,
        lm_head) keeps them always, since its backward comes first.

    Ties stay ties, frozen parameters frozen. `type(model)` becomes a subclass made by FSDP. Raises PlanError, before
    anything has changed, for an axis or layers that are not there, a model under FSDP already, or what fits nowhere.
    """
    units, meshes = fsdp_layout(
        model,
        mesh,
        dp_axis=dp_axis,
        dp_replicate_axis=dp_replicate_axis,
        fp32=kept_in_fp32(model, param_dtype, fp32_parameters),
        offload_policy=offload_policy,
        reshard_after_forward=reshard_after_forward,
    )
    ties = tied_names(model)
    for unit in units:
        _shard(
            model,
            unit,
            meshes[unit.kind.taken],
            offload_policy=offload_policy,
            reshard_after_forward=reshard_after_forward if unit.path else False,
            param_dtype=None if unit.kind.fp32 else param_dtype,
            reduce_dtype=torch.float32 if unit.kind.fp32 else reduce_dtype,
            output_dtype=None if unit.path else output_dtype,
        )
    _sum_gradients(model)
    for layer in _layers_with_lists(model, units):
        # Ranks whose tokens chose other experts of a list reduce zeros for those that they did not run: the collectives
        # of a unit must be the same on every rank.
        layer.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
    if (after := tied_names(model)) != ties:
        raise AssertionError(f"FSDP made {after} of the ties {ties}")
    return model


def fsdp_layout(
    model: nn.Module,
    mesh: "DeviceMesh",
    *,
    dp_axis: str | tuple[str, ...],
    dp_replicate_axis: str | None,
    fp32: set[str],
    offload_policy: "OffloadPolicy | None",
    reshard_after_forward: bool | int,
) -> "tuple[list[Unit], Meshes]":
    """The units of `apply_fsdp`, and the mesh of each by the axes that it is sharded over already; or its PlanError."""
    from torch.distributed.fsdp import FSDPModule

    axes = (dp_axis,) if isinstance(dp_axis, str) else tuple(dp_axis)
    _check(model, offload_policy)
    for module in model.modules():
        if isinstance(cut := getattr(module, "context_parallel_axis", None), str):
            check_tokens_are_summed(cut, axes, dp_replicate_axis)
    for axis in (*axes, *([] if dp_replicate_axis is None else [dp_replicate_axis])):
        submesh(mesh, axis)
    if not axes or dp_replicate_axis in axes:
        raise PlanError(
            f"dp_axis={axes} and dp_replicate_axis={dp_replicate_axis!r}: name at least one axis to shard over, and "
            "another one to copy over"
        )
    units = fsdp_units(model, dp_axes=axes, fp32=fp32)
    listed = [path for layer in _layers_with_lists(model, units) for path, _ in layer.named_modules()]
    if any("expert" in path for path in listed) and not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise PlanError(
            f"{type(model).__name__} keeps experts in a list, of which ranks may run different ones, and this release "
            "of torch cannot keep their gradients in step: install torch 2.13, or a release of transformers from 5.0 "
            "on, whose experts are stacked"
        )
    meshes = {unit.kind.taken: _mesh(mesh, unit, axes=axes, replicate=dp_replicate_axis) for unit in units}
    for each in meshes.values():
        _check_group_size(reshard_after_forward, each.size(each.ndim - 1))
    return units, meshes


def _layers_with_lists(model: nn.Module, units: Sequence[Unit]) -> list[nn.Module]:
    """The layers in which an `nn.ModuleList` lies, whose modules a rank need not run: experts that no token chose."""
    layers = [model.get_submodule(path) for path in dict.fromkeys(unit.path for unit in units) if path]
    return [
        layer
        for layer in layers
        if any(isinstance(inner, nn.ModuleList) for inner in layer.modules() if inner is not layer)
    ]


def check_tokens_are_summed(cp_axis: str, dp_axes: Sequence[str], dp_replicate_axis: str | None) -> None:
    """PlanError where rows are cut over an axis that gradients are not summed over."""
    if cp_axis not in (*dp_axes, dp_replicate_axis):
        raise PlanError(
            f"rows are cut over {cp_axis!r}, and dp_axis={dp_axes} leaves the gradients of their tokens unsummed over "
            f"it: pass dp_axis={(*dp_axes, cp_axis)}"
        )


def _shard(model: nn.Module, unit: Unit, mesh: "DeviceMesh", *, offload_policy: Any, **options: Any) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard

    reshard_after_forward = options.pop("reshard_after_forward")
    module = model.get_submodule(unit.path)
    fully_shard(
        module,
        mesh=mesh,
        # FSDP's default casts what enters each unit: a residual stream, or rotary angles, that the model keeps in fp32.
        # A pipeline stage is given one of these too: the residual stream of the stage before.
        mp_policy=MixedPrecisionPolicy(cast_forward_inputs=not unit.path and stage_info(model) is None, **options),
        offload_policy=OffloadPolicy() if offload_policy is None else offload_policy,
        reshard_after_forward=reshard_after_forward,
        ignored_params={p for p in module.parameters() if p not in unit.parameters},
    )


def _sum_gradients(model: nn.Module) -> None:
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            # A divisor of 1 alone asks the communication library for a scaled sum, which gloo does not have.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _check(model: nn.Module, offload_policy: object) -> None:
    from torch.distributed.fsdp import FSDPModule, OffloadPolicy

    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise PlanError(f"{type(model).__name__} is under FSDP already: apply it once")
    if offload_policy is not None and not isinstance(offload_policy, OffloadPolicy):
        hint = " (this is the class: call it)" if isinstance(offload_policy, type) else ""
        raise PlanError(
            f"offload_policy is {offload_policy!r}{hint}: it is None or an instance, such as "
            "torch.distributed.fsdp.CPUOffloadPolicy(pin_memory=False)"
        )


def _check_group_size(size: object, ranks: int) -> None:
    if not isinstance(size, int) or (not isinstance(size, bool) and (size < 1 or ranks % size)):
        raise PlanError(
            f"reshard_after_forward is {size!r}: it is True, False or a number of ranks that divides the {ranks} ranks "
            "of dp_axis"
        )


def _mesh(mesh: "DeviceMesh", unit: Unit, *, axes: tuple[str, ...], replicate: str | None) -> "DeviceMesh":
    """The axes that the unit is not sharded over yet as one, after the axis of copies where there is one."""
    from torch.distributed.device_mesh import DeviceMesh

    wanted = set(axes) - set(unit.kind.taken)
    left = tuple(axis for axis in mesh.mesh_dim_names or () if axis in wanted)
    if not left:
        raise PlanError(
            f"{unit.path} is sharded over {list(unit.kind.taken)} already, and dp_axis={axes} names no other axis to "
            "shard it over: name one more, of one rank if need be"
        )
    shards = mesh[left[0]] if len(left) == 1 else mesh[left]._flatten("_".join(left))  # noqa: SLF001 - no public one
    if replicate is None:
        return shards
    return DeviceMesh._concatenate([mesh[replicate], shards])  # noqa: SLF001 - no public one
