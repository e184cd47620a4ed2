"""FSDP2 over the data-parallel axes of a mesh: each layer a unit, then the rest of the model as the last one.

Comes after tensor parallelism and does not need it. It moves a plain model to the mesh's device, loads no weights and
makes no process group.

Gradients are SUMMED over the data-parallel ranks and not averaged, at every number of them: a loss that divides by the
step's global count gives results that do not depend on the ranks.

A unit gathers its parameters in one collective, in one dtype and over one mesh. Parameters that differ from most of
their layer in dtype, precision or mesh become a small unit of their own inside of it: the module that holds them, for
these parameters only.

Some parameters stay in fp32 when the others are gathered in half precision: those that the model's own code names
(`_keep_in_fp32_modules_strict`; under float16 `_keep_in_fp32_modules` too, as `from_pretrained` does), and a few small
ones with a large effect: the decay of a state-space layer is the exponential of an exponential, and a router's
correction bias ranks experts by differences that bfloat16 rounds away.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from rl_parallel_plans.dtensor import is_dtensor, submesh
from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.pipeline.stages import stage_info
from rl_parallel_plans.structure import direct_parameters, fsdp_layers, joined, tied_names

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import OffloadPolicy

    Meshes = dict[tuple[str, ...], DeviceMesh]


FP32_PARAMETERS = ("A_log", "e_score_correction_bias")
"""Names that stay in fp32 in every model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What the parameters of one unit have in common."""

    taken: tuple[str, ...]
    """Data-parallel axes that they are sharded over already, and FSDP must leave alone."""
    fp32: bool
    """Whether they are gathered as they are, and not in the dtype of the others."""
    dtype: torch.dtype | None
    """Their dtype; None where they are frozen, and any will do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Parameters that are gathered together."""

    path: str
    """The module at whose forward they are gathered; empty for the model itself."""
    kind: Kind
    """What they have in common."""
    parameters: frozenset[nn.Parameter]
    """The parameters of the unit; all others in the module are those of other units."""


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
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    units, meshes = fsdp_layout(
        model,
        mesh,
        dp_axis=dp_axis,
        dp_replicate_axis=dp_replicate_axis,
        fp32=kept_in_fp32(model, param_dtype, fp32_parameters),
        offload_policy=offload_policy,
        reshard_after_forward=reshard_after_forward,
    )
    ties, is_stage = tied_names(model), stage_info(model) is not None
    for unit in units:
        module = model.get_submodule(unit.path)
        fully_shard(
            module,
            mesh=meshes[unit.kind.taken],
            mp_policy=MixedPrecisionPolicy(
                param_dtype=None if unit.kind.fp32 else param_dtype,
                reduce_dtype=torch.float32 if unit.kind.fp32 else reduce_dtype,
                output_dtype=None if unit.path else output_dtype,
                # FSDP's default casts what enters each unit: a residual stream, or rotary angles, that the model keeps
                # in fp32. A pipeline stage is given one of these too: the residual stream of the stage before.
                cast_forward_inputs=not unit.path and not is_stage,
            ),
            offload_policy=OffloadPolicy() if offload_policy is None else offload_policy,
            reshard_after_forward=reshard_after_forward if unit.path else False,
            ignored_params={p for p in module.parameters() if p not in unit.parameters},
        )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # A divisor of 1 alone asks the communication library for a scaled sum, which gloo does not have.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
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
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, OffloadPolicy

    name, policy = type(model).__name__, cast("object", offload_policy)
    axes = (dp_axis,) if isinstance(dp_axis, str) else tuple(dp_axis)
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise PlanError(f"{name} is under FSDP already: apply it once")
    if policy is not None and not isinstance(policy, OffloadPolicy):
        hint = " (this is the class: call it)" if isinstance(policy, type) else ""
        raise PlanError(
            f"offload_policy is {policy!r}{hint}: it is None or an instance, such as "
            "torch.distributed.fsdp.CPUOffloadPolicy(pin_memory=False)"
        )
    for module in model.modules():
        if isinstance(cp_axis := getattr(module, "context_parallel_axis", None), str):
            check_tokens_are_summed(cp_axis, axes, dp_replicate_axis)
    for axis in (*axes, *([] if dp_replicate_axis is None else [dp_replicate_axis])):
        submesh(mesh, axis)
    if not axes or dp_replicate_axis in axes:
        raise PlanError(
            f"dp_axis={axes} and dp_replicate_axis={dp_replicate_axis!r}: name at least one axis to shard over, and "
            "another one to copy over"
        )
    units = fsdp_units(model, dp_axes=axes, fp32=fp32)
    meshes: Meshes = {}
    for unit in units:
        if (taken := unit.kind.taken) in meshes:
            continue
        # The axes that the unit is not sharded over yet as one, after the axis of copies where there is one.
        left = tuple(axis for axis in mesh.mesh_dim_names or () if axis in set(axes) - set(taken))
        if not left:
            raise PlanError(
                f"{unit.path} is sharded over {list(taken)} already, and dp_axis={axes} names no other axis to shard "
                "it over: name one more, of one rank if need be"
            )
        shards = mesh[left[0]] if len(left) == 1 else mesh[left]._flatten("_".join(left))  # noqa: SLF001 - no public one
        size, ranks = reshard_after_forward, shards.size()
        if dp_replicate_axis is not None:
            shards = DeviceMesh._concatenate([mesh[dp_replicate_axis], shards])  # noqa: SLF001 - no public one
        meshes[taken] = shards
        if not isinstance(size, int) or (not isinstance(size, bool) and (size < 1 or ranks % size)):
            raise PlanError(
                f"reshard_after_forward is {size!r}: it is True, False or a number of ranks that divides the {ranks} "
                "ranks of dp_axis"
            )
    return units, meshes


def _layers_with_lists(model: nn.Module, units: Sequence[Unit]) -> list[nn.Module]:
    """The layers that hold an `nn.ModuleList`, whose modules a rank need not run: experts that no token chose."""
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


def kept_in_fp32(model: nn.Module, param_dtype: torch.dtype | None, names: Iterable[str]) -> set[str]:
    """Names of the parameters that are not cast to `param_dtype`: none where it is not a half precision.

    names: parameters or modules, as one or more whole tokens of a dotted name (`A_log`, `gate.weight`).
    """
    if param_dtype not in (torch.bfloat16, torch.float16):
        return set()
    attributes = ["_keep_in_fp32_modules_strict"]
    attributes += ["_keep_in_fp32_modules"] if param_dtype == torch.float16 else []
    kept: set[str] = set()
    for path, module in model.named_modules():
        wanted = {name for attribute in attributes for name in getattr(module, attribute, None) or ()}
        wanted |= set(names) if not path else set()
        pattern = re.compile(rf"(?:^|\.)(?:{'|'.join(map(re.escape, sorted(wanted)))})(?:\.|$)")
        for name, _ in module.named_parameters(remove_duplicate=False) if wanted else ():
            if pattern.search(name):
                kept.add(joined(path, name))
    return kept


# -- Which parameters FSDP gathers together ----------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    """One place where a parameter is registered."""

    unit: str
    owner: str
    name: str
    parameter: nn.Parameter
    kind: Kind


def fsdp_units(model: nn.Module, *, dp_axes: tuple[str, ...], fp32: set[str]) -> list[Unit]:
    """The units in the order in which they must be made: layers, then the rest, each before those inside of it.

    fp32: names of parameters that are gathered as they are.

    Raises PlanError for a parameter without dims, or one that does not fit its unit and cannot be parted from it.
    """
    layers = fsdp_layers(model)
    if not layers:
        raise PlanError(f"{type(model).__name__} holds no nn.ModuleList of layers to shard one by one: use fully_shard")
    homes = {id(module): path for path, layer in layers.items() for module in layer.modules()}
    slots: list[_Slot] = []
    for owner, own, parameter in direct_parameters(model):
        name = joined(owner, own)
        if parameter.ndim == 0:
            raise PlanError(
                f"parameter {name} has no dims and FSDP shards dim 0: make it a buffer, or a parameter of shape [1]"
            )
        axes = (parameter.device_mesh.mesh_dim_names or ()) if is_dtensor(parameter) else ()
        taken = tuple(axis for axis in dp_axes if axis in axes)
        kind = Kind(taken=taken, fp32=name in fp32, dtype=parameter.dtype if parameter.requires_grad else None)
        unit = homes.get(id(model.get_submodule(owner)), "")
        slots.append(_Slot(unit=unit, owner=owner, name=name, parameter=parameter, kind=kind))
    ends = Counter(slot.parameter for slot in slots)
    return [
        unit for path in (*layers, "") for unit in _parted(path, [slot for slot in slots if slot.unit == path], ends)
    ]


def _parted(path: str, slots: list[_Slot], ends: "Counter[nn.Parameter]") -> Iterator[Unit]:
    """The unit at `path` with most of the slots, then one for each module that holds others."""
    if not slots:  # a model that is nothing but layers still needs a unit that makes them one model
        yield Unit(path=path, kind=Kind(taken=(), fp32=False, dtype=None), parameters=frozenset())
        return
    sizes: Counter[Kind] = Counter()
    for parameter, kind in {slot.parameter: slot.kind for slot in slots}.items():
        sizes[kind] += parameter.numel()
    # Frozen parameters are gathered with trainable ones of any dtype.
    fits = {}
    for kind in sizes:
        alike = [k for k in sizes if k.dtype is not None and (k.taken, k.fp32) == (kind.taken, kind.fp32)]
        fits[kind] = kind if kind.dtype is not None else max(alike, key=sizes.__getitem__, default=kind)
    main = max(fits.values(), key=lambda kind: (not kind.taken, sizes[kind]))
    inner: dict[str, dict[Kind, set[nn.Parameter]]] = {}
    for slot in slots:
        if (kind := fits[slot.kind]) == main:
            continue
        inner.setdefault(slot.owner, {}).setdefault(kind, set()).add(slot.parameter)
        why = None
        if slot.owner == path:
            why = f"the {'layer' if path else 'model'} itself holds it"
        elif len(inner[slot.owner]) > 1:
            why = f"{slot.owner} holds others that differ from both"
        elif ends[slot.parameter] > 1:
            why = "it is tied to another"
        if why is not None:
            raise PlanError(
                f"parameter {slot.name} differs in dtype, precision or mesh from most of its FSDP unit and cannot be "
                f"gathered apart from it, since {why}: give all of them one dtype, or leave it out of fp32_parameters"
            )
    apart = {p for kinds in inner.values() for parameters in kinds.values() for p in parameters}
    yield Unit(path=path, kind=main, parameters=frozenset(slot.parameter for slot in slots) - apart)
    for owner, kinds in inner.items():
        for kind, parameters in kinds.items():
            yield Unit(path=owner, kind=kind, parameters=frozenset(parameters))
