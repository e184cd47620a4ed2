"""Their `policy` section as ours: model, training backend, optimizer, generation."""

import re
from typing import Any

from rl_launcher.import_nemo_rl.read import Source

ADAMW = {"AdamW", "FusedAdam", "Adam"}
ATTENTION = {"sdpa": "sdpa", "flex": "flex", "flex_attention": "flex"}
MIXTURE = re.compile(r"(?i)moe|mixtral|-a\d+b|deepseek-v[23]|moonlight|gpt-oss|glm-4\.5|kimi|maverick|scout|nano|super")
"""Names of models that may have experts."""
FLASH = {"flash_attention_2", "flash_attention_3"}
FOR_EVALUATION = 256
"""Length limit of a response, in tokens, if theirs does not generate."""


def model(source: Source) -> dict[str, Any]:
    """Return our `policy`, without `generation`."""
    name = source.take("policy.model_name")
    if str(source.peek("policy.tokenizer.chat_template")).lower() == "default":
        source.take("policy.tokenizer.chat_template")  # the tokenizer's own
    if source.take("policy.tokenizer.name", name) != name:
        source.untranslated("policy.tokenizer.name", "the tokenizer is the model's own; save both into one folder")
    ours: dict[str, Any] = {"model_name": str(name), "padded_vocabulary": True}
    source.take("policy.dtensor_cfg.enabled")
    if not source.take("policy.megatron_cfg.enabled", default=False):
        return {**ours, "dtensor_cfg": _dtensor(source)}
    megatron = _backend(source, "policy.megatron_cfg")
    megatron["enabled"] = True
    if source.take("policy.megatron_cfg.activation_checkpointing"):
        megatron["recompute_granularity"] = source.take("policy.megatron_cfg.recompute_granularity", "full")
    experts = source.peek("policy.megatron_cfg.expert_model_parallel_size", 1)
    if experts in (1, None) and not MIXTURE.search(str(name)):
        for key in ("freeze_moe_router", "moe_router_load_balancing_type", "moe_router_bias_update_rate"):
            source.note("dropped", f"policy.megatron_cfg.{key}", "the model has no experts")
        source.note("dropped", "policy.megatron_cfg.moe_router_enable_expert_bias", "the model has no experts")
    elif source.take("policy.megatron_cfg.freeze_moe_router"):
        megatron["freeze_moe_router"] = True
    if source.take("policy.megatron_cfg.peft.enabled"):
        megatron["lora_cfg"] = _adapters(source, "policy.megatron_cfg.peft")
        megatron["lora_cfg"]["base_dtype"] = megatron.get("precision", "float32")
        megatron["transformer_impl"] = "local"  # adapters are in plain torch's layers
    if source.take("policy.megatron_cfg.optimizer.use_distributed_optimizer"):
        megatron["use_distributed_optimizer"] = True
    return {**ours, "dtensor_cfg": {"enabled": False}, "megatron_cfg": megatron}


def _dtensor(source: Source) -> dict[str, Any]:
    ours = _backend(source, "policy.dtensor_cfg")
    if source.take("policy.dtensor_cfg.activation_checkpointing"):
        ours["activation_checkpointing"] = "full"
    if plan := source.take("policy.dtensor_cfg.custom_parallel_plan"):
        module, _, name = str(plan).rpartition(".")
        ours["custom_parallel_plan"] = f"{module}:{name}"
    if kernels := _kernels(source, packed=ours.get("sequence_packing", False)):
        ours["kernels"] = kernels
    section = "policy.dtensor_cfg.lora_cfg"
    if not source.take(f"{section}.enabled"):
        return ours
    return {**ours, "lora_cfg": _adapters(source, section)}


