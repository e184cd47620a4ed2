"""A mark in the state dict of a fused weight whose rows are in the order of the ranks.

A checkpoint of the sharded model holds the rows as they lie; it fits a model that is sharded over as many ranks, and no
other. The mark says over how many; a state dict without it (a plain model's, under the same names and shapes) or with
another number is refused. `export_state_dict` puts rows back in order, and has no marks.
"""

from functools import partial
from typing import Any

import torch
from torch import nn

from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.export import MARK


def mark_row_order(module: nn.Module, tp: int) -> None:
    """Mark the module's state dicts, and refuse those without the mark; once."""
    if hasattr(module, MARK):
        return
    module.register_buffer(MARK, torch.tensor(tp))
    module.register_state_dict_post_hook(partial(_write, tp=tp))  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(partial(_check, tp=tp))  # type: ignore[no-untyped-call]


def _write(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: object, *, tp: int) -> None:
    state[prefix + MARK] = torch.tensor(tp)  # the buffer itself may have been emptied


def _check(module: nn.Module, state: dict[str, Any], prefix: str, *_: object, tp: int) -> None:
    if not any(key.startswith(prefix) for key in state):
        return
    mark = state.get(prefix + MARK)
    if mark is None or int(mark) != tp:
        found = "in the order of the unsharded model" if mark is None else f"ordered for tp={int(mark)}"
        raise PlanError(
            f"the rows of {prefix.removesuffix('.')} ({type(module).__name__}) are ordered for tp={tp} and those of "
            f"the state dict are {found}: load weights before sharding, or a checkpoint of the same tp"
        )
