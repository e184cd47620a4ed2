"""Gradients that each rank holds one term of, completed by one all-reduce at the end of each backward.

Autograd leaves such a gradient as DTensor(Partial). All of one backward are flattened together, summed over the mesh
and put back as whole DTensors, so that `.grad` is right whenever nobody is in the middle of a backward. What had been
accumulated before is set aside meanwhile: beside it, DTensor would sum each gradient by itself. Under FSDP2 the
parameters here are not the registered ones: FSDP completes theirs.
"""

import itertools
import threading
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.tensor import DTensor, Replicate

from rl_parallel_plans.dtensor import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_lock = threading.Lock()
_pending: dict[int, dict[int, Tensor]] = {}
"""Parameters by their number, by the backward that has reached them."""
ASIDE = "gradient_set_aside"
"""Attribute of a parameter: its whole gradient of earlier backwards, while a backward adds to it."""


_numbers = itertools.count()
"""All ranks apply one plan, in one order, and so number its parameters alike: the order of the sum."""
REGISTRY = "partial_gradients"
"""Entry of a module's __dict__: names of its parameters with a Partial gradient, with their numbers."""


def sum_gradient_of(module: nn.Module, name: str) -> None:
    """Complete the Partial gradient of `module`'s parameter `name` at the end of every backward that reaches it."""
    module.__dict__.setdefault(REGISTRY, {})[name] = next(_numbers)
    complete_gradients(module)


def complete_gradients(module: nn.Module) -> None:
    """Hook the module's parameters with a Partial gradient; those that are hooked already are left alone."""
    for name, number in module.__dict__.get(REGISTRY, {}).items():
        parameter = module._parameters.get(name)  # noqa: SLF001 - without what hides it in forward
        if parameter is not None and is_dtensor(parameter):
            _complete_after_backward(parameter, number)


def _complete_after_backward(parameter: Tensor, number: int) -> None:
    if parameter.__dict__.get("completed") == id(parameter):
        return
    parameter.__dict__["completed"] = id(parameter)
    trains = parameter.requires_grad
    parameter.requires_grad_()  # a frozen one takes no hook, and may thaw
    parameter.register_hook(lambda gradient: _set_aside(parameter, gradient))  # type: ignore[no-untyped-call]
    hooks = parameter._post_accumulate_grad_hooks  # noqa: SLF001 - no public one
    if hooks:
        # `to_empty` has put another tensor into this object, which its hooks, and those of others, do not reach: the
        # same dict, assigned anew, does. Its handles still remove them.
        for key in [key for key, hook in hooks.items() if getattr(hook, "func", None) is _note]:
            del hooks[key]
        parameter._post_accumulate_grad_hooks = hooks  # noqa: SLF001 - as above
    parameter.register_post_accumulate_grad_hook(partial(_note, number=number))  # type: ignore[no-untyped-call]
    parameter.requires_grad_(trains)


def _set_aside(parameter: Tensor, gradient: Tensor) -> None:
    before = parameter.grad
    if before is None or not is_dtensor(before) or not is_dtensor(gradient):
        return
    if gradient.placements[-1].is_partial() and before.placements[-1].is_replicate():
        parameter.__dict__[ASIDE], parameter.grad = before, None


def _note(reached: Tensor, *, number: int) -> None:
    gradient = reached.grad
    if gradient is None or not is_dtensor(gradient) or not gradient.placements[-1].is_partial():
        return
    backward = torch._C._current_graph_task_id()  # noqa: SLF001 - no public one
    with _lock:
        if backward not in _pending:
            _pending[backward] = {}
            Variable._execution_engine.queue_callback(lambda: _complete(backward))  # noqa: SLF001 - no public one
        _pending[backward][number] = reached


def _complete(backward: int) -> None:
    with _lock:
        reached = _pending.pop(backward, {})
    groups: dict[tuple[DeviceMesh, torch.dtype, torch.device], list[Tensor]] = {}
    for _, parameter in sorted(reached.items()):
        gradient = parameter.grad
        if gradient is not None and is_dtensor(gradient) and gradient.placements[-1].is_partial():  # not FSDP's already
            groups.setdefault((gradient.device_mesh, gradient.dtype, gradient.device), []).append(parameter)
    for (mesh, _, _), parameters in groups.items():
        _sum_over(mesh, parameters)


@torch.no_grad()
def _sum_over(mesh: "DeviceMesh", parameters: Iterable[Tensor]) -> None:
    gradients = [parameter.grad.to_local() for parameter in parameters]  # type: ignore[union-attr]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat, group=mesh.get_group(mesh.ndim - 1))
    pieces = flat.split([gradient.numel() for gradient in gradients])  # type: ignore[no-untyped-call]
    for parameter, gradient, piece in zip(parameters, gradients, pieces, strict=True):
        placed = parameter.grad
        assert placed is not None
        assert is_dtensor(placed)
        whole = DTensor.from_local(
            piece.view_as(gradient),
            mesh,
            [*placed.placements[:-1], Replicate()],
            run_check=False,
            shape=placed.shape,
            stride=placed.stride(),
        )
        before = parameter.__dict__.pop(ASIDE, None)
        parameter.grad = whole if before is None else whole + before
