"""Their data, environments, machines, checkpoints and loggers, as our sections. It knows no algorithm and no model."""

from typing import Any

from rl_launcher.import_nemo_rl.read import Source

__all__ = ["checkpointing", "cluster", "data", "environment", "evaluation", "logger"]

# What their built-in names read, where the columns are known: the data set on the hub, its split, our columns.
DATASETS: dict[str, dict[str, Any]] = {
    "OpenMathInstruct-2": {
        "source": "nvidia/OpenMathInstruct-2",
        "split": "train_1M",
        "columns": {"prompt": "problem", "answer": "expected_answer"},
    },
    "DeepScaler": {
        "source": "agentica-org/DeepScaleR-Preview-Dataset",
        "split": "train",
        "columns": {"prompt": "problem", "answer": "answer"},
    },
    "DAPOMath17K": {
        "source": "BytedTsinghua-SIA/DAPO-Math-17k",
        "split": "train",
        "columns": {"prompt": "prompt", "answer": "reward_model.ground_truth"},
    },
}
MATH = "rl_algorithms.environments.math:math_match"
REWARD = "reward.py:score"
JUDGES_ONLY = "judges held-out answers; nothing is trained by it"
ROWS, PAIRS = "rows.jsonl", "pairs.jsonl"
OF_DATA = ("dataset_name", "data_path", "input_key", "output_key", "split", "split_validation_size", "seed")
PAIR_KEYS = {"prompt": "prompt_key", "chosen": "chosen_key", "rejected": "rejected_key"}


def data(source: Source, algorithm: str) -> dict[str, Any]:
    """Return `data`; dpo reads pairs of answers, everything else prompts."""
    train = source.peek("data.train")
    if isinstance(train, list):
        source.untranslated("data.train", f"a recipe reads one data set; join these {len(train)} into one file")
        train = {}
    train = {**(source.peek("data.default") or {}), **(train or {}), **_old_style(source)}
    ours = dict(_source_of(source, train, prefers=algorithm == "dpo"))
    share = train.get("split_validation_size") or 0
    if 0 < share < 1:
        ours["held_out_share"] = share
    elif share:
        source.note("fill_in", "data.held_out_share", f"theirs holds out {share} rows, ours a share of them", value=0.1)
    for key in (*OF_DATA, *PAIR_KEYS.values()):
        for section in ("data.train", "data.default", "data"):
            source.take(f"{section}.{key}")
    if source.peek("data.validation"):
        source.untranslated("data.validation", "held-out rows are cut from the data itself: data.held_out_share")
    _prompts(source, train)
    return ours


def _source_of(source: Source, train: dict[str, Any], *, prefers: bool) -> dict[str, Any]:
    """Return where the rows are, and how their columns are called."""
    name, path = train.get("dataset_name"), train.get("data_path")
    unknown = f"what {name} is made of is in their code"
    if prefers and path and name == "PreferenceDataset":
        unknown = f"{path} ranks answers within a row, ours has prompt, chosen and rejected"
    elif path:
        names = {"prompt": train.get("input_key", "input"), "answer": train.get("output_key", "output")}
        ours: dict[str, Any] = {"source": str(path), "columns": _of_pairs(train) if prefers else names}
        return ours | ({"split": str(train["split"])} if train.get("split") else {})
    elif name in DATASETS and not prefers:
        return DATASETS[str(name)]
    rows = PAIRS if prefers else ROWS
    source.note("fill_in", "data.source", unknown, value=rows)
    return {"source": rows}


def _of_pairs(train: dict[str, Any]) -> dict[str, str]:
    """Return where our columns are called otherwise there."""
    names = {ours: str(train.get(key, ours)) for ours, key in PAIR_KEYS.items()}
    return {ours: theirs for ours, theirs in names.items() if theirs != ours}


def _old_style(source: Source) -> dict[str, Any]:
    """Return what older files say directly below `data`."""
    written = source.peek("data") or {}
    old = {name: written[name] for name in ("dataset_name", "data_path", "input_key", "output_key") if name in written}
    if "train_data_path" in written:
        old["data_path"] = source.take("data.train_data_path")
    return old


def _prompts(source: Source, train: dict[str, Any]) -> None:
    for key in ("prompt_file", "system_prompt_file"):
        if train.get(key):
            source.note(
                "untranslated",
                f"data.{key}",
                "a row's prompt is asked as it is: write the words into it",
                value=train[key],
            )
        for section in ("data.train", "data.default", "data"):
            source.take(f"{section}.{key}")
    if source.take("data.shuffle", default=True) is False:
        source.untranslated("data.shuffle", "rows are always shuffled, by the seed")


def environment(source: Source, algorithm: str) -> dict[str, Any]:
    """Return `env`, or nothing for an algorithm that asks for no judge where theirs names none that is known."""
    theirs = source.peek("env") or {}
    if set(theirs) == {"math"} and theirs["math"].get("math_verify_impl", "hf_math_verify") == "hf_math_verify":
        source.take("env.math.math_verify_impl")
        return {"env": {"reward": MATH}}
    for name in theirs:
        reason = "environments are Python: name a function by env.reward, or a class by env.environment"
        source.untranslated(f"env.{name}", reason)
    if algorithm in {"sft", "dpo"}:
        return {}
    what = "the function that judges an answer" if algorithm == "grpo" else JUDGES_ONLY
    source.note("fill_in", "env.reward", what, value=REWARD)
    return {"env": {"reward": REWARD}}


def evaluation(source: Source, section: str, *, steps: int) -> dict[str, Any]:
    """Return `evaluation`."""
    ours: dict[str, Any] = {"every": max(source.take(f"{section}.val_period", 0) or 0, 0) * steps}
    if prompts := source.take(f"{section}.max_val_samples"):
        ours |= {"max_prompts": prompts, "max_prompts_while_training": prompts}
    if (answers := source.take(f"{section}.val_num_generations_per_prompt", 1)) > 1:
        ours |= {"samples_per_prompt": answers, "pass_at": [1, answers]}
    return ours


def cluster(source: Source) -> dict[str, Any]:
    """Return `cluster`."""
    ours: dict[str, Any] = {
        "runtime": "ray",
        "num_nodes": source.take("cluster.num_nodes", 1),
        "gpus_per_node": source.take("cluster.gpus_per_node", 1),
    }
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
            reason = "our log has other names: set checkpointing.metric_name, and keep_top_k"
            source.untranslated("checkpointing.metric_name", f"{reason} to {best}")
    if source.take("checkpointing.save_optimizer", default=True) is False:
        source.untranslated(
            "checkpointing.save_optimizer", "a checkpoint is what a run goes on from, with its optimizer"
        )
    return ours


def logger(source: Source) -> dict[str, Any]:
    """Return `logger`."""
    ours: dict[str, Any] = {"tensorboard_enabled": bool(source.take("logger.tensorboard_enabled", default=False))}
    for name, keys in {
        "wandb": ("project", "name", "entity"),
        "mlflow": ("experiment_name", "run_name", "tracking_uri"),
    }.items():
        if source.take(f"logger.{name}_enabled", default=False):
            ours[f"{name}_enabled"] = True
            written = {key: source.take(f"logger.{name}.{key}") for key in keys}
            ours[name] = {key: str(value) for key, value in written.items() if value is not None}
    if source.take("logger.swanlab_enabled"):
        source.untranslated("logger.swanlab_enabled", "figures go to TensorBoard, wandb, MLflow or trackio")
    return ours
