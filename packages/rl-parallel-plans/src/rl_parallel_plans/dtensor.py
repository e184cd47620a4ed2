"""Checks for DTensors that do not import DTensor, and one-axis meshes.

`torch.distributed.tensor` takes half a second to import, and a tensor cannot be a DTensor before somebody has imported
it: a plain single-process program never pays for it.
"""

import os
import sys
from typing import TYPE_CHECKING, TypeGuard
from weakref import ReferenceType, ref

from rl_parallel_plans.errors import PlanError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: "Tensor") -> "TypeGuard[DTensor]":
    """Whether `tensor` is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def has_numbers(tensor: "Tensor") -> bool:
    """False on the meta device and for torch's fake tensors, which say that they lie on a real one."""
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    return tensor.device.type != "meta" and (fake is None or not isinstance(tensor, fake.FakeTensor))


def to_local_if_dtensor(tensor: "Tensor") -> "Tensor":
    """This rank's piece of a DTensor; any other tensor as it is. Differentiable, moves no data."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def submesh(mesh: "DeviceMesh", axis: str) -> "DeviceMesh":
    """The one-axis mesh named `axis`; PlanError where `mesh` has no such axis."""
    if not hasattr(mesh, "mesh_dim_names"):
        raise PlanError(f"mesh is a {type(mesh).__name__}: make one with torch.distributed.init_device_mesh")
    names = mesh.mesh_dim_names or ()
    if axis not in names:
        raise PlanError(
            f"the mesh has no axis {axis!r}: its axes are {list(names)} and its shape {tuple(mesh.shape)}; make it "
            f'with init_device_mesh(device, shape, mesh_dim_names=(..., "{axis}")), where an axis of one rank is well, '
            "or pass the name that it has"
        )
    return _one_of_equals(mesh[axis])


_kept: "dict[DeviceMesh, tuple[DeviceMesh, ReferenceType[ProcessGroup]]]" = {}


def _one_of_equals(mesh: "DeviceMesh") -> "DeviceMesh":
    """The first mesh that was equal to this one, for as long as its process group is registered.

    DTensor caches the layout of what an operation returns by equality of meshes, so that a model's results can lie on
    the equal mesh of a model before it (slicing a mesh makes another object each time). AOTAutograd (torch 2.13) tells
    meshes apart by identity, finds the mesh of such a result only among the tangents, and fails on a compiled layer:
    `Node tangents_2 was invalid, but is output`.

    The first mesh is held, though its model may be gone. Equal meshes can have different groups of the same ranks, and
    when Python frees a mesh differs from rank to rank: without holding it, one rank would send over the old group what
    another awaits from the new one.
    """
    _forget_unregistered()
    return _kept.setdefault(mesh, (mesh, ref(mesh.get_group())))[0]


def _forget_unregistered() -> None:
    """Let go of meshes whose process group was destroyed."""
    for mesh, (_, group) in list(_kept.items()):
        try:
            registered = mesh.get_group() is group()  # by name: another one after a new init_process_group
        except (RuntimeError, ValueError):
            registered = False
        if not registered:
            del _kept[mesh]


# A destroyed group that is freed in a forked process waits there for threads of its parent.
os.register_at_fork(before=_forget_unregistered)
