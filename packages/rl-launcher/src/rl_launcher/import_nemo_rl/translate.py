"""Translate one NeMo-RL recipe; every key is accounted for.

A name stands for all below it. It knows no values, and no reasons.

The reasons are by the beginning of a key; the longest that fits counts. Of a section that holds what changes a run
beside what does not, only keys of `known` are dropped.

    file -> what it inherits -> ${…} worked out -> rules, section by section -> what no rule took, with reasons

The recipe is held against our schema before it is returned. It does not write files.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_launcher.import_nemo_rl import algorithm as grpo
from rl_launcher.import_nemo_rl import data_and_cluster as surroundings
from rl_launcher.import_nemo_rl import policy
from rl_launcher.import_nemo_rl import policy as generation
from rl_launcher.import_nemo_rl.read import Kind, NemoRLError, Note, Source, interpolate, read
from rl_launcher.recipe_files.yaml_source import dump

__all__ = ["BY_NAME", "Translation", "account", "translate"]

BY_NAME: dict[str, frozenset[str]] = {
    section: frozenset(names.split())
    for section, names in {
        "policy.dtensor_cfg": """
            _v2 activation_checkpointing automodel_kwargs clear_cache_every_n_steps context_parallel_size cpu_offload
            custom_parallel_plan dp_replicate_size env_vars expert_parallel_size moe_parallelizer.ignore_router_for_ac
            sequence_parallel tensor_parallel_size
        """,
        "policy.megatron_cfg": """
            activation_checkpointing apply_rope_fusion attention_backend bias_activation_fusion
            calculate_per_token_loss checkpoint clear_memory_caches_before_refit context_parallel_size converter_type
            cp_normalize cuda_graph_impl cuda_graph_modules cuda_graph_warmup_steps defer_fp32_logits
            distributed_data_parallel_config do_not_average_loss empty_unused_memory_level env_vars
            expert_model_parallel_size expert_tensor_parallel_size fine_grained_activation_offloading
            first_last_layers_bf16 force_reconvert_from_hf fused_linear_logprobs_chunk_size
            gradient_accumulation_fusion moe_enable_deepep moe_flex_dispatcher_backend moe_grouped_gemm
            moe_hybridep_num_sms moe_per_layer_logging moe_permute_fusion moe_router_dtype moe_shared_expert_overlap
            moe_token_dispatcher_type mtp_detach_heads mtp_loss_scaling_factor mtp_use_repeated_layer
            num_layers_at_end_in_bf16 num_layers_at_start_in_bf16 offload_modules optimizer.bf16 optimizer.fp16
            optimizer.optimizer_cpu_offload optimizer.optimizer_offload_fraction
            optimizer.overlap_cpu_optimizer_d2h_h2d optimizer.params_dtype optimizer.sgd_momentum
            optimizer.use_distributed_optimizer optimizer.use_precision_aware_optimizer pipeline_dtype
            pipeline_model_parallel_size radio_force_cpe_eval_mode recompute_granularity recompute_modules
            scale_loss_by_dp_cp_size scheduler.lr_decay_iters scheduler.override_opt_param_scheduler
            scheduler.weight_decay_incr_style sequence_parallel tensor_model_parallel_size track_moe_metrics
            train_iters use_fused_linear_logprobs use_fused_weighted_squared_relu use_gloo_process_groups
        """,
        "policy.generation.vllm_cfg": """
            async_engine cap_max_tokens_to_context distributed_executor_backend enable_expert_parallel
            enable_prefix_caching enable_thinking enable_vllm_metrics_logger enforce_eager enforce_monotonicity
            env_vars expert_parallel_size expose_http_server gpu_memory_utilization http_refit_api_key_env_var
            http_refit_server_port http_server_serving_chat_kwargs is_mx kv_cache_dtype limit_mm_per_prompt load_format
            logprobs_mode max_model_len max_num_seqs num_first_layers_in_bf16 num_last_layers_in_bf16
            pipeline_parallel_size precision quantization_ignored_layer_kws reasoning_parser_plugin
            reset_encoder_cache_after_weight_update skip_tokenizer_init tensor_parallel_size use_deep_gemm use_tqdm
            video vllm_metrics_logger_interval zmq_refit_server_port
        """,
        "policy.generation.colocated": "resources.gpus_per_node resources.num_nodes",
        "policy.dynamic_batching": "logprob_mb_tokens sequence_length_round train_mb_tokens",
        "policy.sequence_packing": """
            algorithm fuse_loss logprob_mb_tokens microbatch_order sequence_length_round train_mb_tokens
        """,
        "checkpointing": """
            checkpoint_must_save_by ft_save_period higher_is_better keep_top_k metric_name model_save_format
            save_consolidated save_optimizer save_period
        """,
        "logger": """
            gpu_monitoring log_dir mlflow monitor_gpus num_val_samples_to_print swanlab tensorboard wandb
        """,
        "cluster": "master_port_range_high master_port_range_low segment_size",
        "data": """
            add_bos add_eos add_generation_prompt add_system_prompt custom_dataloader default.env_name
            default.processor default.video_maintain_aspect_ratio default.video_target_num_patches
            max_input_seq_length num_prompts_per_dataloader num_workers train.allowed_problem_types
            train.download_dir train.max_samples use_multiple_dataloader validation
        """,
        "env.math": "num_workers",
    }.items()
}
"""By section, the keys below it of which the section's reason is true."""


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


