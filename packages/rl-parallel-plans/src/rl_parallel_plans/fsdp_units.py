"""Which parameters FSDP gathers together, and over which mesh, decided before anything is sharded.

A unit gathers its parameters in one collective, in one dtype and over one mesh. What of a layer does not fit the most
of it becomes a small unit of its own inside of the layer: the module that holds it, for these parameters only. Knows
names, dtypes and placements; calls no FSDP.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from rl_parallel_plans.dtensor import is_dtensor
from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.layer_stacks import fsdp_layers
from rl_parallel_plans.structure import joined


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