def _adapters(source: Source, section: str) -> dict[str, Any]:
    """Return `lora_cfg` of either backend; Megatron's names of fused layers are not those of target modules."""
    lora: dict[str, Any] = {name: int(value) for name, value in source.copy("lora_cfg", section).items()}
    wanted = source.peek(f"{section}.target_modules") or []
    everything = source.take(f"{section}.match_all_linear", default=not wanted)
    if wanted and any("linear_" in str(name) for name in wanted):
        source.untranslated(f"{section}.target_modules", "all linear layers of the decoder are adapted here")
        return lora
    source.take(f"{section}.target_modules")
    if not everything and wanted:
        lora["target_modules"] = [wanted] if isinstance(wanted, str) else list(wanted)
    else:
        source.untranslated(f"{section}.match_all_linear", "in the decoder alone: not lm_head, and no experts")
    return lora


def _kernels(source: Source, *, packed: bool) -> dict[str, Any]:
    """Return our `kernels`, of what Automodel's arguments name: attention, and Liger's norms, rope and MLPs."""
    section = "policy.dtensor_cfg.automodel_kwargs"
    ours: dict[str, Any] = {}
    for key in (f"{section}.attn_implementation", f"{section}.backend.attn"):
        if (theirs := source.peek(key)) is None:
            continue
        if theirs in ATTENTION:
            ours["attention"] = ATTENTION[source.take(key)]
        elif theirs in FLASH and packed:
            source.take(key)
            ours["attention"] = "flash"
        elif theirs in FLASH:
            source.untranslated(key, "the kernels of flash-attn read packed rows here; set sequence_packing for them")
        else:
            reason = f"no kernel here is {theirs!r}; kernels.attention: auto chooses one of the same results"
            source.note("dropped", key, reason)
    if source.take(f"{section}.use_liger_kernel", default=False):
        ours |= {"norm": "liger", "rope": "liger", "mlp": "liger"}
    return ours


def _backend(source: Source, section: str) -> dict[str, Any]:
    """Return the keys that both backends share: device, precision, parallel sizes, microbatches."""
    ours: dict[str, Any] = {"device": "cuda"}
    precision = source.take("policy.precision", "float32")
    if precision in {"float32", "bfloat16"}:
        ours["precision"] = precision
    else:
        source.untranslated("policy.precision", "float32 and bfloat16 are supported; float32 is used instead")
    ours |= source.copy(section)
    tensor_parallel = ours.get("tensor_parallel_size", ours.get("tensor_model_parallel_size", 1))
    if ours.get("sequence_parallel") and tensor_parallel == 1:
        ours["sequence_parallel"] = False
        source.note("dropped", f"{section}.sequence_parallel", "it has no effect without tensor parallelism")
    ours["micro_batch_size"] = source.take("policy.train_micro_batch_size", 1)
    for way in ("sequence_packing", "dynamic_batching"):
        if source.take(f"policy.{way}.enabled"):
            if (tokens := source.take(f"policy.{way}.train_mb_tokens")) is not None:
                ours["micro_batch_tokens"] = tokens
            # They bound rows by tokens alone, so the number of rows must not bind.
            ours["micro_batch_size"] = max(ours["micro_batch_size"], source.peek("policy.train_global_batch_size", 1))
            if way == "sequence_packing":
                ours["sequence_packing"] = True
    return ours


def optimizer(source: Source, *, steps: int) -> dict[str, Any]:
    """Return a stage's optimizer, given the number of its steps."""
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
        reason = f"a warm-up of {ours.pop('warmup_steps')} steps does not end within {steps}; left out"
        ours.pop("warmup_start_ratio", None)
        source.note("untranslated", "policy.scheduler", reason)
    return ours


def _torch_optimizer(source: Source) -> dict[str, Any]:
    name = str(source.take("policy.optimizer.name", "torch.optim.AdamW"))
    ours = {"lr": 1e-6, **source.copy("policy.optimizer.kwargs")}
    for key in (source.peek("policy.optimizer.kwargs") or {}).keys() - {"lr", "weight_decay", "betas", "eps"}:
        source.note("dropped", f"policy.optimizer.kwargs.{key}", "the recipe does not choose the optimizer's kernel")
    if name.rpartition(".")[2] not in ADAMW:
        source.untranslated("policy.optimizer.name", "AdamW is used instead")
    schedulers = source.take("policy.scheduler")
    for entry in schedulers if isinstance(schedulers, list) else [schedulers]:
        if isinstance(entry, dict) and "name" in entry:
            _torch_schedule(source, entry, ours)
    return ours


