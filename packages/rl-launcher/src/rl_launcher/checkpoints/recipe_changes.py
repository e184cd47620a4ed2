"""Which keys of a recipe may change when a run is resumed: where and how it runs, but not what it learns."""

import fnmatch
from typing import Any

from rl_launcher.errors import Refusal

MAY_CHANGE = (
    "cluster.*",
    "logger.*",
    "checkpointing.*",
    "health.*",
    "evaluation.every",
    "evaluation.samples",
    "policy.dtensor_cfg.*_parallel_size",
    "policy.dtensor_cfg.data_parallel_replicate_size",
    "policy.dtensor_cfg.sequence_parallel",
    "policy.dtensor_cfg.cpu_offload",
    "policy.dtensor_cfg.timeout_s",
    "policy.megatron_cfg.*_parallel_size",
    "policy.megatron_cfg.sequence_parallel",
    "policy.megatron_cfg.num_layers_in_*_pipeline_stage",
    "policy.megatron_cfg.pipeline_model_parallel_layout",
    "policy.megatron_cfg.overlap_*",
    "policy.megatron_cfg.*fusion",
    "policy.megatron_cfg.transformer_impl",
    "policy.megatron_cfg.timeout_s",
    "policy.generation.colocated.*",
    "policy.generation.remote",
    "policy.generation.remote.*",
    "policy.generation.max_restarts",
    "policy.generation.vllm_cfg.gpu_memory_utilization",
    "policy.generation.vllm_cfg.tensor_parallel_size",
    "policy.refit.*",
)
"""Patterns of dotted keys. Another number of ranks adds in another order, so figures then differ by rounding."""


def changed_keys(before: Any, after: Any, *, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Return the leaves in which two plain recipes differ, as key -> (before, after).

    >>> changed_keys({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}})
    {'a.c': (2, 3)}
    """
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return {} if before == after else {prefix: (before, after)}
    found: dict[str, tuple[Any, Any]] = {}
    for name in {**before, **after}:
        inner = f"{prefix}.{name}" if prefix else str(name)
        found |= changed_keys(before.get(name), after.get(name), prefix=inner)
    return found


def check_changes(changes: dict[str, tuple[Any, Any]]) -> None:
    """Refuse to resume with changes that would make it another run.

    Raises:
        Refusal: with every key that must stay, and those that may change.
    """
    fixed = [key for key in changes if not any(fnmatch.fnmatchcase(key, pattern) for pattern in MAY_CHANGE)]
    if fixed:
        changed = ", ".join(f"{key} ({changes[key][0]!r} -> {changes[key][1]!r})" for key in fixed)
        raise Refusal(
            f"{changed} cannot change when a run is resumed: its curve would be another's. Leave it out, or start a "
            f"new run from the weights (rl-launcher export, then policy.model_name). These keys may change: "
            f"{', '.join(MAY_CHANGE)}"
        )
