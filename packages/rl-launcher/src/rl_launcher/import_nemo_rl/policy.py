"""The `policy` section of NeMo-RL: model, backend, generation."""

from typing import Any

from rl_launcher.import_nemo_rl.read import Source

__all__ = ["generation", "model", "optimizer"]

ADAMW = {"AdamW", "FusedAdam", "Adam"}
UNUSED_GENERATION_TOKENS = 512
"""Of an answer, where a file of SFT or DPO says nothing: it is only for evaluation."""


def model(source: Source) -> dict[str, Any]:
    """Return our `policy`, but for the engine."""
    name = source.take("policy.model_name")
    if source.take("policy.tokenizer.name", name) != name:
        source.untranslated("policy.tokenizer.name", "the tokenizer is the model's own; save both into one folder")
    for key in ("chat_template", "chat_template_kwargs"):
        if source.peek(f"policy.tokenizer.{key}"):
            source.untranslated(f"policy.tokenizer.{key}", "save the template with the tokenizer")
    ours: dict[str, Any] = {"model_name": str(name), "padded_vocabulary": True}
    if source.take("policy.megatron_cfg.enabled", default=False):
        source.take("policy.dtensor_cfg.enabled")
        return {**ours, "dtensor_cfg": {"enabled": False}, "megatron_cfg": _megatron(source)}
    return {**ours, "dtensor_cfg": _dtensor(source)}


def _dtensor(source: Source) -> dict[str, Any]:
    source.take("policy.dtensor_cfg.enabled")
    ours = _common(
        source,
        "policy.dtensor_cfg",
        {
            "tensor_parallel_size": "tensor_parallel_size",
            "sequence_parallel": "sequence_parallel",
            "context_parallel_size": "context_parallel_size",
            "expert_parallel_size": "expert_parallel_size",
            "dp_replicate_size": "data_parallel_replicate_size",
            "cpu_offload": "cpu_offload",
        },
    )
    if source.take("policy.dtensor_cfg.activation_checkpointing"):
        ours["activation_checkpointing"] = "full"
    if plan := source.take("policy.dtensor_cfg.custom_parallel_plan"):
        module, _, name = str(plan).rpartition(".")
        ours["custom_parallel_plan"] = f"{module}:{name}"
    if (adapters := _adapters(source)) is not None:
        ours["lora_cfg"] = adapters
    return ours


def _adapters(source: Source) -> dict[str, Any] | None:
    """Return our `lora_cfg`; None where theirs is off."""
    section = "policy.dtensor_cfg.lora_cfg"
    if not source.peek(f"{section}.enabled"):
        return None
    source.take(f"{section}.enabled")
    ours: dict[str, Any] = {
        name: int(source.take(f"{section}.{theirs}", default))
        for name, theirs, default in (("rank", "dim", 8), ("alpha", "alpha", 32))
    }
    wanted = source.take(f"{section}.target_modules") or []
    if not source.take(f"{section}.match_all_linear", default=not wanted) and wanted:
        ours["target_modules"] = [wanted] if isinstance(wanted, str) else list(wanted)
    else:
        source.untranslated(f"{section}.match_all_linear", "of the decoder alone: not lm_head, and no experts")
    for key, harmless, reason in (
        ("exclude_modules", (None, []), "name the modules that are adapted in lora_cfg.target_modules"),
        ("dropout", (None, 0, 0.0), "without dropout here, which would make two functions of one model"),
        ("lora_A_init", (None, "uniform"), "A begins uniform within 1 / sqrt(in), as peft has it, and B at 0"),
    ):
        if source.take(f"{section}.{key}") not in harmless:
            source.untranslated(f"{section}.{key}", reason)
    source.note("dropped", f"{section}.dropout_position", "there is no dropout")
    source.note("dropped", f"{section}.use_triton", "a kernel of theirs, of the same numbers")
    return ours


