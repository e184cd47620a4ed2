"""FSDP2 over the data-parallel axes of a mesh: each layer a unit, then the rest of the model as the last one.

Comes after tensor parallelism and does not need it. It moves a plain model to the mesh's device, loads no weights and
makes no process group.

Gradients are SUMMED over the data-parallel ranks and not averaged, at every number of them: a loss that divides by the
step's global count gives results that do not depend on the ranks.

A unit gathers its parameters in one collective, in one dtype and over one mesh. What of a layer does not fit the most
of it becomes a small unit of its own inside of the layer: the module that holds it, for these parameters only.

Some parameters stay in fp32 when the others are gathered in half precision: those that the model's own code says must
(`_keep_in_fp32_modules_strict`; under float16 `_keep_in_fp32_modules` too: what `from_pretrained` reads), and a few
that decide more than their size: the decay of a state-space layer is the exponential of an exponential, and a router's
correction bias ranks experts by differences that bfloat16 rounds away.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rl_parallel_plans.dtensor import is_dtensor, submesh
from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.pipeline.stages import stage_info
from rl_parallel_plans.structure import fsdp_layers, joined, tied_names

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import OffloadPolicy

    Meshes = dict[tuple[str, ...], DeviceMesh]


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


def fsdp_units(model: nn.Module, *, dp_axes: tuple[str, ...], fp32: set[str]) -> list[Unit]:
    """The units in the order in which they must be made: layers, then the rest, each before those inside of it.

    fp32: names of parameters that are gathered as they are.

    Raises PlanError for a parameter without dims, or one that does not fit its unit and cannot be parted from it.
    """
    layers = fsdp_layers(model)
    if not layers:
        raise PlanError(f"{type(model).__name__} holds no nn.ModuleList of layers to shard one by one: use fully_shard")
    slots = list(_slots(model, layers, dp_axes=dp_axes, fp32=fp32))
    ends = Counter(slot.parameter for slot in slots)
    units: list[Unit] = []
    for path in (*layers, ""):
        units += _parted(path, [slot for slot in slots if slot.unit == path], ends)
    return units


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    """One place where a parameter is registered."""

    unit: str
    owner: str
    name: str
    parameter: nn.Parameter
    kind: Kind


def _slots(
    model: nn.Module, layers: dict[str, nn.Module], *, dp_axes: tuple[str, ...], fp32: set[str]
) -> Iterator[_Slot]:
    homes = {id(module): path for path, layer in layers.items() for module in layer.modules()}
    for owner, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = joined(owner, own)
            if parameter.ndim == 0:
                raise PlanError(
                    f"parameter {name} has no dims and FSDP shards dim 0: make it a buffer, or a parameter of shape [1]"
                )
            kind = _kind(parameter, dp_axes, fp32=name in fp32)
            yield _Slot(unit=homes.get(id(module), ""), owner=owner, name=name, parameter=parameter, kind=kind)


def _kind(parameter: nn.Parameter, dp_axes: tuple[str, ...], *, fp32: bool) -> Kind:
    names = (parameter.device_mesh.mesh_dim_names or ()) if is_dtensor(parameter) else ()
    taken = tuple(axis for axis in dp_axes if axis in names)
    return Kind(taken=taken, fp32=fp32, dtype=parameter.dtype if parameter.requires_grad else None)


def _parted(path: str, slots: list[_Slot], ends: "Counter[nn.Parameter]") -> Iterator[Unit]:
    """The unit at `path` with most of the slots, then one for each module that holds others."""
    if not slots:  # a model that is nothing but layers: it is what makes them one model all the same
        yield Unit(path=path, kind=Kind(taken=(), fp32=False, dtype=None), parameters=frozenset())
        return
    fits = _hosts(slots)
    sizes = _sizes(slots)
    main = max(fits.values(), key=lambda kind: (not kind.taken, sizes[kind]))
    inner: dict[str, dict[Kind, set[nn.Parameter]]] = {}
    for slot in slots:
        if (kind := fits[slot.kind]) == main:
            continue
        inner.setdefault(slot.owner, {}).setdefault(kind, set()).add(slot.parameter)
        if slot.owner == path:
            raise PlanError(_inseparable(slot, f"the {'layer' if path else 'model'} itself holds it"))
        if len(inner[slot.owner]) > 1:
            raise PlanError(_inseparable(slot, f"{slot.owner} holds others that differ from both"))
        if ends[slot.parameter] > 1:
            raise PlanError(_inseparable(slot, "it is tied to another"))
    apart = {p for kinds in inner.values() for parameters in kinds.values() for p in parameters}
    yield Unit(path=path, kind=main, parameters=frozenset(slot.parameter for slot in slots) - apart)
    for owner, kinds in inner.items():
        for kind, parameters in kinds.items():
            yield Unit(path=owner, kind=kind, parameters=frozenset(parameters))


def _sizes(slots: list[_Slot]) -> Counter[Kind]:
    sizes: Counter[Kind] = Counter()
    for parameter, kind in {slot.parameter: slot.kind for slot in slots}.items():
        sizes[kind] += parameter.numel()
    return sizes


def _hosts(slots: list[_Slot]) -> dict[Kind, Kind]:
    """Each kind with the one that it is gathered with: frozen parameters with trainable ones of any dtype."""
    sizes = _sizes(slots)
    hosts = {}
    for kind in sizes:
        alike = [k for k in sizes if k.dtype is not None and (k.taken, k.fp32) == (kind.taken, kind.fp32)]
        hosts[kind] = kind if kind.dtype is not None else max(alike, key=sizes.__getitem__, default=kind)
    return hosts


def _inseparable(slot: _Slot, why: str) -> str:
    return (
        f"parameter {slot.name} differs in dtype, precision or mesh from most of its FSDP unit and cannot be gathered "
        f"apart from it, since {why}: give all of them one dtype, or leave it out of fp32_parameters"
    )


FP32_PARAMETERS = ("A_log", "e_score_correction_bias")


"""Names that stay in fp32 in every model."""


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
        kept |= {joined(path, name) for name in _matching(module, wanted)}
    return kept


def _matching(module: nn.Module, wanted: set[str]) -> Iterable[str]:
    if not wanted:
        return ()
    tokens = "|".join(map(re.escape, sorted(wanted)))
    pattern = re.compile(rf"(?:^|\.)(?:{tokens})(?:\.|$)")
    return (name for name, _ in module.named_parameters(remove_duplicate=False) if pattern.search(name))


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