def _torch_schedule(source: Source, entry: dict[str, Any], ours: dict[str, Any]) -> None:
    kind = str(entry["name"]).rpartition(".")[2]
    arguments: dict[str, Any] = entry.get("kwargs") or {}
    first, last = arguments.get("start_factor", 1 / 3), arguments.get("end_factor", 1.0)
    decay_steps = arguments.get("T_max" if kind == "CosineAnnealingLR" else "total_iters")
    if kind == "LinearLR" and first < last:
        ours["warmup_steps"] = arguments.get("total_iters", 5)
        if last == 1.0:
            ours["warmup_start_ratio"] = first
        else:
            reason = f"warm-up begins at 0 and ends at the learning rate, and not at {last:g} of it"
            source.note("untranslated", "policy.scheduler", reason, value=f"start_factor={first:g}")
    elif kind == "LinearLR":
        ours |= {"schedule": "linear", "final_lr_ratio": last / first if first else 1.0}
    elif kind == "CosineAnnealingLR":
        ours |= {"schedule": "cosine", "final_lr_ratio": min(arguments.get("eta_min", 0.0) / ours["lr"], 1.0)}
    elif kind == "ConstantLR" and arguments.get("factor", 1.0) == 1.0:
        ours["schedule"] = "constant"
    else:
        source.note("untranslated", "policy.scheduler", "ours are constant, linear, cosine and wsd", value=kind)
    if kind == "CosineAnnealingLR" or (kind == "LinearLR" and first >= last):
        value = f"after {decay_steps} steps"
        source.note("untranslated", "policy.scheduler", "the decay ends with the stage here", value=value)


def _megatron_optimizer(source: Source) -> dict[str, Any]:
    prefix = "policy.megatron_cfg"
    ours, least = source.copy(f"{prefix}.optimizer"), source.take(f"{prefix}.optimizer.min_lr", 0.0)
    ours["betas"] = [source.take(f"{prefix}.optimizer.adam_beta{i}", usual) for i, usual in ((1, 0.9), (2, 0.999))]
    if warmup := source.take(f"{prefix}.scheduler.lr_warmup_iters"):
        ours["warmup_steps"] = warmup
        start = source.take(f"{prefix}.scheduler.lr_warmup_init", 0.0)
        if start and 0.0 < start <= ours["lr"]:
            ours["warmup_start_ratio"] = start / ours["lr"]
    match source.take(f"{prefix}.scheduler.lr_decay_style", "constant"):
        case "constant":
            ours["schedule"] = "constant"
            source.take(f"{prefix}.scheduler.lr_decay_iters")
        case "linear" | "cosine" as style:
            ours |= {"schedule": style, "final_lr_ratio": min(least / ours["lr"], 1.0)}
            source.untranslated(f"{prefix}.scheduler.lr_decay_iters", "the decay ends with the stage here")
        case style:
            source.untranslated(f"{prefix}.scheduler.lr_decay_style", f"ours is constant instead of {style}")
    for end in ("start", "end"):
        if source.take(f"{prefix}.scheduler.{end}_weight_decay", ours["weight_decay"]) != ours["weight_decay"]:
            source.untranslated(f"{prefix}.scheduler.{end}_weight_decay", "weight decay is constant here")
    return ours