ALGORITHMS = ("grpo", "sft", "dpo", "distillation")
HEADINGS: dict[Kind, str] = {
    "fill_in": "to fill in, or to check",
    "untranslated": "not translated: the run differs from theirs in",
    "dropped": "without meaning here",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """A recipe, and what became of every key that is not in it."""

    source: Path
    """The file that was translated."""

    recipe: dict[str, Any]
    """Ours, as plain data."""

    notes: tuple[Note, ...]
    """What is to fill in, what is not translated, what means nothing here."""

    problems: tuple[str, ...]
    """What our schema refuses of it; none where it is valid."""

    def of(self, kind: Kind) -> tuple[Note, ...]:
        """Return the notes of one kind."""
        return tuple(note for note in self.notes if note.kind == kind)

    @property
    def yaml(self) -> str:
        """The recipe as a file, headed by what is to be done about it."""
        lines = [f"# Translated from {self.source.name} of NeMo-RL by `rl-launcher import-nemo-rl`."]
        for kind in ("fill_in", "untranslated"):
            if notes := self.of(kind):
                lines += ["#", f"# {HEADINGS[kind].capitalize()}:", *(f"#   {_line(note)}" for note in notes)]
        return "\n".join(lines) + "\n" + dump(self.recipe)

    def report(self, *, verbose: bool = False) -> str:
        """Return what became of their keys; those without meaning only counted, unless `verbose`."""
        lines = []
        for kind, heading in HEADINGS.items():
            notes = self.of(kind)
            lines.append(f"{len(notes)} {heading}" + (":" if notes and (verbose or kind != "dropped") else ""))
            if verbose or kind != "dropped":
                lines += [f"  {_line(note)}" for note in notes]
        if self.problems:
            lines += [f"{len(self.problems)} refused by our schema:", *(f"  {problem}" for problem in self.problems)]
        return "\n".join(lines)


def translate(file: str | Path) -> Translation:
    """Translate one file.

    Raises:
        NemoRLError: it cannot be read, or is of an algorithm that has no stage here.
    """
    path = Path(file)
    worked_out, failures = interpolate(read(path))
    source = Source(worked_out)
    for key, reason in failures.items():
        source.note("untranslated", key, f"it could not be worked out: {reason}")
    recipe = _recipe(source, path)
    account(source)
    return Translation(source=path, recipe=recipe, notes=tuple(source.notes), problems=_problems(recipe))


def _recipe(source: Source, path: Path) -> dict[str, Any]:
    algorithm = _algorithm(source, path)
    if source.peek("policy.model_name") is None:
        raise NemoRLError(f"{path} names no model at policy.model_name, so it is no recipe; name a file that does")
    steps = grpo.steps_per_generation(source, algorithm) if algorithm in {"grpo", "distillation"} else 1
    stage = _stage(source, algorithm)
    stage["optimizer"] = policy.optimizer(source, steps=stage["max_num_steps"])
    recipe = {
        "run_dir": str(source.take("checkpointing.checkpoint_dir") or f"runs/{path.stem}"),
        "seed": source.take(f"{algorithm}.seed", 0),
        "policy": {**policy.model(source), "generation": generation.generation(source)},
        "data": surroundings.data(source, algorithm),
        **surroundings.environment(source, algorithm),
        "evaluation": surroundings.evaluation(source, algorithm, steps=steps),
        "cluster": surroundings.cluster(source),
        "checkpointing": surroundings.checkpointing(source, steps=steps),
        "logger": surroundings.logger(source),
    }
    return {**recipe, "distill" if algorithm == "distillation" else algorithm: stage}


def _algorithm(source: Source, path: Path) -> str:
    for other in ("ppo", "rm", "value"):
        if isinstance(source.peek(other), dict):
            raise NemoRLError(
                f"{path} has a section {other}, and a recipe has no such stage: rl_algorithms.ppo and "
                f"rl_algorithms.reward_model are for loops of your own"
            )
    if source.peek("teachers") is not None or source.peek("token_aligner") is not None:
        raise NemoRLError(f"{path} distils between tokenizers, and a recipe's teacher has the policy's own")
    found = [name for name in ALGORITHMS if isinstance(source.peek(name), dict)]
    if len(found) != 1:
        raise NemoRLError(f"{path} has {' and '.join(found) or 'none'} of {', '.join(ALGORITHMS)}; one is translated")
    return found[0]


def _stage(source: Source, algorithm: str) -> dict[str, Any]:
    match algorithm:
        case "grpo":
            return grpo.grpo(source)
        case "distillation":
            return grpo.distillation(source)
        case "sft":
            return _sft(source)
        case _:
            return _dpo(source)


def _sft(source: Source) -> dict[str, Any]:
    source.untranslated("sft.max_num_epochs", "ours ends after max_num_steps, theirs after so many passes too")
    return {
        "train_on": "last_turn" if source.take("sft.only_unmask_final") else "assistant",
        "max_num_steps": source.take("sft.max_num_steps"),
        "batch_size": source.take("policy.train_global_batch_size"),
    }


def _dpo(source: Source) -> dict[str, Any]:
    source.untranslated("dpo.max_num_epochs", "ours ends after max_num_steps, theirs after so many passes too")
    if source.take("dpo.preference_loss_weight", 1) != 1:
        source.untranslated("dpo.preference_loss_weight", "it is 1: scale the learning rate, and dpo.nll_weight")
    source.take("dpo.sft_average_log_probs")
    return {
        "pairs": "data",
        "max_num_steps": source.take("dpo.max_num_steps"),
        "batch_size": source.take("policy.train_global_batch_size"),
        "beta": source.take("dpo.reference_policy_kl_penalty", 0.1),
        "loss": "sigmoid_norm" if source.take("dpo.preference_average_log_probs") else "sigmoid",
        "nll_weight": source.take("dpo.sft_loss_weight", 0.0),
    }


def _problems(recipe: dict[str, Any]) -> tuple[str, ...]:
    from rl_launcher.recipe_files import RecipeError, load_recipe
    from rl_launcher.schema import Recipe

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "recipe.yaml"
        file.write_text(dump(recipe), encoding="utf-8")
        try:
            load_recipe(file, schema=Recipe)
        except RecipeError as error:
            return tuple(f"{problem.key}: {problem.message}" for problem in error.problems)
    return ()


def _line(note: Note) -> str:
    return str(note)
