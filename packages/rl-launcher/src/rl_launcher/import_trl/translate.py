"""Translate TRL's configurations into recipes.

    file -> flat keys of TRL's dataclasses (`read.py`) -> rules, section by section -> our recipe

Every key is translated, or noted with a reason. What is left out has TRL's default, where ours differs. Rewards, tools
and environments of an example script are Python: they are to be filled in, and the rest is translated. TRL is not
imported.
"""

import re
from pathlib import Path
from typing import Any

from rl_launcher.import_nemo_rl.read import Source
from rl_launcher.import_nemo_rl.translate import MOST_STEPS, VISION, Translation, problems_of
from rl_launcher.import_trl.read import Given, TRLError, listed, read

STAGES = {
    "grpo": "grpo",
    "rloo": "grpo",
    "gspo": "grpo",
    "async_grpo": "grpo",
    "sft": "sft",
    "dpo": "dpo",
    "online_dpo": "dpo",
    "cpo": "dpo",
    "kto": "kto",
    "orpo": "orpo",
    "ppo": "ppo",
    "gkd": "distill",
    "distillation": "distill",
    "reward": "reward_model",
    "reward_modeling": "reward_model",
}
"""Our stage of each of their commands and scripts."""
RATES = {"sft": 2e-5, "reward_model": 1e-4, "gkd": 2e-5, "ppo": 3e-6, "online_dpo": 5e-7}
"""Default learning rates that are not 1e-6, by command or stage."""
PAIR_LOSSES = {
    **dict.fromkeys(("sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "discopop", "apo_zero", "apo_down")),
    **dict.fromkeys(("aot", "aot_unpaired")),
    "exo_pair": "exo",
    "nca_pair": "nca",
    "bco_pair": "bco",
    "sppo_hard": "sppo",
}
"""TRL's names of losses of a pair: None for the same name, otherwise ours."""
LOSSES = {
    "grpo": {"aggregation": "seq-mean-token-mean"},
    "bnpo": {"aggregation": "token-mean"},
    "dapo": {"aggregation": "token-mean"},
    "cispo": {"aggregation": "token-mean", "surrogate": "cispo"},
    "dr_grpo": {"aggregation": "seq-mean-token-sum-norm"},
}
TRACKERS = {
    "tensorboard": (),
    "wandb": ("project", "name"),
    "mlflow": ("experiment_name", "run_name"),
    "trackio": ("project", "name"),
}
"""Where metrics may be reported, and our keys of the project and the run."""
NO_EFFECT = {
    "the report, the log and the live view are always there": (
        r"trackio_.*|project|log.*|logging_.*|disable_tqdm|push_to_hub|hub_.*|num_completions_to_print"
    ),
    "the backend decides about it": (
        r"attn_.*|gradient_checkpointing_kwargs|(teacher_)?model_init_kwargs|activation_offloading|fsdp.*|deepspeed|ddp_.*|use_liger_.*|tf32|dataloader_.*|packing_.*"
        r"|remove_unused_columns|per_device_eval_batch_size|accelerator_config|torch_compile.*|padding_free"
        r"|dataset_num_proc|pad_to_multiple_of|average_tokens_across_devices|precompute_.*|disable_dropout"
    ),
    "the engine decides about it": (
        r"use_vllm|vllm_(mode|server_.*|enable_sleep_mode|max_model_length|model_impl|sync_.*)|ds3_.*|cache_implementation"
        r"|use_transformers_paged|(use_)?transformers_continuous_batching.*|local_rollout_forward_batch_size"
    ),
    "a run always saves what it needs to resume": (
        r"save_strategy|save_total_limit|save_only_model|resume_.*|overwrite_.*|do_.*"
    ),
}
"""Patterns of keys without effect here, by the reason."""


def translate(file: str | Path, *, algorithm: str | None = None) -> Translation:
    """Translate a YAML configuration, or the first command in a text.

    Args:
        file: the YAML, the shell script or the example script.
        algorithm: `grpo`, `sft`, `dpo`, `kto`, `orpo` or `reward`; needed for a YAML file, whose keys do not say it.

    Raises:
        TRLError: it cannot be read, holds no command, is of another trainer, or trains on images.
    """
    path = Path(file)
    if {"vl", "vlm"} & {*path.stem.split("_")}:
        raise TRLError(f"{path} trains on images, as its name says, and a recipe supports text only")
    given = read(path)
    algorithm = algorithm or given.algorithm
    if algorithm is None:
        raise TRLError(f"{path} does not say which trainer it is for; name one of {', '.join(STAGES)} by --algorithm")
    words = algorithm.split("_")
    if "vlm" in words:
        raise TRLError(f"{path} is for {algorithm}, which trains on images, and a recipe supports text only")
    if algorithm not in STAGES and words[0] in STAGES:
        algorithm = words[0]  # a script for one model or one task, which its name ends in
    if algorithm == "gold":
        raise TRLError(f"{path} distils between tokenizers, and a recipe's teacher has the policy's tokenizer")
    if algorithm == "cpo" and given.keys.get("loss_type") != "simpo":
        raise TRLError(
            f"{path} is for cpo with loss_type={given.keys.get('loss_type', 'sigmoid')}: that loss has no reference, "
            f"and a recipe has none of that kind but loss_type=simpo"
        )
    if algorithm not in STAGES:
        raise TRLError(f"{path} is for {algorithm}, and a recipe has no such stage; translated are {', '.join(STAGES)}")
    source = Source(given.keys)
    for key, text in given.unknown.items():
        if key not in {"model_name_or_path", "dataset_name", "dataset_config", "dataset_train_split"}:
            source.note("untranslated", key, "its value is code, which is not run", value=text)
    recipe = _recipe(source, path, algorithm, given=given)
    for key, value in [*source.left()]:
        reason = next((why for why, pattern in NO_EFFECT.items() if re.fullmatch(pattern, key)), None)
        is_off = value in (None, False, 0, "", "none", "no", [], {})
        if reason is not None or is_off:
            source.note("dropped", key, reason or "it is off in the file", value=value)
        else:
            source.note("untranslated", key, "no rule of the translation knows this key", value=value)
    return Translation(
        source=path,
        recipe=recipe,
        notes=tuple(source.notes),
        problems=problems_of(recipe),
        framework="TRL",
        command="import-trl",
    )


# -- The rules -----------------------------------------------------------------------------------------------------


def _recipe(source: Source, path: Path, algorithm: str, *, given: Given) -> dict[str, Any]:
    name, processes = source.take("model_name_or_path"), given.processes
    if algorithm == "ppo":
        name = source.take("sft_model_path", name)  # what the other names is the critic
    if not name:
        raise TRLError(f"{path} names no model by model_name_or_path, so it is no recipe")
    if VISION.search(str(name)) or "vlm" in path.stem:
        raise TRLError(f"{path} trains {name}, a model of images, and a recipe supports text only")
    if "diffusion" in str(name).lower():
        raise TRLError(f"{path} trains {name}, a diffusion model, and a recipe's policy predicts the next token")
    stage_name = STAGES[algorithm]
    rows, accumulated = source.take("per_device_train_batch_size", 8), source.take("gradient_accumulation_steps", 1)
    batch = rows * accumulated * processes
    source.note("fill_in", "cluster.gpus_per_node", "theirs is the number of processes of accelerate", value=processes)
    if stage_name == "grpo":
        stage = _grpo(source, algorithm, rows=rows, accumulated=accumulated, processes=processes)
    elif stage_name == "ppo":
        stage = _ppo(source, batch=batch)
    elif stage_name == "distill":
        stage = _distill(source, algorithm, batch=batch)
    elif algorithm == "online_dpo":
        stage = _online_dpo(source, batch=batch)
    else:
        stage = {**_offline(source, algorithm), "batch_size": batch}
    steps = stage.get("steps_per_generation", 1)
    most, epochs = source.take("max_steps", -1), source.take("num_train_epochs", 3.0)
    if "max_num_steps" in stage:
        pass
    elif isinstance(most, int) and most > 0:
        stage["max_num_steps"] = max(most // steps, 1) * steps
    else:
        stage["max_num_epochs"] = epochs
    rate = RATES.get(algorithm, RATES.get(stage_name, 1e-6))
    stage["optimizer"] = _optimizer(source, rate=rate, steps=stage.get("max_num_steps", MOST_STEPS))
    if stage_name == "ppo":
        stage["critic"] = {"optimizer": dict(stage["optimizer"])}
    if (turns := source.take("max_tool_calling_iterations")) and stage_name == "grpo":
        stage["max_turns"] = turns + 1
    period = source.take("eval_steps", 0)
    every = period if source.take("eval_strategy", "no") == "steps" else 0
    saves = source.take("save_steps", 500)
    trackers = [each for each in listed(source.take("report_to") or []) if each not in {"none", "all"}]
    if unknown := [str(each) for each in trackers if each not in TRACKERS]:
        reason = f"metrics go to the log, {', '.join(TRACKERS)}"
        source.note("untranslated", "report_to", reason, value=", ".join(unknown))
    run_name = str(source.take("run_name") or path.stem)
    recipe: dict[str, Any] = {
        "run_dir": str(source.take("output_dir") or f"runs/{path.stem}"),
        "seed": source.take("seed", 42),
        "policy": {
            **_policy(source, str(name), rows=rows),
            "generation": _generation(source, algorithm, samples=stage_name in SAMPLES or algorithm == "online_dpo"),
        },
        "data": _data(source, given, stage_name),
        "evaluation": {"every": every if isinstance(every, int) else 0},
        "cluster": {"runtime": "ray", "gpus_per_node": processes},
        "checkpointing": {"save_period": saves if isinstance(saves, int) and saves >= 1 else 0},
        "logger": {"tensorboard_enabled": "tensorboard" in trackers},
    }
    for name, keys in TRACKERS.items():
        if keys and name in trackers:
            recipe["logger"] |= {f"{name}_enabled": True, name: dict(zip(keys, ("trl", run_name), strict=True))}
    if stage_name == "distill":
        reason = "rewards of the responses are logged, and nothing is learned from them"
        source.note("fill_in", "env.reward", reason, value="reward.py:score")
        recipe["env"] = {"reward": "reward.py:score"}
    if stage_name in {"grpo", "ppo"} or algorithm == "online_dpo":
        recipe["env"] = _environment(source, given, stage)
    return {**recipe, stage_name: stage}


def _environment(source: Source, given: Given, stage: dict[str, Any]) -> dict[str, Any]:
    """What is to be filled in where theirs is Python: an environment, or a function that rewards responses."""
    functions = listed(source.take("reward_funcs") or given.rewards)
    model = source.take("reward_model_path", source.take("reward_model_name_or_path"))
    reason = f"theirs are {', '.join(map(str, functions))}" if functions else "theirs are in their script"
    if model:
        reason = f"theirs is the model {model}; a recipe trains its own, or names a function"
    if source.take("reward_weights"):
        source.note("untranslated", "reward_weights", "name the functions in env.rewards, and these in env.weights")
    if given.environment and "max_turns" not in stage:
        stage["max_turns"] = MOST_TURNS
        reason = "theirs goes on until the model calls no tool any more"
        source.note("fill_in", "grpo.max_turns", reason, value=MOST_TURNS)
    if given.environment:
        what = f"theirs is Python, {given.environment}, rewarded by {', '.join(functions) or 'itself'}"
        reason = f"{what}; an environment here holds the conversation, and rewards it"
        source.note("fill_in", "env.environment", reason, value="environment.py:Environment")
        return {"environment": "environment.py:Environment"}
    reason += "; a function of the same arguments is taken"
    source.note("fill_in", "env.reward", reason, value="reward.py:score")
    return {"reward": "reward.py:score"}


def _grpo(source: Source, algorithm: str, *, rows: int, accumulated: int, processes: int) -> dict[str, Any]:
    generations = source.take("num_generations", 2 if algorithm == "rloo" else 8)
    each = source.take("steps_per_generation") or accumulated
    if total := source.take("generation_batch_size"):
        each = max(total // (rows * processes), 1)
    prompts = max(rows * processes * each // generations, 1)
    if rows * processes * each % generations:
        source.note(
            "fill_in",
            "grpo.num_prompts",
            f"{rows * processes * each} responses are no multiple of {generations}",
            value=prompts,
        )
    low = source.take("epsilon", 0.2)
    kind = source.take("loss_type", "dapo")
    loss = LOSSES.get(str(kind), LOSSES["dapo"])
    if kind not in LOSSES:
        source.note("untranslated", "loss_type", "dapo is used instead", value=kind)
    ratio: dict[str, Any] = {"clip_low": low, "clip_high": source.take("epsilon_high") or low}
    ratio |= {"surrogate": loss["surrogate"]} if "surrogate" in loss else {}
    if delta := source.take("delta"):
        ratio["dual_clip"] = delta
    if str(source.take("importance_sampling_level", "token")).startswith("sequence") or algorithm == "gspo":
        ratio["level"] = "sequence"
    # Groups of equal rewards count in theirs, too.
    objective: dict[str, Any] = {
        "ratio": ratio,
        "aggregation": loss["aggregation"],
        "selection": {"groups_without_signal": "keep"},
    }
    if loss["aggregation"] == "seq-mean-token-sum-norm":
        objective["max_length"] = source.peek("max_completion_length", 256)
    if beta := source.take("beta", 0.05 if algorithm == "rloo" else 0.0):
        objective["kl"] = {"weight": beta, "estimator": "k3"}
    scale = source.take("scale_rewards", default=True)
    objective["advantage"] = (
        {"baseline": "leave_one_out", "scale": "none"}
        if algorithm == "rloo"
        else {"baseline": "group_mean", "scale": "none" if scale in (False, "none") else "group_std"}
    )
    if scale == "batch":
        source.note("untranslated", "scale_rewards", "rewards are divided by the deviation of their group", value=scale)
    if source.take("mask_truncated_completions"):
        objective["selection"]["mask_truncated"] = True
    if {"top_p", "top_k", "min_p"} & source.data.keys():
        ratio["proximal"] = "recomputed"
    steps = max(each // accumulated, 1) * source.take("num_iterations", 1)
    ours: dict[str, Any] = {
        "num_prompts": prompts,
        "num_generations_per_prompt": generations,
        "steps_per_generation": steps,
        "objective": objective,
    }
    if algorithm == "async_grpo":  # their staleness counts syncs of weights, each after a step
        ours["async_grpo"] = {"max_staleness": source.take("max_staleness", 4)}
        ratio["proximal"] = "sampler"
    return ours


def _ppo(source: Source, *, batch: int) -> dict[str, Any]:
    epochs = source.take("num_ppo_epochs", 4)
    steps = source.take("num_mini_batches", 1) * epochs
    clip = source.take("cliprange", 0.2)
    objective: dict[str, Any] = {
        "ratio": {"clip_low": clip, "clip_high": clip, "proximal": "recomputed"},
        "kl": {
            "weight": source.take("kl_coef", 0.05),
            "estimator": source.take("kl_estimator", "k1"),
            "place": "reward",
        },
    }
    source.note("untranslated", "missing_eos_penalty", "the reward function has to take it off")
    source.note("untranslated", "vf_coef", "the critic is a model of its own here, with an optimizer of its own")
    source.note("untranslated", "whiten_rewards", "rewards are taken as they are")
    stage: dict[str, Any] = {
        "num_prompts": batch,
        "steps_per_generation": steps,
        "num_epochs": epochs,
        "value": {
            "gamma": source.take("gamma", 1.0),
            "lam": source.take("lam", 0.95),
            "clip": source.take("cliprange_value", 0.2),
        },
        "objective": objective,
    }
    if isinstance(episodes := source.take("total_episodes"), int):
        stage["max_num_steps"] = max(-(-episodes // batch), 1) * steps
    return stage


def _distill(source: Source, algorithm: str, *, batch: int) -> dict[str, Any]:
    if not (teacher := source.take("teacher_model_name_or_path")):
        raise TRLError("teacher_model_name_or_path is missing, and a teacher is what distillation learns from")
    if algorithm == "gkd" and (share := source.take("lmbda", 0.5)) != 1:
        source.note("untranslated", "lmbda", "every step is on responses of the student here", value=share)
    source.note("untranslated", "seq_kd", "every step is on responses of the student here")
    reason = "theirs compares whole vocabularies; ours as many tokens of the teacher, and the rest as one"
    source.note("fill_in", "distill.k", reason, value=64)
    generations = source.take("num_generations", 1)
    return {
        "num_prompts": max(batch // generations, 1),
        "num_generations_per_prompt": generations,
        "beta": source.take("beta", 0.5 if algorithm == "gkd" else 1.0),
        "k": 64,
        "teacher": {
            "model_name": str(teacher),
            **({"revision": str(revision)} if (revision := source.take("teacher_model_revision")) else {}),
        },
    }


def _online_dpo(source: Source, *, batch: int) -> dict[str, Any]:
    ours: dict[str, Any] = {
        "pairs": "online",
        "num_prompts": batch,
        "num_generations_per_prompt": 2,
        "pairs_per_prompt": 1,
        "beta": source.take("beta", 0.1),
        "loss": "ipo" if source.take("loss_type", "sigmoid") == "ipo" else "sigmoid",
    }
    source.note("untranslated", "missing_eos_penalty", "the reward function has to take it off")
    if (most := source.peek("max_steps", -1)) < 1:
        most, epochs = 1000, source.take("num_train_epochs", 3.0)
        reason = f"theirs is {epochs:g} epochs: so many times the rows, divided by num_prompts={batch}"
        source.note("fill_in", "dpo.max_num_steps", reason, value=most)
    return {**ours, "max_num_steps": most}


def _offline(source: Source, algorithm: str) -> dict[str, Any]:
    """The keys of a stage on given rows."""
    source.note("dropped", "max_length", "a row that is longer than the model's context is data.on_bad_row")
    match algorithm:
        case "sft":
            if source.take("packing"):
                source.note("dropped", "packing", "rows are packed by policy.dtensor_cfg.sequence_packing")
            return {"train_on": "assistant"} if source.take("assistant_only_loss") else {}
        case "dpo":
            ours: dict[str, Any] = {"pairs": "data", "beta": source.take("beta", 0.1)}
            kinds = listed(source.take("loss_type", "sigmoid"))
            weights = listed(source.take("loss_weights") or [1.0] * len(kinds))
            if kinds[1:] == ["sft"] and len(weights) == 2 and weights[0]:
                ours["nll_weight"] = weights[1] / weights[0]
                kinds = kinds[:1]
            if len(kinds) == 1 and kinds[0] in PAIR_LOSSES:
                ours["loss"] = PAIR_LOSSES[kinds[0]] or kinds[0]
            else:
                source.note("untranslated", "loss_type", "sigmoid is used instead", value=kinds)
            smoothing = source.take("label_smoothing", 0.0) or (1e-3 if ours.get("loss") == "exo" else 0.0)
            return ours | ({"label_smoothing": smoothing} if smoothing else {})
        case "cpo":
            return {
                "pairs": "data",
                "loss": source.take("loss_type"),
                "beta": source.take("beta", 0.1),
                "gamma": source.take("simpo_gamma", 0.5),
                "nll_weight": source.take("cpo_alpha", 1.0),
            }
        case "kto":
            return {name: source.take(name, usual) for name, usual in KTO.items()}
        case "orpo":
            return {"odds_ratio_weight": source.take("beta", 0.1)}
    return {"centering_weight": source.take("center_rewards_coefficient") or 0.0}


KTO = {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}


def _optimizer(source: Source, *, rate: float, steps: int) -> dict[str, Any]:
    ours: dict[str, Any] = {
        "lr": source.take("learning_rate", rate),
        "weight_decay": source.take("weight_decay", 0.0),
        "max_grad_norm": source.take("max_grad_norm", 1.0),
        "betas": [source.take("adam_beta1", 0.9), source.take("adam_beta2", 0.999)],
    }
    warmup, share = source.take("warmup_steps", 0), source.take("warmup_ratio", 0.0)
    if isinstance(warmup, float) and 0 < warmup < 1:
        warmup, share = 0, warmup
    if warmup and warmup < steps:
        ours["warmup_steps"] = int(warmup)
    elif share and steps < MOST_STEPS:
        ours["warmup_steps"] = int(share * steps)
    elif share or warmup:
        source.note(
            "untranslated", "warmup_ratio", "a stage of epochs needs warmup_steps as a number", value=share or warmup
        )
    if not str(name := source.take("optim", "adamw_torch")).startswith("adamw"):
        source.note("untranslated", "optim", "AdamW is used instead", value=name)
    match source.take("lr_scheduler_type", "linear"):
        case "constant" | "constant_with_warmup":
            ours["schedule"] = "constant"
        case "cosine" | "linear" as style:
            ours |= {"schedule": style, "final_lr_ratio": 0.0}
        case "cosine_with_min_lr":
            options = source.take("lr_scheduler_kwargs") or {}
            ours |= {"schedule": "cosine", "final_lr_ratio": options.get("min_lr_rate", 0.0)}
        case style:
            source.note("untranslated", "lr_scheduler_type", "linear is used instead", value=style)
            ours["final_lr_ratio"] = 0.0
    return ours


def _policy(source: Source, name: str, *, rows: int) -> dict[str, Any]:
    ours: dict[str, Any] = {"model_name": name, "padded_vocabulary": True}
    if revision := source.take("model_revision"):
        ours |= {"revision": str(revision)} if revision != "main" else {}
    if source.take("trust_remote_code"):
        ours["trust_remote_code"] = True
    dtype = source.take("dtype", source.take("torch_dtype"))
    backend: dict[str, Any] = {"device": "cuda", "micro_batch_size": rows}
    if source.take("bf16", default=True) or dtype == "bfloat16":
        backend["precision"] = "bfloat16"
    if source.take("gradient_checkpointing", default=True):
        backend["activation_checkpointing"] = "full"
    for key in ("load_in_4bit", "load_in_8bit"):
        if source.take(key):
            source.note("untranslated", key, "weights are not quantized here", value=True)
    if source.take("use_peft"):
        backend["lora_cfg"] = {"rank": source.take("lora_r", 16), "alpha": source.take("lora_alpha", 32)}
        targets = source.take("lora_target_modules")
        if targets and targets != "all-linear":
            backend["lora_cfg"]["target_modules"] = listed(targets)
        if source.take("lora_dropout", 0.05):
            source.note(
                "untranslated", "lora_dropout", "without dropout here, which would make two functions of one model"
            )
        source.note("dropped", "lora_task_type", "the backend decides about it")
    for key in ("lora_r", "lora_alpha", "lora_target_modules", "lora_dropout"):
        source.take(key)
    return {**ours, "dtensor_cfg": backend}


SAMPLES = {"grpo", "ppo", "distill"}
"""Stages that always sample."""
MOST_TURNS = 8
LENGTHS = {"gkd": 128, "distillation": 512, "online_dpo": 64, "ppo": 53}
"""The most tokens of a response where it is not 256."""
TEMPERATURES = {"gkd": 0.9, "online_dpo": 0.9, "ppo": 0.7}


def _generation(source: Source, algorithm: str, *, samples: bool) -> dict[str, Any]:
    key = {"gkd": "max_new_tokens", "online_dpo": "max_new_tokens", "ppo": "response_length"}.get(algorithm)
    ours: dict[str, Any] = {
        "max_new_tokens": source.take(key or "max_completion_length", LENGTHS.get(algorithm, 256)),
        "temperature": source.take("temperature", TEMPERATURES.get(algorithm, 1.0)),
    }
    if algorithm == "distillation":
        source.data.setdefault("top_p", 0.95)
    source.note("dropped", "max_prompt_length", "data.on_bad_row is about prompts that do not fit")
    for name, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        if (value := source.take(name)) not in (None, off, -1):
            ours[name] = value
    vllm = {
        "gpu_memory_utilization": source.take("vllm_gpu_memory_utilization"),
        "tensor_parallel_size": source.take("vllm_tensor_parallel_size"),
    }
    if samples and (source.peek("use_vllm") or algorithm == "async_grpo"):
        ours |= {"backend": "vllm", "vllm_cfg": {name: value for name, value in vllm.items() if value is not None}}
    return ours


def _data(source: Source, given: Given, stage: str) -> dict[str, Any]:
    dataset = source.take("dataset_name")
    if not dataset:
        reason = "theirs is in their script, or a mixture of its own"
        source.note("fill_in", "data.source", reason, value="rows.jsonl")
        return {"source": "rows.jsonl"}
    if given.maps_rows:
        reason = "theirs makes rows of its own of it; name the columns in data.columns, or a function here"
        source.note("fill_in", "data.source", reason, value=dataset)
    elif stage == "distill":
        source.note("fill_in", "data.source", "it needs a column prompt; see data.columns", value=dataset)
    ours: dict[str, Any] = {"source": str(dataset), "split": str(source.take("dataset_train_split", "train"))}
    if name := source.take("dataset_config"):
        ours["name"] = str(name)
    test = source.take("dataset_test_split", "test")
    if source.peek("eval_strategy", "no") != "no":
        ours["held_out_split"] = str(test)
    if options := source.take("chat_template_kwargs"):
        ours["chat_template_kwargs"] = options
    if prompt := source.take("system_prompt"):
        ours["system_prompt"] = str(prompt)
    return ours