def generation(source: Source) -> dict[str, Any]:
    """Return `policy.generation`."""
    section = "policy.generation"
    if source.peek(section) is None:
        reason = "theirs does not generate; ours does, for evaluation"
        source.note("fill_in", f"{section}.max_new_tokens", reason, value=FOR_EVALUATION)
        return {"max_new_tokens": FOR_EVALUATION}
    ours: dict[str, Any] = {"backend": "vllm"}
    match source.take(f"{section}.backend", "vllm"):
        case "vllm":
            ours["vllm_cfg"] = _vllm(source)
        case "hf":
            ours["backend"] = "transformers"
        case other:
            source.untranslated(f"{section}.backend", f"vllm is used instead of {other}, with its defaults")
    length = source.take(f"{section}.max_new_tokens")
    if length is None:
        # Often only a file that theirs starts from has it, and that file is not always there.
        length = source.peek("policy.max_total_sequence_length")
        reason = "theirs does not have it; this is policy.max_total_sequence_length, of prompt and response together"
        if length is None:
            length, reason = FOR_EVALUATION, "theirs has neither it nor policy.max_total_sequence_length"
        source.note("fill_in", f"{section}.max_new_tokens", reason, value=length)
    ours |= {"max_new_tokens": length, **source.copy(section), **_cuts(source, "")}
    if isinstance(ours.get("stop"), str):
        ours["stop"] = [ours["stop"]]
    _separate(source, ours)
    return ours


def _cuts(source: Source, prefix: str) -> dict[str, Any]:
    """Return `top_p` and `top_k`, if they leave any token out."""
    given = {name: source.take(f"policy.generation.{prefix}{name}") for name in ("top_p", "top_k")}
    return {name: value for name, value in given.items() if value not in (None, -1, 0, 1.0 if name == "top_p" else 0)}


def evaluation_sampling(source: Source) -> dict[str, Any]:
    """Return the keys of `evaluation` that say how held-out prompts are sampled, where it differs from training."""
    section = "policy.generation"
    ours: dict[str, Any] = {}
    usual = source.peek(f"{section}.temperature", 1.0)
    temperature = source.take(f"{section}.val_temperature", usual)
    if temperature == 0:
        source.note("dropped", f"{section}.val_temperature", "held-out prompts are decoded greedily, too")
    elif temperature is not None and temperature != usual:
        ours["temperature"] = temperature
    of_training, off = _cuts(source, ""), {"top_p": 1.0, "top_k": 0}
    of_evaluation = _cuts(source, "val_")
    for name in ("top_p", "top_k"):
        if source.peek(f"{section}.val_{name}") is not None:
            value = of_evaluation.get(name, off[name])
            if value != of_training.get(name, off[name]):
                ours[name] = value
    return ours


def _separate(source: Source, ours: dict[str, Any]) -> None:
    """Give engines GPUs of their own if theirs are not colocated."""
    section = "policy.generation.colocated"
    if source.take(f"{section}.enabled", default=True):
        return
    resources = {name: size for name, size in source.copy(f"{section}.resources").items() if size}
    if source.peek("cluster.num_nodes", 1) == 1:
        resources.pop("num_nodes", None)  # on one node they count GPUs
    if resources:
        ours["colocated"] = {"enabled": False, "resources": resources}
    else:
        reason = "it does not say which GPUs are the engines'; they share the trainer's"
        source.untranslated(f"{section}.enabled", reason)


def _vllm(source: Source) -> dict[str, Any]:
    section = "policy.generation.vllm_cfg"
    ours = source.copy(section)
    if ours.get("precision") not in {"bfloat16", "float32", "auto", None}:
        reason = "engines have the policy's precision; quantized weights cannot be refitted"
        source.untranslated(f"{section}.precision", reason)
        del ours["precision"]
    if (source.take(f"{section}.expert_parallel_size") or 1) > 1:
        ours["enable_expert_parallel"] = True
    extra = dict(source.take("policy.generation.vllm_kwargs") or {})
    if source.peek(f"{section}.kv_cache_dtype", "auto") != "auto":
        extra["kv_cache_dtype"] = source.take(f"{section}.kv_cache_dtype")
    return {**ours, "vllm_kwargs": extra} if extra else ours
