"""Their data, environments, cluster, checkpoints and loggers as our sections."""

import re
from pathlib import Path
from string import Formatter
from typing import Any

from rl_launcher.import_nemo_rl.read import Source, key_map

MATH = "rl_algorithms.environments.math:math_match"
GSM8K = "rl_algorithms.environments.matching:normalised_match"
"""Of answers that end in `#### 72`."""
REWARD = "reward.py:score"
ONLY_EVALUATES = "scores held-out responses only; nothing is trained by it"
ROWS, PAIRS = "rows.jsonl", "pairs.jsonl"
OF_DATA = ("dataset_name", "data_path", "input_key", "output_key", "split", "split_validation_size", "seed", "subset")
MADE_IN_THEIR_CODE = ("NemoGymDataset",)
"""Data sets whose files have rows that only their code reads."""
PAIR_KEYS = {"prompt": "prompt_key", "chosen": "chosen_key", "rejected": "rejected_key"}


def data(source: Source, algorithm: str, *, folder: Path) -> dict[str, Any]:
    """Return `data`; algorithms that compare read pairs of responses, everything else prompts.

    Args:
        source: their file.
        algorithm: of the stage.
        folder: of their file; prompt files are looked up in the folders above it.
    """
    prefers, given = algorithm in {"dpo", "rm"}, source.peek("data.train")
    several = given if isinstance(given, list) else [given]
    written = source.peek("data") or {}  # older files have these directly below `data`
    old = {name: written[name] for name in ("dataset_name", "data_path", "input_key", "output_key") if name in written}
    if "train_data_path" in written:
        old["data_path"] = source.take("data.train_data_path")
    sets = [{**(source.peek("data.default") or {}), **(each or {}), **old} for each in several]
    train = sets[0]
    ours = dict(_source_of(source, train, prefers=prefers))
    if len(sets) > 1:
        _mix(source, sets[1:], ours, prefers=prefers)
    share = train.get("split_validation_size") or 0
    if 0 < share < 1 and not _validation_sets(source):
        ours["held_out_share"] = share
    elif share and not _validation_sets(source):
        source.note("fill_in", "data.held_out_share", f"theirs holds out {share} rows, ours a share of them", value=0.1)
    for key in (*OF_DATA, *PAIR_KEYS.values()):
        for section in ("data.train", "data.default", "data"):
            source.take(f"{section}.{key}")
    if isinstance(given, list):
        source.take("data.train")
    ours |= _prompts(source, train, folder=folder)
    if (options := source.take("policy.tokenizer.chat_template_kwargs")) is not None and options:
        ours["chat_template_kwargs"] = options
    if source.peek("policy.tokenizer.chat_template", "") is None:
        source.take("policy.tokenizer.chat_template")
        ours["prompt_format"] = "plain"  # theirs joins the texts of messages then
    return ours


def _mix(source: Source, others: list[dict[str, Any]], ours: dict[str, Any], *, prefers: bool) -> None:
    """Add further training sets, which share the columns of the first."""
    for number, each in enumerate(others, start=2):
        found = _known_set(each, prefers=prefers)
        name = f"set{number}"
        if found is None or found.get("columns", {}) != ours.get("columns", {}) or "name" in found:
            what = each.get("dataset_name") or each.get("data_path")
            reason = (
                f"{what} has other columns, or is made in their code; add it to data.mix in the columns of data.source"
            )
            source.note("untranslated", "data.train", reason, value=what)
            continue
        ours.setdefault("mix", {})[name] = found["source"]
        if "split" in found:
            ours.setdefault("mix_splits", {})[name] = found["split"]


def _validation_sets(source: Source) -> list[dict[str, Any]]:
    given = source.peek("data.validation")
    several = given if isinstance(given, list) else [] if given is None else [given]
    return [{**(source.peek("data.default") or {}), **each} for each in several if isinstance(each, dict)]


