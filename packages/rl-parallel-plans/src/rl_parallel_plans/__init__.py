"""Shard a model over ranks by a plan that can be read, checked and refused, and train with what is left on each rank.

Knows module names, shapes, placements and torch's DTensor and FSDP2. Knows no model code: Hugging Face models are
recognised by their parts. Importing it imports nothing beyond torch; each name loads its module when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_parallel_plans.apply import apply_fsdp, apply_tensor_parallel, parallelize
    from rl_parallel_plans.dtensor import to_local_if_dtensor
    from rl_parallel_plans.errors import PlanError
    from rl_parallel_plans.grad_norm import clip_grad_by_total_norm_, get_grad_norm
    from rl_parallel_plans.hugging_face import get_hf_tp_plan, translate_parallel_style
    from rl_parallel_plans.logp import get_logprobs_from_vocab_parallel_logits, linear_logp
    from rl_parallel_plans.lookup import plan_for
    from rl_parallel_plans.plan import ParallelPlan
    from rl_parallel_plans.registry import qualified_name, register_plan
    from rl_parallel_plans.styles import ReplicatedParallel

_HOMES = {
    "ParallelPlan": "plan",
    "PlanError": "errors",
    "ReplicatedParallel": "styles",
    "apply_fsdp": "apply",
    "apply_tensor_parallel": "apply",
    "clip_grad_by_total_norm_": "grad_norm",
    "get_grad_norm": "grad_norm",
    "get_hf_tp_plan": "hugging_face",
    "get_logprobs_from_vocab_parallel_logits": "logp",
    "linear_logp": "logp",
    "parallelize": "apply",
    "plan_for": "lookup",
    "qualified_name": "registry",
    "register_plan": "registry",
    "to_local_if_dtensor": "dtensor",
    "translate_parallel_style": "hugging_face",
}

__all__ = [
    "ParallelPlan",
    "PlanError",
    "ReplicatedParallel",
    "apply_fsdp",
    "apply_tensor_parallel",
    "clip_grad_by_total_norm_",
    "get_grad_norm",
    "get_hf_tp_plan",
    "get_logprobs_from_vocab_parallel_logits",
    "linear_logp",
    "parallelize",
    "plan_for",
    "qualified_name",
    "register_plan",
    "to_local_if_dtensor",
    "translate_parallel_style",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value  # found without this function from now on
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
