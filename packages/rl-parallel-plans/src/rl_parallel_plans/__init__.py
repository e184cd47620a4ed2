"""Shard a model over ranks by a plan that can be read, checked and refused, and train with what is left on each rank.

Built on torch's DTensor and FSDP2. Hugging Face models are recognised by their parts, not by their code. Importing this
package imports nothing beyond torch; each name loads its module when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_parallel_plans.checkpoints import Box, NamedShard, export_state_dict, local_boxes, named_shards
    from rl_parallel_plans.context_parallel.apply import apply_context_parallel, check_context_parallel
    from rl_parallel_plans.context_parallel.layout import sequence_positions, shard_sequence, unshard_sequence
    from rl_parallel_plans.dtensor import to_local_if_dtensor
    from rl_parallel_plans.errors import PlanError
    from rl_parallel_plans.explain.document import as_json
    from rl_parallel_plans.explain.page import as_html
    from rl_parallel_plans.forecast.memory import memory
    from rl_parallel_plans.forecast.report import MemoryReport, memory_table
    from rl_parallel_plans.hugging_face import get_hf_tp_plan, translate_parallel_style
    from rl_parallel_plans.logp import (
        TopKLogp,
        get_logprobs_from_vocab_parallel_logits,
        linear_logp,
        logp_of_token_ids,
        top_k_logp,
        top_k_logp_from_logits,
    )
    from rl_parallel_plans.pipeline.schedule import Pipeline, pipeline_stages
    from rl_parallel_plans.pipeline.stages import StageInfo, split_stages, stage_info
    from rl_parallel_plans.plan.parallel_plan import ParallelPlan, plan_for
    from rl_parallel_plans.plan.registry import qualified_name, register_plan
    from rl_parallel_plans.sharding.activation_checkpointing import apply_activation_checkpointing
    from rl_parallel_plans.sharding.fsdp import apply_fsdp
    from rl_parallel_plans.sharding.grad_norm import clip_grad_by_total_norm_, get_grad_norm
    from rl_parallel_plans.sharding.parallelize import apply_expert_parallel, apply_tensor_parallel, parallelize
    from rl_parallel_plans.styles import ReplicatedParallel
    from rl_parallel_plans.verification.api import assert_plan_is_exact, verify
    from rl_parallel_plans.verification.report import VerifyReport

_NAMES = {
    "checkpoints": "Box export_state_dict local_boxes named_shards NamedShard",
    "context_parallel.apply": "apply_context_parallel check_context_parallel",
    "context_parallel.layout": "sequence_positions shard_sequence unshard_sequence",
    "dtensor": "to_local_if_dtensor",
    "errors": "PlanError",
    "explain.document": "as_json",
    "explain.page": "as_html",
    "forecast.memory": "memory",
    "forecast.report": "memory_table MemoryReport",
    "hugging_face": "get_hf_tp_plan translate_parallel_style",
    "logp": (
        "get_logprobs_from_vocab_parallel_logits linear_logp logp_of_token_ids "
        "top_k_logp top_k_logp_from_logits TopKLogp"
    ),
    "pipeline.schedule": "Pipeline pipeline_stages",
    "pipeline.stages": "split_stages stage_info StageInfo",
    "plan.parallel_plan": "ParallelPlan plan_for",
    "plan.registry": "qualified_name register_plan",
    "sharding.activation_checkpointing": "apply_activation_checkpointing",
    "sharding.fsdp": "apply_fsdp",
    "sharding.grad_norm": "clip_grad_by_total_norm_ get_grad_norm",
    "sharding.parallelize": "apply_expert_parallel apply_tensor_parallel parallelize",
    "styles": "ReplicatedParallel",
    "verification.api": "assert_plan_is_exact verify",
    "verification.report": "VerifyReport",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "Box",
    "MemoryReport",
    "NamedShard",
    "ParallelPlan",
    "Pipeline",
    "PlanError",
    "ReplicatedParallel",
    "StageInfo",
    "TopKLogp",
    "VerifyReport",
    "apply_activation_checkpointing",
    "apply_context_parallel",
    "apply_expert_parallel",
    "apply_fsdp",
    "apply_tensor_parallel",
    "as_html",
    "as_json",
    "assert_plan_is_exact",
    "check_context_parallel",
    "clip_grad_by_total_norm_",
    "export_state_dict",
    "get_grad_norm",
    "get_hf_tp_plan",
    "get_logprobs_from_vocab_parallel_logits",
    "linear_logp",
    "local_boxes",
    "logp_of_token_ids",
    "memory",
    "memory_table",
    "named_shards",
    "parallelize",
    "pipeline_stages",
    "plan_for",
    "qualified_name",
    "register_plan",
    "sequence_positions",
    "shard_sequence",
    "split_stages",
    "stage_info",
    "to_local_if_dtensor",
    "top_k_logp",
    "top_k_logp_from_logits",
    "translate_parallel_style",
    "unshard_sequence",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value  # found without this function from now on
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
