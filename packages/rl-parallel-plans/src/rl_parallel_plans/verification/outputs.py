"""The first module whose output is wrong: every module's output beside that of the unsharded model's."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rl_parallel_plans.verification.gradients import whole
from rl_parallel_plans.verification.question import Question
from rl_parallel_plans.verification.sharded import shard
from rl_parallel_plans.verification.subject import Batch, forward, relative_error

WRONG = 1e-4


@torch.no_grad()
def differing_outputs(question: Question, model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Names of modules with a wrong output, in the order in which they ran. Collective.

    Outputs that are one rank's part (of the heads, of the sum) cannot be compared, and are passed over.
    """
    sharded = copy.deepcopy(model)
    ids, mask = batch.ids[0], batch.masks[0]
    with _recorded(model) as truth:
        forward(model, ids, mask)
    mesh = shard(question, sharded)
    dp_rank = mesh.get_local_rank("dp") if question.dp > 1 else 0
    mine = [None if value is None else value.chunk(question.dp)[dp_rank] for value in (ids, mask)]
    with _recorded(sharded) as found:
        forward(sharded, mine[0], mine[1])  # type: ignore[arg-type]
    wrong, passed = [], []
    for name, output in found.items():
        true = truth.get(name)
        if true is None:
            continue
        true = true.chunk(question.dp)[dp_rank] if len(true) == len(ids) else true
        if output.shape != true.shape:
            passed.append(name)
        elif (error := relative_error(output, true)) > WRONG:
            wrong.append((name, error))
    return {"wrong": wrong[:6], "passed": len(passed)}


@contextmanager
def _recorded(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    outputs: dict[str, Tensor] = {}

    def hook(name: str) -> Any:
        def keep(_module: nn.Module, _arguments: object, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple | list) and output else output
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and name not in outputs:
                outputs[name] = whole(tensor.detach()).clone()

        return keep

    handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules() if name]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
