"""How often each collective runs in one forward and one backward of the sharded model, counted as they are issued."""

import copy
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from rl_parallel_plans.structure import text_layers
from rl_parallel_plans.verification.gradients import whole
from rl_parallel_plans.verification.question import Question
from rl_parallel_plans.verification.sharded import shard

NAMESPACES = {"_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d", "_dtensor"}
NO_COLLECTIVES = {"wait_tensor", "barrier", "monitored_barrier_", "_wrap_tensor_autograd"}


def collectives(question: Question, model: nn.Module) -> dict[str, dict[str, int]]:
    """Name of each collective to its number, forward and backward, and how often a layer runs in each. Collective."""
    model = copy.deepcopy(model)
    shard(question, model)
    runs = {"forward": 0, "backward": 0}  # some models run their layers in cycles, not all of them with a gradient

    def ran(_module: nn.Module, _args: object) -> None:
        runs["forward"] += 1
        runs["backward"] += torch.is_grad_enabled()

    ids = torch.arange(32).view(2, 16) + 4
    model(input_ids=ids)  # whatever happens once only
    stack = text_layers(model)
    if stack is not None and len(stack[1]):
        stack[1][0].register_forward_pre_hook(ran)
    with _Counting() as forward:
        loss = whole(model(input_ids=ids).logits).float().logsumexp(-1).sum()
    with _Counting() as backward:
        loss.backward()  # type: ignore[no-untyped-call]
    return {"forward": dict(forward.counts), "backward": dict(backward.counts), "runs": runs}


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: PLR0917
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back as what it does to local tensors
        namespace, _, name = func._schema.name.partition("::")  # noqa: SLF001 - no public one
        if namespace in NAMESPACES and name not in NO_COLLECTIVES:
            self.counts[_named(name)] += 1
        return func(*args, **(kwargs or {}))


def _named(operation: str) -> str:
    """`all_reduce` for the `allreduce_` of process groups and for the `all_reduce_` of functional collectives."""
    name = operation.strip("_")
    for ending in ("_coalesced", "_into_tensor", "_tensor", "_base", "_single"):
        name = name.removesuffix(ending)
    return name.replace("allreduce", "all_reduce").replace("allgather", "all_gather").replace("alltoall", "all_to_all")
