"""Translate TRL's configurations into recipes: a YAML file for `trl grpo --config`, or the arguments of a command.

    file -> flat keys of TRL's dataclasses -> rules, section by section -> our recipe

A command is found in a shell script, in the docstring of one of TRL's example scripts, or in any text. Every key is
translated, or noted with a reason. What is left out has TRL's default, where ours differs. TRL is not imported.
"""

import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from rl_launcher.errors import Refusal
from rl_launcher.import_nemo_rl.read import Source
from rl_launcher.import_nemo_rl.translate import MOST_STEPS, VISION, Translation, problems_of

STAGES = {
    "grpo": "grpo",
    "rloo": "grpo",
    "gspo": "grpo",
    "sft": "sft",
    "dpo": "dpo",
    "kto": "kto",
    "orpo": "orpo",
    "reward": "reward_model",
    "reward_modeling": "reward_model",
}
"""Our stage of each of their commands and scripts."""
COMMAND = re.compile(r"(?:\btrl\s+|(?:examples|trl)/scripts/(?:\w+/)?)(\w+)(?:\.py)?\s+(--.*)")
PROCESSES = re.compile(r"--num_processes[ =](\d+)")
RATES = {"sft": 2e-5, "reward_model": 1e-4}
"""Default learning rates that are not 1e-6."""
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
        r"log.*|logging_.*|disable_tqdm|push_to_hub|hub_.*|num_completions_to_print"
    ),
    "the backend decides about it": (
        r"attn_.*|gradient_checkpointing_kwargs|fsdp.*|deepspeed|ddp_.*|use_liger_.*|tf32|dataloader_.*|packing_.*"
        r"|remove_unused_columns|per_device_eval_batch_size|accelerator_config|torch_compile.*|padding_free"
        r"|dataset_num_proc|pad_to_multiple_of|average_tokens_across_devices|precompute_.*|disable_dropout"
    ),
    "the engine decides about it": (
        r"use_vllm|vllm_(mode|server_.*|enable_sleep_mode|max_model_length|model_impl|sync_.*)|ds3_.*|cache_implementation"
        r"|use_transformers_paged"
    ),
    "a run always saves what it needs to resume": (
        r"save_strategy|save_total_limit|save_only_model|resume_.*|overwrite_.*|do_.*"
    ),
}
"""Patterns of keys without effect here, by the reason."""


class TRLError(Refusal):
    """A file that cannot be read, or that no recipe of ours corresponds to."""


def translate(file: str | Path, *, algorithm: str | None = None) -> Translation:
    """Translate a YAML configuration, or the first command in a text.

    Args:
        file: the YAML, the shell script or the example script.
        algorithm: `grpo`, `sft`, `dpo`, `kto`, `orpo` or `reward`; needed for a YAML file, whose keys do not say it.

    Raises:
        TRLError: it cannot be read, holds no command, is of another trainer, or trains on images.
    """
    path = Path(file)
    given, found, processes = read(path)
    algorithm = algorithm or found
    if algorithm is None:
        raise TRLError(f"{path} does not say which trainer it is for; name one of {', '.join(STAGES)} by --algorithm")
    if "vlm" in algorithm.split("_"):
        raise TRLError(f"{path} is for {algorithm}, which trains on images, and a recipe supports text only")
    if algorithm.startswith("sft_"):
        algorithm = "sft"  # a script for one model, whose name it ends in
    if algorithm not in STAGES:
        raise TRLError(f"{path} is for {algorithm}, and a recipe has no such stage; {', '.join(STAGES)} are translated")
    source = Source(given)
    recipe = _recipe(source, path, algorithm, processes=processes)
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