def _megatron(source: Source) -> dict[str, Any]:
    ours = _common(source, "policy.megatron_cfg", {
        name: name
        for name in (
            "tensor_model_parallel_size", "sequence_parallel", "pipeline_model_parallel_size", "context_parallel_size",
            "expert_model_parallel_size",
        )
    })  # fmt: skip
    ours["enabled"] = True
    if source.take("policy.megatron_cfg.activation_checkpointing"):
        ours["recompute_granularity"] = source.take("policy.megatron_cfg.recompute_granularity", "full")
    if source.take("policy.megatron_cfg.optimizer.use_distributed_optimizer"):
        ours["use_distributed_optimizer"] = True
    if source.peek("policy.megatron_cfg.peft.enabled"):
        source.untranslated("policy.megatron_cfg.peft", "Megatron trains all weights here; adapters are dtensor_cfg's")
    return ours


def _common(source: Source, section: str, names: dict[str, str]) -> dict[str, Any]:
    """Return what both backends share: device, precision, degrees, microbatches."""
    ours: dict[str, Any] = {"device": "cuda"}
    precision = source.take("policy.precision", "float32")
    if precision in {"float32", "bfloat16"}:
        ours["precision"] = precision
    else:
        source.untranslated("policy.precision", "float32 and bfloat16 are ours; float32 stands in its place")
    for theirs, name in names.items():
        if (value := source.take(f"{section}.{theirs}")) is not None:
            ours[name] = value
    if (
        ours.get("sequence_parallel")
        and ours.get("tensor_parallel_size", ours.get("tensor_model_parallel_size", 1)) == 1
    ):
        ours["sequence_parallel"] = False
        source.note("dropped", f"{section}.sequence_parallel", "without tensor parallelism there is nothing to cut")
    ours["micro_batch_size"] = source.take("policy.train_micro_batch_size", 1)
    for way in ("sequence_packing", "dynamic_batching"):
        if source.take(f"policy.{way}.enabled"):
            ours["micro_batch_tokens"] = source.take(f"policy.{way}.train_mb_tokens")
            # Rows are bounded by tokens there, however many there are.
            ours["micro_batch_size"] = max(ours["micro_batch_size"], source.peek("policy.train_global_batch_size", 1))
            if way == "sequence_packing":
                ours["sequence_packing"] = True
    return {name: value for name, value in ours.items() if value is not None}


def optimizer(source: Source, *, steps: int) -> dict[str, Any]:
    """Return a stage's optimizer, of `steps` steps."""
    clip = source.take("policy.max_grad_norm")
    if source.peek("policy.megatron_cfg.enabled"):
        for other in ("optimizer", "scheduler"):
            source.note("dropped", f"policy.{other}", "of the other backend")
        ours = _megatron_optimizer(source)
    else:
        ours = _torch_optimizer(source)
    if clip is not None:
        ours["max_grad_norm"] = clip or None
    if "warmup_steps" in ours and ours["warmup_steps"] >= steps:
        source.note(
            "untranslated",
            "policy.scheduler",
            f"a warm-up of {ours['warmup_steps']} steps does not end in {steps}; left out",
        )
        del ours["warmup_steps"]
    return ours


def _torch_optimizer(source: Source) -> dict[str, Any]:
    name = str(source.take("policy.optimizer.name", "torch.optim.AdamW"))
    arguments: dict[str, Any] = source.peek("policy.optimizer.kwargs") or {}
    ours: dict[str, Any] = {}
    for key in ("lr", "weight_decay", "betas", "eps"):
        if (value := source.take(f"policy.optimizer.kwargs.{key}")) is not None:
            ours[key] = value
    ours.setdefault("lr", 1e-6)
    for key in arguments.keys() - {"lr", "weight_decay", "betas", "eps"}:
        source.note(
            "dropped", f"policy.optimizer.kwargs.{key}", "which kernel takes the step is not the recipe's affair"
        )
    if name.rpartition(".")[2] not in ADAMW:
        source.untranslated("policy.optimizer.name", "AdamW stands in its place")
    for entry in _schedulers(source):
        _torch_schedule(source, entry, ours)
    return ours