def validation(source: Source, algorithm: str) -> dict[str, Any]:
    """Return `evaluation.sets`, or for pairs `data.held_out`: what theirs measures on instead of a part of the data."""
    sets, names = _validation_sets(source), set[str]()
    source.take("data.validation")
    ours: dict[str, Any] = {}
    for each in sets:
        found = _known_set(each, prefers=algorithm in {"dpo", "rm"})
        if found is None:
            reason = "what it is made of is in their code; name its rows in evaluation.sets, or in data.held_out"
            source.note("untranslated", "data.validation", reason, value=each.get("dataset_name") or each)
        elif algorithm in {"sft", "dpo", "rm"}:
            ours["held_out"] = found["source"]
            ours |= {"held_out_split": found["split"]} if "split" in found else {}
        else:
            name = re.sub(r"\W", "_", str(each.get("dataset_name") or Path(str(each["data_path"])).stem)).lower()
            name = name if name not in names and name.isidentifier() else f"set{len(names) + 1}"
            names.add(name)
            if (repeat := each.get("repeat", 1)) > 1:
                found = {**found, "samples_per_prompt": repeat}
            ours[name] = found
    return ours


def _known_set(each: dict[str, Any], *, prefers: bool) -> dict[str, Any] | None:
    """Where the rows of a set are and what their columns are called; None if only their code knows."""
    name, path = each.get("dataset_name"), each.get("data_path")
    split = {"split": str(each["split"])} if each.get("split") else {}
    if prefers and path and name == "PreferenceDataset":
        return None
    if path and name not in MADE_IN_THEIR_CODE:
        names = {"prompt": each.get("input_key", "input"), "answer": each.get("output_key", "output")}
        if prefers:
            names = {ours: str(each[key]) for ours, key in PAIR_KEYS.items() if each.get(key, ours) != ours}
        return {"source": str(path), "columns": names, **split}
    table: dict[str, Any] = key_map()["preferences" if prefers else "datasets"]
    return None if name not in table else {**table[str(name)], **split}


def _source_of(source: Source, train: dict[str, Any], *, prefers: bool) -> dict[str, Any]:
    """Return where the rows are and what their columns are called."""
    if (found := _known_set(train, prefers=prefers)) is not None:
        return found
    name, path = train.get("dataset_name"), train.get("data_path")
    unknown = f"what {name} is made of is in their code"
    if prefers and path and name == "PreferenceDataset":
        unknown = f"{path} ranks responses within a row, ours has prompt, chosen and rejected"
    rows = PAIRS if prefers else ROWS
    source.note("fill_in", "data.source", unknown, value=rows)
    return {"source": rows}


def _prompts(source: Source, train: dict[str, Any], *, folder: Path) -> dict[str, Any]:
    """Return the templates that theirs keeps in files, if the files are there; they name them from their repository."""
    ours: dict[str, Any] = {}
    for key, name in (("prompt_file", "prompt_template"), ("system_prompt_file", "system_prompt")):
        for section in ("data.train", "data.default", "data"):
            source.take(f"{section}.{key}")
        if not (written := train.get(key)):
            continue
        above = (folder.resolve(), *folder.resolve().parents)
        file = next((path for parent in above if (path := parent / str(written)).is_file()), None)
        if file is None:
            reason = f"there is no such file above {folder}: write its text into data.{name}"
            source.note("untranslated", f"data.{key}", reason, value=written)
            continue
        text = file.read_text(encoding="utf-8")
        if name == "system_prompt":
            ours[name] = text
            continue
        try:
            ours[name] = "".join(
                before.replace("{", "{{").replace("}", "}}") + ("" if field is None else "{prompt}")
                for before, field, _, _ in Formatter().parse(text)
            )
        except ValueError as error:
            reason = f"{error}: write its text into data.{name}"
            source.note("untranslated", f"data.{key}", reason, value=written)
    return ours