def read(path: Path) -> tuple[dict[str, Any], str | None, int]:
    """Return the keys of a file, the command that they are for if the file says it, and its number of processes.

    Raises:
        TRLError: it cannot be read, or holds neither a configuration nor a command.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TRLError(f"{path} cannot be read: {error}") from error
    if path.suffix in {".yaml", ".yml"}:
        try:
            content = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise TRLError(f"{path} is not valid YAML: {error}") from error
        if not isinstance(content, dict):
            raise TRLError(f"{path} is no configuration: it holds no keys")
        return (
            {str(key): _value(str(value)) if isinstance(value, str) else value for key, value in content.items()},
            None,
            1,
        )
    joined = re.sub(r"\\\s*\n\s*", " ", text)
    command = COMMAND.search(joined)
    if command is None:
        raise TRLError(f"{path} holds no command such as `trl grpo --model_name_or_path ...`")
    line = joined[joined.rfind("\n", 0, command.start()) + 1 : command.start()]
    processes = PROCESSES.search(line)
    return _arguments(command[2]), command[1], int(processes[1]) if processes else 1


def _arguments(text: str) -> dict[str, Any]:
    """`--key value`, `--key=value`, `--key a b` and `--flag` as data."""
    found: dict[str, Any] = {}
    words = shlex.split(text, comments=True, posix=True) if text.count('"') % 2 == 0 else text.split()
    key = ""
    for word in words:
        if word.startswith("--"):
            key, equals, value = word[2:].replace("-", "_").partition("=")
            key, negated = (key[3:], True) if key.startswith("no_") else (key, False)
            found[key] = _value(value) if equals else not negated
        elif key and re.match(r"[\w./:{\[~+-]", word):
            value = _value(word)
            found[key] = value if found[key] is True else [*_listed(found[key]), value]
    return found


def _value(text: str) -> Any:
    if re.fullmatch(r"[-+]?[\d.]+[eE][-+]?\d+", text):
        return float(text)
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


# -- The rules -----------------------------------------------------------------------------------------------------


def _recipe(source: Source, path: Path, algorithm: str, *, processes: int) -> dict[str, Any]:
    name, dataset = source.take("model_name_or_path"), source.peek("dataset_name")
    if not name:
        raise TRLError(f"{path} names no model by model_name_or_path, so it is no recipe")
    if VISION.search(str(name)) or "vlm" in path.stem:
        raise TRLError(f"{path} trains {name}, a model of images, and a recipe supports text only")
    stage_name = STAGES[algorithm]
    rows, accumulated = source.take("per_device_train_batch_size", 8), source.take("gradient_accumulation_steps", 1)
    batch = rows * accumulated * processes
    source.note("fill_in", "cluster.gpus_per_node", "theirs is the number of processes of accelerate", value=processes)
    if stage_name == "grpo":
        stage, steps = _grpo(source, algorithm, rows=rows, accumulated=accumulated, processes=processes), 1
        steps = stage["steps_per_generation"]
    else:
        stage, steps = {**_offline(source, stage_name), "batch_size": batch}, 1
    most, epochs = source.take("max_steps", -1), source.take("num_train_epochs", 3.0)
    if isinstance(most, int) and most > 0:
        stage["max_num_steps"] = max(most // steps, 1) * steps
    else:
        stage["max_num_epochs"] = epochs
    stage["optimizer"] = _optimizer(source, stage_name, steps=stage.get("max_num_steps", MOST_STEPS))
    period = source.take("eval_steps", 0)
    every = period if source.take("eval_strategy", "no") == "steps" else 0
    saves = source.take("save_steps", 500)
    trackers = [each for each in _listed(source.take("report_to") or []) if each not in {"none", "all"}]
    if unknown := [str(each) for each in trackers if each not in TRACKERS]:
        reason = f"metrics go to the log, {', '.join(TRACKERS)}"
        source.note("untranslated", "report_to", reason, value=", ".join(unknown))
    run_name = str(source.take("run_name") or path.stem)
    recipe: dict[str, Any] = {
        "run_dir": str(source.take("output_dir") or f"runs/{path.stem}"),
        "seed": source.take("seed", 42),
        "policy": {**_policy(source, str(name), rows=rows), "generation": _generation(source)},
        "data": _data(source, dataset),
        "evaluation": {"every": every if isinstance(every, int) else 0},
        "cluster": {"runtime": "ray", "gpus_per_node": processes},
        "checkpointing": {"save_period": saves if isinstance(saves, int) and saves >= 1 else 0},
        "logger": {"tensorboard_enabled": "tensorboard" in trackers},
    }
    for name, keys in TRACKERS.items():
        if keys and name in trackers:
            recipe["logger"] |= {f"{name}_enabled": True, name: dict(zip(keys, ("trl", run_name), strict=True))}
    if stage_name == "grpo":
        functions = _listed(source.take("reward_funcs") or [])
        reason = f"theirs are {', '.join(map(str, functions))}" if functions else "theirs are in their script"
        source.note(
            "fill_in", "env.reward", f"{reason}; a function of the same arguments is taken", value="reward.py:score"
        )
        recipe["env"] = {"reward": "reward.py:score"}
        if source.take("reward_weights"):
            source.note("untranslated", "reward_weights", "name the functions in env.rewards, and these in env.weights")
    return {**recipe, stage_name: stage}


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
    return {
        "num_prompts": prompts,
        "num_generations_per_prompt": generations,
        "steps_per_generation": max(each // accumulated, 1) * source.take("num_iterations", 1),
        "objective": objective,
    }


def _offline(source: Source, stage: str) -> dict[str, Any]:
    """The keys of a stage on given rows."""
    source.note("dropped", "max_length", "a row that is longer than the model's context is data.on_bad_row")
    match stage:
        case "sft":
            if source.take("packing"):
                source.note("dropped", "packing", "rows are packed by policy.dtensor_cfg.sequence_packing")
            return {"train_on": "assistant"} if source.take("assistant_only_loss") else {}
        case "dpo":
            ours: dict[str, Any] = {"pairs": "data", "beta": source.take("beta", 0.1)}
            kind = source.take("loss_type", "sigmoid")
            if kind in {"sigmoid", "hinge", "ipo", "robust"}:
                ours["loss"] = kind
            else:
                source.note("untranslated", "loss_type", "sigmoid is used instead", value=kind)
            return ours | ({"label_smoothing": smooth} if (smooth := source.take("label_smoothing", 0.0)) else {})
        case "kto":
            return {name: source.take(name, usual) for name, usual in KTO.items()}
        case "orpo":
            return {"odds_ratio_weight": source.take("beta", 0.1)}
    return {"centering_weight": source.take("center_rewards_coefficient") or 0.0}


KTO = {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}


def _optimizer(source: Source, stage: str, *, steps: int) -> dict[str, Any]:
    ours: dict[str, Any] = {
        "lr": source.take("learning_rate", RATES.get(stage, 1e-6)),
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
            backend["lora_cfg"]["target_modules"] = _listed(targets)
        if source.take("lora_dropout", 0.05):
            source.note(
                "untranslated", "lora_dropout", "without dropout here, which would make two functions of one model"
            )
        source.note("dropped", "lora_task_type", "the backend decides about it")
    for key in ("lora_r", "lora_alpha", "lora_target_modules", "lora_dropout"):
        source.take(key)
    return {**ours, "dtensor_cfg": backend}


def _generation(source: Source) -> dict[str, Any]:
    ours: dict[str, Any] = {
        "max_new_tokens": source.take("max_completion_length", 256),
        "temperature": source.take("temperature", 1.0),
    }
    source.note("dropped", "max_prompt_length", "data.on_bad_row is about prompts that do not fit")
    for name, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        if (value := source.take(name)) not in (None, off, -1):
            ours[name] = value
    vllm = {
        "gpu_memory_utilization": source.take("vllm_gpu_memory_utilization"),
        "tensor_parallel_size": source.take("vllm_tensor_parallel_size"),
    }
    if source.peek("use_vllm"):
        ours |= {"backend": "vllm", "vllm_cfg": {name: value for name, value in vllm.items() if value is not None}}
    return ours


def _data(source: Source, dataset: Any) -> dict[str, Any]:
    source.take("dataset_name")
    if not dataset:
        reason = "theirs is in their script, or a mixture of its own"
        source.note("fill_in", "data.source", reason, value="rows.jsonl")
        return {"source": "rows.jsonl"}
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
