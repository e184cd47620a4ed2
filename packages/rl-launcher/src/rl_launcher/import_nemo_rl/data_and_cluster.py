"""Their data, environments, cluster, checkpoints and loggers as our sections."""

from typing import Any

from rl_launcher.import_nemo_rl.read import Source, key_map

MATH = "rl_algorithms.environments.math:math_match"
REWARD = "reward.py:score"
ONLY_EVALUATES = "scores held-out responses only; nothing is trained by it"
ROWS, PAIRS = "rows.jsonl", "pairs.jsonl"
OF_DATA = ("dataset_name", "data_path", "input_key", "output_key", "split", "split_validation_size", "seed")
PAIR_KEYS = {"prompt": "prompt_key", "chosen": "chosen_key", "rejected": "rejected_key"}


def data(source: Source, algorithm: str) -> dict[str, Any]:
    """Return `data`; dpo reads pairs of responses, everything else prompts."""
    train = source.peek("data.train")
    if isinstance(train, list):
        source.untranslated("data.train", f"a recipe reads one data set; join these {len(train)} into one file")
        train = {}
    written = source.peek("data") or {}  # older files have these directly below `data`
    old = {name: written[name] for name in ("dataset_name", "data_path", "input_key", "output_key") if name in written}
    if "train_data_path" in written:
        old["data_path"] = source.take("data.train_data_path")
    train = {**(source.peek("data.default") or {}), **(train or {}), **old}
    ours = dict(_source_of(source, train, prefers=algorithm == "dpo"))
    share = train.get("split_validation_size") or 0
    if 0 < share < 1:
        ours["held_out_share"] = share
    elif share:
        source.note("fill_in", "data.held_out_share", f"theirs holds out {share} rows, ours a share of them", value=0.1)
    for key in (*OF_DATA, *PAIR_KEYS.values()):
        for section in ("data.train", "data.default", "data"):
            source.take(f"{section}.{key}")
    _prompts(source, train)
    return ours


def _source_of(source: Source, train: dict[str, Any], *, prefers: bool) -> dict[str, Any]:
    """Return where the rows are and what their columns are called."""
    name, path = train.get("dataset_name"), train.get("data_path")
    unknown = f"what {name} is made of is in their code"
    if prefers and path and name == "PreferenceDataset":
        unknown = f"{path} ranks responses within a row, ours has prompt, chosen and rejected"
    elif path:
        names = {"prompt": train.get("input_key", "input"), "answer": train.get("output_key", "output")}
        if prefers:
            names = {name: str(train[key]) for name, key in PAIR_KEYS.items() if train.get(key, name) != name}
        ours: dict[str, Any] = {"source": str(path), "columns": names}
        return ours | ({"split": str(train["split"])} if train.get("split") else {})
    elif name in key_map()["datasets"] and not prefers:
        known: dict[str, Any] = key_map()["datasets"][str(name)]
        return known
    rows = PAIRS if prefers else ROWS
    source.note("fill_in", "data.source", unknown, value=rows)
    return {"source": rows}


def _prompts(source: Source, train: dict[str, Any]) -> None:
    for key in ("prompt_file", "system_prompt_file"):
        if train.get(key):
            reason = "prompts are used as they are: write the text into them"
            source.note("untranslated", f"data.{key}", reason, value=train[key])
        for section in ("data.train", "data.default", "data"):
            source.take(f"{section}.{key}")


def environment(source: Source, algorithm: str) -> dict[str, Any]:
    """Return `env`; nothing for an algorithm without rewards, unless their environment is a known one."""
    theirs = source.peek("env") or {}
    if set(theirs) == {"math"} and theirs["math"].get("math_verify_impl", "hf_math_verify") == "hf_math_verify":
        source.take("env.math.math_verify_impl")
        return {"env": {"reward": MATH}}
    for name in theirs:
        reason = "environments are Python: name a function in env.reward, or a class in env.environment"
        source.untranslated(f"env.{name}", reason)
    if algorithm in {"sft", "dpo"}:
        return {}
    what = "the function that scores a response" if algorithm == "grpo" else ONLY_EVALUATES
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
        if metric in {"val:val_loss", "val_loss"} and source.peek("sft") is not None:
            ours |= {"keep_top_k": best, "metric_name": "held_out_loss", "higher_is_better": False}
        elif metric in {"val:accuracy", "val_reward", None}:
            ours["keep_top_k"] = best
            if source.peek("dpo") is not None:
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
