"""Which storages are parameters that FSDP has gathered, and their gradients, while a model runs under a tracker."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from rl_parallel_plans.forecast import tracker as kinds
from rl_parallel_plans.forecast.tracker import MemoryTracker
from rl_parallel_plans.structure import output_head


@contextmanager
def gathered_labels(tracker: MemoryTracker, model: nn.Module) -> Iterator[None]:
    """While active, tell gathered parameters and their gradients from what else a forward and a backward make.

    Each module is asked when it runs, and the lm_head whenever any does, since `linear_logp` reads it without a call.
    """
    path = output_head(model)
    head = [] if path is None else [model.get_submodule(path)]
    seen: set[int] = set()

    def running(module: nn.Module, _: object) -> None:
        for owner in (module, *head):
            parameters = [parameter for parameter in owner.parameters(recurse=False) if parameter.is_leaf]
            tracker.label(parameters, kinds.UNSHARDED_PARAMETERS, unless=kinds.PARAMETERS)
            for parameter in parameters:
                if id(parameter) not in seen and parameter.requires_grad:
                    seen.add(id(parameter))
                    parameter.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]

    def accumulated(parameter: Tensor) -> None:
        if parameter.grad is not None:
            tracker.label([parameter.grad], kinds.UNSHARDED_GRADIENTS)

    owners = [module for module in model.modules() if next(module.parameters(recurse=False), None) is not None]
    handles = [owner.register_forward_pre_hook(running) for owner in owners]
    yield
    for handle in handles:
        handle.remove()
