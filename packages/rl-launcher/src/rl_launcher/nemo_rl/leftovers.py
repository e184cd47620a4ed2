"""Their keys that no rule has taken: those that change nothing here, by name, and all others, which are told.

The reasons are by the beginning of a key; the longest that fits counts. Of a section that holds what changes a run
beside what does not, only keys of `known` are dropped.
"""

from typing import Any

from rl_launcher.nemo_rl.known import BY_NAME
from rl_launcher.nemo_rl.notes import Kind
from rl_launcher.nemo_rl.source import Source

__all__ = ["account"]

SPEED = "what is computed is the same; how fast is the backend's own affair"
ONCE = "it is Megatron's own, and the backend decides it"
LOG = "the log, the report and the trace are always there, in the run directory"
ALWAYS = "a run is always evaluated before and after"
ENGINE = "the engine's own affair here"
DROPPED = {
    "policy.dtensor_cfg._v2": "there is one backend of PyTorch's parallelism",
    "policy.dtensor_cfg": SPEED,
    "policy.dtensor_cfg.automodel_kwargs.backend": SPEED,
    "policy.megatron_cfg": ONCE,
    "policy.logprob_batch_size": "log-probabilities are taken by the microbatches of training",
    "policy.logprob_chunk_size": "logits are never whole here",
    "policy.generation_batch_size": ENGINE,
    "policy.make_sequence_length_divisible_by": "padding is the backend's own affair",
    "policy.offload_optimizer_for_logprob": "what moves to the host is decided by policy.generation.colocated",
    "policy.refit_buffer_size_gb": "buckets are policy.refit.bucket_bytes",
    "policy.dynamic_batching": "of microbatches only their bound is ours",
    "policy.sequence_packing": "of microbatches only their bound is ours",
    "policy.tokenizer.use_fastokens": SPEED,
    "policy.max_total_sequence_length": "bounded by policy.generation and by the microbatches",
    "policy.generation.vllm_cfg": ENGINE,
    "policy.generation.mcore_generation_config": "of another engine",
    "policy.generation.sglang_cfg": "of another engine",
    "policy.generation.sglang_kwargs": "of another engine",
    "policy.generation.trtllm_cfg": "of another engine",
    "policy.generation.trtllm_kwargs": "of another engine",
    "policy.generation.dynamo_cfg": "of another engine",
    "policy.generation.colocated": "of separate engines, and they share the trainer's GPUs",
    "policy.generation.refit_cfg": "of another way to refit",
    "policy.generation.refit_transport": "the way is chosen from where the parties are",
    "policy.generation.real_quant_export_cpu_offload": "engines are not quantised here",
    "policy.generation.port_range_high": "ports are the system's to give",
    "policy.generation.port_range_low": "ports are the system's to give",
    "policy.generation.model_name": "the policy's",
    "checkpointing": "a checkpoint is one format, and every run directory ends with a Hugging Face folder",
    "logger": LOG,
    "cluster": "ports are the system's to give, and places Ray's",
    "data": "reading and cutting are the data's own affair here",
    "env.math": "the judge runs beside the loop",
    "teacher": "the teacher is sharded and computed as the policy is",
    "data_plane": "rollouts go straight from engine to trainer",
    "reward_penalties": "write it into the reward",
}
EVALUATED = (
    "val_at_start",
    "val_at_end",
    "val_batch_size",
    "val_batches",
    "val_global_batch_size",
    "val_micro_batch_size",
    "val_start_at",
)
NEEDED = {
    "policy.draft": "drafts of the policy are not trained here",
    "policy.hf_config_overrides": "save the model with its configuration as it is to be",
    "policy.router_replay": "experts are routed anew in training",
    "policy.quant_cfg": "weights are not quantised here",
    "policy.megatron_cfg.fp8_cfg": "training is in float32 or bfloat16",
    "policy.megatron_cfg.mtp_num_layers": "further heads are not trained here",
    "policy.megatron_cfg.num_layers_in_first_pipeline_stage": "stages have equally many layers",
    "policy.megatron_cfg.num_layers_in_last_pipeline_stage": "stages have equally many layers",
    "policy.megatron_cfg.moe_router_load_balancing_type": "the router trains as the model's configuration says",
    "policy.megatron_cfg.freeze_moe_router": "the router trains with the rest",
    "policy.megatron_cfg.model_overrides": "save the model with its configuration as it is to be",
    "policy.dtensor_cfg.automodel_kwargs": "the model is transformers' own",
    "on_policy_distillation": "a recipe has one teacher: the stage distill",
    "async_rl": "rollouts under way are bounded by grpo.async_grpo",
    "env": "environments are Python: name a function by env.reward, or a class by env.environment",
    "loss_fn": "our loss has no such term",
    "grpo": "our loop has no such thing",
    "sft": "our loop has no such thing",
    "dpo": "our loop has no such thing",
    "distillation": "our loop has no such thing",
}
# Noted once, however many keys they hold.
WHOLE = (
    "policy.dtensor_cfg.automodel_kwargs.freeze_config",
    "policy.megatron_cfg.fp8_cfg",
    "policy.megatron_cfg.model_overrides",
    "policy.hf_config_overrides",
    "policy.draft",
    "policy.router_replay",
    "grpo.reward_scaling",
    "on_policy_distillation",
    "async_rl",
    "teacher",
)
UNKNOWN = "no rule of the translation knows this key"
OFF = "it is off in the file"


def account(source: Source) -> None:
    """Give every key that is left a reason: off, dropped by name, or untranslated."""
    for key, value in [*source.left()]:
        if any(note.key == _noted(key) for note in source.notes):
            continue  # as the section that it is in
        if _is_off(source, key, value):
            source.note("dropped", key, OFF, value=value)
        elif key.rpartition(".")[2] in EVALUATED:
            source.note("dropped", key, ALWAYS, value=value)
        elif reason := _longest(NEEDED, DROPPED, key):
            kind: Kind = "untranslated" if reason in NEEDED.values() else "dropped"
            source.note(kind, _noted(key), reason, value=source.peek(_noted(key)))
        else:
            source.note("untranslated", key, UNKNOWN, value=value)


def _noted(key: str) -> str:
    return next((section for section in WHOLE if key.startswith(f"{section}.")), key)


def _longest(needed: dict[str, str], dropped: dict[str, str], key: str) -> str:
    table = {**dropped, **needed}
    section = max((name for name in table if key == name or key.startswith(f"{name}.")), key=len, default="")
    if section in BY_NAME and not _is_known(key.removeprefix(section).removeprefix("."), BY_NAME[section]):
        return ""
    return table.get(section, "")


def _is_known(rest: str, names: frozenset[str]) -> bool:
    """Whether what follows a section's name is a key of the list, or below one."""
    return not rest or any(rest == name or rest.startswith(f"{name}.") for name in names)


def _is_off(source: Source, key: str, value: Any) -> bool:
    if value in (None, False, 0, "", "none", "None", [], {}):
        return True
    names = key.split(".")
    sections = (".".join(names[:end]) for end in range(1, len(names)))
    return any(source.peek(f"{section}.enabled") is False for section in sections)