def _schedulers(source: Source) -> list[dict[str, Any]]:
    written = source.take("policy.scheduler")
    entries = written if isinstance(written, list) else [written]
    return [entry for entry in entries if isinstance(entry, dict) and "name" in entry]


def _torch_schedule(source: Source, entry: dict[str, Any], ours: dict[str, Any]) -> None:
    kind = str(entry["name"]).rpartition(".")[2]
    arguments: dict[str, Any] = entry.get("kwargs") or {}
    first, last = arguments.get("start_factor", 1 / 3), arguments.get("end_factor", 1.0)
    if kind == "LinearLR" and first < last:
        ours["warmup_steps"] = arguments.get("total_iters", 5)
        note = f"warm-up begins at 0 and not at {first:g} of the learning rate"
        source.note("untranslated", "policy.scheduler", note, value=f"start_factor={first:g}")
    elif kind == "LinearLR":
        ours |= {"schedule": "linear", "final_lr_ratio": last / first if first else 1.0}
        _note_end(source, arguments.get("total_iters"))
    elif kind == "CosineAnnealingLR":
        ours |= {"schedule": "cosine", "final_lr_ratio": min(arguments.get("eta_min", 0.0) / ours["lr"], 1.0)}
        _note_end(source, arguments.get("T_max"))
    elif kind == "ConstantLR" and arguments.get("factor", 1.0) == 1.0:
        ours["schedule"] = "constant"
    else:
        source.note("untranslated", "policy.scheduler", "ours are constant, linear, cosine and wsd", value=kind)


def _note_end(source: Source, steps: object) -> None:
    source.note("untranslated", "policy.scheduler", "the decay ends with the stage here", value=f"after {steps} steps")


def _megatron_optimizer(source: Source) -> dict[str, Any]:
    prefix = "policy.megatron_cfg"
    if (kind := source.take(f"{prefix}.optimizer.optimizer", "adam")) != "adam":
        source.untranslated(f"{prefix}.optimizer.optimizer", f"AdamW stands in the place of {kind}")
    rate, least = source.take(f"{prefix}.optimizer.lr", 1e-6), source.take(f"{prefix}.optimizer.min_lr", 0.0)
    ours = {
        "lr": rate,
        "weight_decay": source.take(f"{prefix}.optimizer.weight_decay", 0.01),
        "betas": [source.take(f"{prefix}.optimizer.adam_beta{i}", default) for i, default in ((1, 0.9), (2, 0.999))],
        "eps": source.take(f"{prefix}.optimizer.adam_eps", 1e-8),
    }
    source.take(f"{prefix}.optimizer.clip_grad")  # theirs is policy.max_grad_norm
    if warmup := source.take(f"{prefix}.scheduler.lr_warmup_iters"):
        ours["warmup_steps"] = warmup
    if source.take(f"{prefix}.scheduler.lr_warmup_init"):
        source.untranslated(f"{prefix}.scheduler.lr_warmup_init", "warm-up begins at 0")
    match source.take(f"{prefix}.scheduler.lr_decay_style", "constant"):
        case "constant":
            ours["schedule"] = "constant"
            source.take(f"{prefix}.scheduler.lr_decay_iters")
        case "linear" | "cosine" as style:
            ours |= {"schedule": style, "final_lr_ratio": min(least / rate, 1.0)}
            source.untranslated(f"{prefix}.scheduler.lr_decay_iters", "the decay ends with the stage here")
        case style:
            source.untranslated(f"{prefix}.scheduler.lr_decay_style", f"ours is constant in the place of {style}")
    for end in ("start", "end"):
        if source.take(f"{prefix}.scheduler.{end}_weight_decay", ours["weight_decay"]) != ours["weight_decay"]:
            source.untranslated(f"{prefix}.scheduler.{end}_weight_decay", "weight decay stays as it is here")
    return ours


SECTION = "policy.generation"
FOR_EVALUATION = 256
SAME = {"precision", "tensor_parallel_size", "pipeline_parallel_size", "gpu_memory_utilization", "max_model_len"}


