"""Shard a model over ranks by a plan that can be read, checked and refused, and train with what is left on each rank.

Knows module names, shapes, placements and torch's DTensor and FSDP2. Knows no model code: Hugging Face models are
recognised by their parts. Importing it imports nothing beyond torch; each name loads its module when first used.
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

_HOMES = {
    "Box": "checkpoints",
    "MemoryReport": "forecast.report",
    "NamedShard": "checkpoints",
    "ParallelPlan": "plan.parallel_plan",
    "Pipeline": "pipeline.schedule",
    "PlanError": "errors",
    "ReplicatedParallel": "styles",
    "StageInfo": "pipeline.stages",
    "TopKLogp": "logp",
    "VerifyReport": "verification.report",
    "apply_activation_checkpointing": "sharding.activation_checkpointing",
    "apply_context_parallel": "context_parallel.apply",
    "apply_expert_parallel": "sharding.parallelize",
    "apply_fsdp": "sharding.fsdp",
    "apply_tensor_parallel": "sharding.parallelize",
    "as_html": "explain.page",
    "assert_plan_is_exact": "verification.api",
    "as_json": "explain.document",
    "check_context_parallel": "context_parallel.apply",
    "clip_grad_by_total_norm_": "sharding.grad_norm",
    "export_state_dict": "checkpoints",
    "get_grad_norm": "sharding.grad_norm",
    "get_hf_tp_plan": "hugging_face",
    "get_logprobs_from_vocab_parallel_logits": "logp",
    "linear_logp": "logp",
    "local_boxes": "checkpoints",
    "logp_of_token_ids": "logp",
    "memory": "forecast.memory",
    "memory_table": "forecast.report",
    "named_shards": "checkpoints",
    "parallelize": "sharding.parallelize",
    "pipeline_stages": "pipeline.schedule",
    "plan_for": "plan.parallel_plan",
    "qualified_name": "plan.registry",
    "register_plan": "plan.registry",
    "sequence_positions": "context_parallel.layout",
    "shard_sequence": "context_parallel.layout",
    "split_stages": "pipeline.stages",
    "stage_info": "pipeline.stages",
    "to_local_if_dtensor": "dtensor",
    "top_k_logp": "logp",
    "top_k_logp_from_logits": "logp",
    "translate_parallel_style": "hugging_face",
    "unshard_sequence": "context_parallel.layout",
    "verify": "verification.api",
}

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