def environment(source: Source, algorithm: str) -> dict[str, Any]:
    """Return `env`; nothing for an algorithm without rewards, unless their environment is a known one."""
    theirs, train = source.peek("env") or {}, source.peek("data.train")
    gsm8k = isinstance(train, dict) and train.get("dataset_name") == "gsm8k"
    if set(theirs) == {"math"} and theirs["math"].get("math_verify_impl", "hf_math_verify") == "hf_math_verify":
        source.take("env.math.math_verify_impl")
        return {"env": {"reward": GSM8K if gsm8k else MATH}}
    if theirs:
        reason = "environments are Python: name a function in env.reward, or a class in env.environment"
        source.note("untranslated", "env", reason, value=", ".join(theirs))
    if algorithm in {"sft", "dpo", "rm"}:
        return {}
    what = "the function that scores a response" if algorithm in {"grpo", "ppo"} else ONLY_EVALUATES
    source.note("fill_in", "env.reward", what, value=REWARD)
    return {"env": {"reward": REWARD}}


def evaluation(source: Source, section: str, *, steps: int) -> dict[str, Any]:
    """Return `evaluation`."""
    ours: dict[str, Any] = {"every": max(source.take(f"{section}.val_period", 0) or 0, 0) * steps}
    if prompts := source.take(f"{section}.max_val_samples"):
        ours |= {"max_prompts": prompts, "max_prompts_while_training": prompts}
    if (samples := source.take(f"{section}.val_num_generations_per_prompt", 1)) > 1:
        ours |= {"samples_per_prompt": samples, "pass_at": [1, samples]}
    return ours


def cluster(source: Source) -> dict[str, Any]:
    """Return `cluster`."""
    ours: dict[str, Any] = {"runtime": "ray", **source.copy("cluster")}
    section = "megatron_cfg" if source.peek("policy.megatron_cfg.enabled") else "dtensor_cfg"
    if variables := source.take(f"policy.{section}.env_vars"):
        ours["env_vars"] = {str(name): str(value) for name, value in variables.items()}
    return ours


def checkpointing(source: Source, *, steps: int) -> dict[str, Any]:
    """Return `checkpointing`."""
    if not source.take("checkpointing.enabled", default=True):
        return {"save_period": 0}
    ours: dict[str, Any] = {"save_period": source.take("checkpointing.save_period", 0) * steps}
    if (limit := source.take("checkpointing.checkpoint_must_save_by")) is not None:
        ours["checkpoint_must_save_by"] = str(limit)
    if (latest := source.take("checkpointing.ft_keep_latest_k")) is not None:
        ours["ft_keep_latest_k"] = max(latest, 1)
    if (best := source.take("checkpointing.keep_top_k")) is not None:
        metric = source.take("checkpointing.metric_name")
        source.take("checkpointing.higher_is_better")
        if metric in {"val:val_loss", "val_loss", "val:validation-default_loss"} and source.peek("sft") is not None:
            ours |= {"keep_top_k": best, "metric_name": "held_out_loss", "higher_is_better": False}
        elif metric in {"val:accuracy", "val_reward", "val:total_reward/mean", None}:
            ours["keep_top_k"] = best
            if source.peek("dpo") is not None or source.peek("rm") is not None:
                ours["metric_name"] = "held_out_pair_accuracy"
        else:
            reason = "our log has other names: set checkpointing.metric_name, and checkpointing.keep_top_k"
            source.untranslated("checkpointing.metric_name", f"{reason} to {best}")
    return ours


def logger(source: Source) -> dict[str, Any]:
    """Return `logger`."""
    ours: dict[str, Any] = {"tensorboard_enabled": bool(source.take("logger.tensorboard_enabled", default=False))}
    for name in ("wandb", "mlflow"):
        if source.take(f"logger.{name}_enabled", default=False):
            written = source.copy(f"logger.{name}")
            ours |= {f"{name}_enabled": True, name: {key: str(value) for key, value in written.items()}}
    return ours