def generation(source: Source) -> dict[str, Any]:
    """Return `policy.generation`."""
    if source.peek(SECTION) is None:
        reason = "theirs does not generate here; ours does, to evaluate"
        source.note("fill_in", "policy.generation.max_new_tokens", reason, value=FOR_EVALUATION)
        return {"max_new_tokens": FOR_EVALUATION}
    ours: dict[str, Any] = {"backend": "vllm"}
    match source.take(f"{SECTION}.backend", "vllm"):
        case "vllm":
            ours["vllm_cfg"] = _vllm(source)
        case "hf":
            ours["backend"] = "transformers"
        case other:
            source.untranslated(f"{SECTION}.backend", f"vllm stands in the place of {other}, with its defaults")
    ours["max_new_tokens"] = _longest_answer(source)
    ours["temperature"] = source.take(f"{SECTION}.temperature", 1.0)
    _sampling(source, ours["temperature"])
    _colocated(source, ours)
    return ours


def _longest_answer(source: Source) -> Any:
    """Tokens of an answer; often only a file that theirs starts from says it, and that file is not always there."""
    written = source.take(f"{SECTION}.max_new_tokens")
    if written is not None:
        return written
    whole = source.peek("policy.max_total_sequence_length")
    reason = "theirs does not say it; this is policy.max_total_sequence_length, which holds prompt and answer"
    if whole is None:
        whole, reason = FOR_EVALUATION, "theirs does not say it, nor how long a row may be"
    source.note("fill_in", f"{SECTION}.max_new_tokens", reason, value=whole)
    return whole


def _vllm(source: Source) -> dict[str, Any]:
    section = f"{SECTION}.vllm_cfg"
    ours = {name: value for name in sorted(SAME) if (value := source.take(f"{section}.{name}")) is not None}
    ours["async_engine"] = bool(source.take(f"{section}.async_engine", default=False))
    ours["enforce_eager"] = bool(source.take(f"{section}.enforce_eager", default=False))
    if ours.get("precision") not in {"bfloat16", "float32", "auto", None}:
        source.untranslated(f"{section}.precision", "engines take the policy's precision; quantised refit is not ours")
        del ours["precision"]
    if (source.take(f"{section}.expert_parallel_size") or 1) > 1:
        ours["enable_expert_parallel"] = True
    extra = dict(source.take(f"{SECTION}.vllm_kwargs") or {})
    if source.peek(f"{section}.kv_cache_dtype", "auto") != "auto":
        extra["kv_cache_dtype"] = source.take(f"{section}.kv_cache_dtype")
    if extra:
        ours["vllm_kwargs"] = extra
    return ours


def _sampling(source: Source, temperature: float) -> None:
    for name, neutral in (("top_p", 1.0), ("top_k", None)):
        if source.take(f"{SECTION}.{name}", neutral) not in {neutral, -1}:
            reason = "a rollout is sampled from the whole distribution, which its logp is of"
            source.untranslated(f"{SECTION}.{name}", reason)
        source.take(f"{SECTION}.val_{name}")
    if source.take(f"{SECTION}.val_temperature", temperature) != temperature:
        source.untranslated(
            f"{SECTION}.val_temperature", "evaluation samples at the temperature of training, and greedily"
        )
    for name in ("stop_token_ids", "stop_strings"):
        if source.take(f"{SECTION}.{name}"):
            source.untranslated(f"{SECTION}.{name}", "an answer ends with the model's own stop tokens")


def _colocated(source: Source, ours: dict[str, Any]) -> None:
    section = f"{SECTION}.colocated"
    if source.take(f"{section}.enabled", default=True):
        return
    resources = {
        name: value for name in ("num_nodes", "gpus_per_node") if (value := source.take(f"{section}.resources.{name}"))
    }
    if source.peek("cluster.num_nodes", 1) == 1:
        resources.pop("num_nodes", None)  # theirs counts by GPUs on one machine
    if resources:
        ours["colocated"] = {"enabled": False, "resources": resources}
        return
    source.untranslated(f"{section}.enabled", "it does not say which GPUs are the engines'; they share the trainer's")
