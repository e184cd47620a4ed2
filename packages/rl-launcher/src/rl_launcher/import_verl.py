"""Translate verl's example scripts into recipes: the hydra overrides of a command that runs one of verl's trainers.

    script -> variables and arrays of the shell -> key=value overrides -> rules, section by section -> our recipe

`main_ppo` becomes grpo or ppo, and `fsdp_sft_trainer` and `sft_trainer` become sft. Every override is translated, or
noted with a reason. What a script leaves out has verl's default, where ours differs. verl itself is not imported, and
nothing of the script is run.
"""

import ast
import operator
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from rl_launcher.errors import Refusal
from rl_launcher.import_nemo_rl.policy import FOR_EVALUATION
from rl_launcher.import_nemo_rl.read import Note, Source
from rl_launcher.import_nemo_rl.translate import MOST_STEPS, VISION, Translation, problems_of

TRAINER = re.compile(r"(^|[./ ])(main_ppo(_split)?|(fsdp_)?sft_trainer(_ray)?)(\.py)?$")
"""The programs whose overrides are translated."""
OTHER_TRAINERS = {
    "main_generation": "samples without training, as `rl-launcher evaluate` does",
    "main_eval": "scores responses without training, as `rl-launcher evaluate` does",
    "fully_async_main": "trains asynchronously with overrides of its own",
    "one_step_off": "trains asynchronously with overrides of its own",
}
GROUPS = {"engine", "optim"}
"""Sections that `engine=megatron` chooses, beside keys of theirs such as `engine.tensor_model_parallel_size`."""
OURS = {"math": "rl_algorithms.environments.math:math_match", "verl": "reward.py:score"}
ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
ESTIMATORS: dict[str, dict[str, Any]] = {
    "grpo": {"baseline": "group_mean", "scale": "group_std"},
    "rloo": {"baseline": "leave_one_out", "scale": "none"},
    "reinforce_plus_plus": {"baseline": "none", "scale": "none", "whiten": "tokens"},
    "reinforce_plus_plus_baseline": {"baseline": "group_mean", "scale": "none", "whiten": "tokens"},
}
"""What an advantage is compared with and divided by, by verl's name."""
KL_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
AGGREGATIONS = {
    "token-mean": "token-mean",
    "seq-mean-token-sum": "seq-mean-token-sum",
    "seq-mean-token-mean": "seq-mean-token-mean",
}


class VerlError(Refusal):
    """A script that cannot be read, or that no recipe of ours corresponds to."""


def translate(file: str | Path) -> Translation:
    """Translate one script.

    Raises:
        VerlError: it cannot be read, or runs none of these trainers, or trains on images.
    """
    path = Path(file)
    data, left_open = _with_placeholders(read(path))
    source = Source(data)
    for key, names in left_open.items():
        reason = "the script leaves it to whoever calls it, or to the environment"
        asked = ", ".join(f"argument {name}" if name.isdecimal() else name for name in names)
        source.notes.append(Note(kind="fill_in", key=key, value=asked, reason=reason))
    program = source.take("program")
    recipe = _sft_recipe(source, path, program) if "sft" in program else _recipe(source, path)
    table = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    without_effect = {pattern: each["reason"] for each in table for pattern in each["keys"]}
    for key, value in [*source.left()]:
        dropped = next((why for pattern, why in without_effect.items() if re.match(rf"(?:{pattern})(\.|$)", key)), None)
        is_off = value in (None, False, 0, "", "null", [], {})
        if dropped is not None or is_off:
            source.note("dropped", key, dropped or "it is off in the script", value=value)
        else:
            source.note("untranslated", key, "no rule of the translation knows this key", value=value)
    return Translation(
        source=path,
        recipe=recipe,
        notes=tuple(source.notes),
        problems=problems_of(recipe),
        framework="verl",
        command="import-verl",
    )


# -- The shell -----------------------------------------------------------------------------------------------------

ASSIGNMENT = re.compile(r"^(?:export\s+|declare\s+|local\s+)?([A-Za-z_]\w*)=(.*)$")
ARRAY = re.compile(r"^([A-Za-z_]\w*)\+?=\((.*?)\)[ \t]*$", re.MULTILINE | re.DOTALL)
VARIABLE = re.compile(r"\$\{(\w+)(?::?([-=+])([^{}]*))?\}|\$(\w+)")
ARITHMETIC = re.compile(r"\$\(\((.*?)\)\)")
OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
}


def read(path: Path) -> dict[str, Any]:
    """Return the overrides of a script as nested data; variables that the script does not set become `${env:NAME}`.

    `program` is the trainer that it runs, and `processes` how many of it torchrun starts, where the script says it.

    Raises:
        VerlError: it cannot be read, or no command in it runs a trainer that is translated.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise VerlError(f"{path} cannot be read: {error}") from error
    # A comment behind a backslash ends the command in a shell, and is not meant to.
    text = re.sub(r"\\[ \t]*(?:#[^\n]*)?\n", " ", text)
    # A string over several lines, as of overrides that several commands share.
    text = re.sub(r'(?m)^(\w+=)"([^"\n]*\n[^"]*)"', lambda found: f'{found[1]}"{found[2].replace(chr(10), " ")}"', text)
    arrays: dict[str, str] = {}
    for name, inside in ARRAY.findall(text):
        arrays[name] = arrays.get(name, "") + "\n" + inside
    variables: dict[str, str] = {}
    words: list[str] = []
    for line in ARRAY.sub("", text).splitlines():
        found = ASSIGNMENT.match(line.strip())
        # The command may be behind `NAME=value`, of its environment, and the program in a variable.
        named = line if found else _expanded(line, variables)
        if any(TRAINER.search(word) for word in named.split()):
            words = _words(_with_arrays(line, arrays), variables)
        elif found and not found[2].startswith("("):
            quoted = re.fullmatch(r'\$\{\w+:?-"[^"{}]*"\}', found[2])  # one value, whatever is in it
            assigned = [_expanded(found[2], variables)] if quoted else _words(found[2], variables)
            variables[found[1]] = assigned[0] if assigned else ""
    if not words:
        other = next((f"runs {name}, which {does}" for name, does in OTHER_TRAINERS.items() if name in text), None)
        raise VerlError(f"{path} {other or 'runs none of them'}; main_ppo and sft_trainer of verl are translated")
    at = next((at for at, word in enumerate(words) if TRAINER.search(word)), 0)
    data: dict[str, Any] = {"program": found[2] if (found := TRAINER.search(words[at])) else "main_ppo"}
    if processes := next((word for word in words[:at] if re.match(r"--nproc[-_]per[-_]node=\d+$", word)), None):
        data["processes"] = int(processes.partition("=")[2])
    for word in words[at:]:
        key, equals, value = word.lstrip("+").partition("=")
        if word.startswith("--config-name"):
            data["config_name"] = word.partition("=")[2].removesuffix(".yaml")
        elif equals and re.fullmatch(r"[A-Za-z_][\w.\-]*", key):
            path_of_key = [f"{key}_group"] if key in GROUPS else key.split(".")
            # Hidden until now, so that a default that holds one is no nested expression.
            _put(data, path_of_key, _value(value.replace("\0", "${").replace("\1", "}")))
    return data


def _with_arrays(line: str, arrays: dict[str, str]) -> str:
    for _ in range(5):  # an array may hold another
        line, before = re.sub(r'"?\$\{(\w+)\[[@*]\]\}"?', lambda found: arrays.get(found[1], ""), line), line
        if line == before:
            break
    return line.replace("\n", " ") if "#" not in line else " ".join(re.sub(r"#.*", "", line).split("\n"))


def _words(text: str, variables: dict[str, str]) -> list[str]:
    """Split a line as the shell would, with variables in their places."""
    text = _expanded(text, variables)
    try:
        return shlex.split(text, comments=True)
    except ValueError:  # a quote that ends on another line
        return text.split()


def _expanded(text: str, variables: dict[str, str]) -> str:
    def of(found: re.Match[str]) -> str:
        name, sign, default = found[1] or found[4], found[2], found[3]
        if sign == "+":  # only if the variable is set
            return default.strip("'\"") if variables.get(name) else ""
        if name in variables:
            return variables[name]
        if default is not None:
            return default.strip("'\"")
        return f"\0env:{name}\1"

    for _ in range(10):
        text, before = VARIABLE.sub(of, text), text
        if text == before:
            break
    return ARITHMETIC.sub(lambda found: _calculated(found[1], variables), text)


def _calculated(text: str, variables: dict[str, str]) -> str:
    """The value of `$((a * 2))`; the text itself where a variable is not known."""

    def value(node: ast.AST) -> int:
        match node:
            case ast.Expression(body=body):
                return value(body)
            case ast.Constant(value=int(number)):
                return number
            case ast.Name(id=name):
                return int(variables[name])
            case ast.BinOp(left=left, op=op, right=right):
                return int(OPERATORS[type(op)](value(left), value(right)))
        raise KeyError(ast.dump(node))

    try:
        return str(value(ast.parse(text.strip(), mode="eval")))
    except (KeyError, SyntaxError, ValueError, ZeroDivisionError):
        return text


def _value(text: str) -> Any:
    """A value as hydra reads it: YAML, in which `1e-6` is a number."""
    try:
        found = yaml.safe_load(text) if text else None
    except yaml.YAMLError:
        return text
    if isinstance(found, str):
        try:
            return float(found) if re.fullmatch(r"[-+]?[\d.]+[eE][-+]?\d+", found) else found
        except ValueError:
            return found
    return found


def _put(data: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        inner = data.get(name)
        data = data.setdefault(name, {}) if isinstance(inner, dict) or inner is None else data
    data[path[-1]] = value


SET_ANYWHERE = {"HOME", "PWD", "USER"}
IN_TEXT = re.compile(r"\$\{env:(\w+)\}")


def _with_placeholders(data: Any, key: str = "") -> tuple[Any, dict[str, list[str]]]:
    """The data with a placeholder for each variable that nobody sets, and their names by key.

    The placeholder is the variable's name, which gives way to the variable where it is set.
    """
    if isinstance(data, dict):
        walked = {name: _with_placeholders(each, f"{key}.{name}".lstrip(".")) for name, each in data.items()}
        return {name: value for name, (value, _) in walked.items()}, {
            where: names for _, found in walked.values() for where, names in found.items()
        }
    if isinstance(data, list):
        each = [_with_placeholders(one, key) for one in data]
        return [value for value, _ in each], {where: names for _, found in each for where, names in found.items()}
    if not isinstance(data, str):
        return data, {}
    names = [name for name in IN_TEXT.findall(data) if name not in SET_ANYWHERE]
    for name in names:
        placeholder = f"argument{name}" if name.isdecimal() else f"${{env:{name}:{name}}}"
        data = data.replace(f"${{env:{name}}}", placeholder)
    return data, {key: names} if names else {}


# -- The rules -----------------------------------------------------------------------------------------------------


def _recipe(source: Source, path: Path) -> dict[str, Any]:
    is_named = source.peek(f"{MODEL}.path", "") != "" or source.peek("model.path", "") != ""
    name = str(source.take(f"{MODEL}.path") or source.take("model.path") or "")
    if is_named and not name:
        name = "model"
        source.note("fill_in", "policy.model_name", "the script leaves it empty", value=name)
    if not name:
        raise VerlError(f"{path} names no model at {MODEL}.path, so it is no recipe")
    if VISION.search(name) or source.peek("data.image_key") is not None:
        raise VerlError(f"{path} trains {name}, a model of images or sound, and a recipe supports text only")
    estimator = str(source.take("algorithm.adv_estimator", "gae"))
    stage_name = "ppo" if estimator == "gae" else "grpo"
    prompts = _number(source, "data.train_batch_size", 1024)
    steps = _steps(source, prompts, stage_name)
    generations = _number(source, f"{ROLLOUT}.n", 1)
    stage: dict[str, Any] = {
        "num_prompts": prompts,
        "num_generations_per_prompt": generations,
        "steps_per_generation": steps,
        "objective": _objective(source, estimator, generations=generations),
    }
    if total := source.take("trainer.total_training_steps"):
        stage["max_num_steps"] = total * steps
    epochs = source.take("trainer.total_epochs", 30)
    stage["max_num_epochs"] = epochs
    most = stage.get("max_num_steps", MOST_STEPS)
    stage["optimizer"] = _optimizer(source, f"{ACTOR}.optim", clip=_clip(source, ACTOR), steps=most)
    if stage_name == "ppo":
        stage["num_epochs"] = source.take(f"{ACTOR}.ppo_epochs", 1)
        source.take("critic.ppo_epochs")
        stage["value"] = {
            "gamma": source.take("algorithm.gamma", 1.0),
            "lam": source.take("algorithm.lam", 1.0),
            "clip": source.take("critic.cliprange_value", 0.5),
        }
        critic = _optimizer(source, "critic.optim", clip=_clip(source, "critic"), steps=most, lr=1e-5)
        stage["critic"] = {"optimizer": critic}
        if source.peek("critic.model.path", name) != name:
            source.note("untranslated", "critic.model.path", "the critic starts with the policy's weights here")
    _reward_shaping(source, stage["objective"])
    running = _running(source, path, steps=steps, gpus=8)
    return {
        **running,
        "policy": {**_policy(source, name), "generation": _generation(source)},
        "data": _data(source),
        "env": _environment(source),
        "evaluation": {**running["evaluation"], **_evaluation(source)},
        stage_name: stage,
    }


def _running(source: Source, path: Path, *, steps: int, gpus: int) -> dict[str, Any]:
    """Where a run goes, how often it saves and measures, and where it reports to.

    Args:
        source: the overrides.
        path: the script, whose name a run without one has.
        steps: optimizer steps of ours in one of theirs.
        gpus: of a node, where the script does not say it.
    """
    every, save = source.take("trainer.test_freq", -1), source.take("trainer.save_freq", -1)
    project = source.take("trainer.project_name", "verl")
    experiment = source.take("trainer.experiment_name", path.stem)
    loggers = source.take("trainer.logger") or []
    loggers = loggers if isinstance(loggers, list) else [loggers]
    if unknown := [str(each) for each in loggers if each not in {"console", "tensorboard", "wandb", "mlflow"}]:
        reason = "metrics go to the log, TensorBoard, wandb, MLflow or trackio"
        source.note("untranslated", "trainer.logger", reason, value=", ".join(unknown))
    recipe: dict[str, Any] = {
        "run_dir": str(source.take("trainer.default_local_dir") or f"runs/{experiment}"),
        "evaluation": {"every": max(every if isinstance(every, int) else 0, 0) * steps},
        "cluster": {
            "runtime": "ray",
            "gpus_per_node": _number(source, "trainer.n_gpus_per_node", gpus),
            "num_nodes": _number(source, "trainer.nnodes", 1),
        },
        "checkpointing": {"save_period": max(save if isinstance(save, int) else 0, 0) * steps},
        "logger": {"tensorboard_enabled": "tensorboard" in loggers},
    }
    if "wandb" in loggers:
        recipe["logger"] |= {"wandb_enabled": True, "wandb": {"project": str(project), "name": str(experiment)}}
    if "mlflow" in loggers:
        names = {"experiment_name": str(project), "run_name": str(experiment)}
        recipe["logger"] |= {"mlflow_enabled": True, "mlflow": names}
    if (seed := source.take("data.seed", source.take("trainer.seed"))) is not None:
        recipe["seed"] = seed
    return recipe


def _sft_recipe(source: Source, path: Path, program: str) -> dict[str, Any]:
    """A recipe of the stage sft; `fsdp_sft_trainer` and `sft_trainer` have keys and defaults of their own."""
    older = program.startswith("fsdp")
    name = str(source.take("model.partial_pretrain") or source.take("model.path") or "")
    if not name:
        raise VerlError(f"{path} names no model at model.{'partial_pretrain' if older else 'path'}, so it is no recipe")
    if VISION.search(name):
        raise VerlError(f"{path} trains {name}, a model of images or sound, and a recipe supports text only")
    stage: dict[str, Any] = {"batch_size": _number(source, "data.train_batch_size", 256)}
    if total := source.take("trainer.total_training_steps"):
        stage["max_num_steps"] = total
    stage["max_num_epochs"] = source.take("trainer.total_epochs", 4)
    for key, usual in {"betas": [0.9, 0.95], "lr_warmup_steps_ratio": 0.1}.items() if older else ():
        source.data.setdefault("optim", {}).setdefault(key, usual)
    stage["optimizer"] = _optimizer(
        source,
        "optim",
        clip=source.take("optim.clip_grad", 1.0),
        steps=stage.get("max_num_steps", MOST_STEPS),
        lr=1e-5 if older else 1e-3,
        style=source.take("optim.lr_scheduler", "cosine") if older else "constant",
    )
    running = _running(source, path, steps=1, gpus=source.take("processes", 8 if older else 1))
    policy = _sft_policy(source, name, older=older)
    reason = "theirs does not generate; ours does, if env has a reward to measure responses with"
    source.note("fill_in", "policy.generation.max_new_tokens", reason, value=FOR_EVALUATION)
    policy["generation"] = {"max_new_tokens": FOR_EVALUATION}
    return {**running, "policy": policy, "data": _sft_data(source, older=older), "sft": stage}


def _sft_policy(source: Source, name: str, *, older: bool) -> dict[str, Any]:
    ours: dict[str, Any] = {"model_name": name, "padded_vocabulary": True}
    if source.take("model.trust_remote_code"):
        ours["trust_remote_code"] = True
    rows = source.take("data.micro_batch_size_per_gpu", source.take("data.micro_batch_size", 4))
    backend: dict[str, Any] = {"device": "cuda", "precision": "bfloat16", "micro_batch_size": rows}
    tokens = source.take("data.max_token_len_per_gpu", 8192)
    if source.take("data.use_dynamic_bsz", default=not older):
        backend |= {"micro_batch_size": 1024, "micro_batch_tokens": tokens if isinstance(tokens, int) else 8192}
    packed = source.take("use_remove_padding", source.take("model.use_remove_padding", default=not older))
    recompute = source.take("model.enable_gradient_checkpointing", default=True)
    source.note("dropped", "model.strategy", "the backend decides about it")
    if source.take("engine_group") == "megatron" or source.peek("engine.tensor_model_parallel_size") is not None:
        for key in ("tensor_model", "pipeline_model", "context", "expert_model"):
            if isinstance(size := source.take(f"engine.{key}_parallel_size"), int):
                backend[f"{key}_parallel_size"] = size
        if recompute:
            backend["recompute_granularity"] = "full"
        return {**ours, "dtensor_cfg": {"enabled": False}, "megatron_cfg": {"enabled": True, **backend}}
    if packed:
        backend["sequence_packing"] = True
    if recompute:
        backend["activation_checkpointing"] = "full"
    context = source.take("ulysses_sequence_parallel_size", source.take("engine.ulysses_sequence_parallel_size", 1))
    if isinstance(context, int) and context > 1:
        backend["context_parallel_size"] = context
    rank, alpha = source.take("model.lora_rank", 0), source.take("model.lora_alpha", 16)
    targets = source.take("model.target_modules")
    if isinstance(rank, int) and rank > 0:
        backend["lora_cfg"] = {"rank": rank, "alpha": alpha}
        if isinstance(targets, list):
            backend["lora_cfg"]["target_modules"] = targets
    return {**ours, "dtensor_cfg": backend}


def _sft_data(source: Source, *, older: bool) -> dict[str, Any]:
    ours = _files(source, usual="~/data/gsm8k/train.parquet")
    source.note("dropped", "data.max_length", "a row that is longer than the model's context is data.on_bad_row")
    in_turns = source.take("data.multiturn.enable", default=not older)
    messages = source.take("data.multiturn.messages_key", source.take("data.messages_key", "messages"))
    columns = {"messages": str(messages)} if messages != "messages" else {}
    prompt, response = source.take("data.prompt_key", "question"), source.take("data.response_key", "answer")
    inner = [source.take(f"data.{name}_dict_keys") or [] for name in ("prompt", "response")]
    if not in_turns:  # of a column that holds several, theirs joins those that are named
        if any(len(names) > 1 for names in inner):
            reason = "several columns are one text in theirs; name one"
            source.note("fill_in", "data.columns", reason, value=", ".join(map(str, inner[0] + inner[1])))
        paths = [".".join(map(str, [key, *names[:1]])) for key, names in zip((prompt, response), inner, strict=True)]
        columns = dict(zip(("prompt", "answer"), paths, strict=True))
    return {**ours, **({"columns": columns} if columns else {})}


def _number(source: Source, key: str, default: int) -> int:
    value = source.take(key, default)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    source.note("fill_in", key, f"theirs is {value}, which the shell decides", value=default)
    return default


def _clip(source: Source, section: str) -> Any:
    """The largest norm of a gradient; newer scripts name it with the optimizer."""
    return source.take(f"{section}.grad_clip", source.take(f"{section}.optim.clip_grad", 1.0))


def _steps(source: Source, prompts: int, stage: str) -> int:
    """Optimizer steps on one batch of rollouts."""
    batch = _number(source, f"{ACTOR}.ppo_mini_batch_size", 256)
    epochs = source.peek(f"{ACTOR}.ppo_epochs", 1)
    if epochs == 1:
        source.take(f"{ACTOR}.ppo_epochs")
    if prompts % batch:
        source.note("untranslated", f"{ACTOR}.ppo_mini_batch_size", f"{prompts} prompts are no multiple of it")
        return 1
    if stage == "grpo" and epochs != 1:
        source.untranslated(f"{ACTOR}.ppo_epochs", "each rollout is trained on once here")
        epochs = 1
    return int(prompts // batch * epochs)


def _objective(source: Source, estimator: str, *, generations: int) -> dict[str, Any]:
    clip = source.take(f"{ACTOR}.clip_ratio", 0.2)
    # They recompute the old log-probabilities before the first step of each batch.
    ratio: dict[str, Any] = {
        "clip_low": source.take(f"{ACTOR}.clip_ratio_low", clip),
        "clip_high": source.take(f"{ACTOR}.clip_ratio_high", clip),
        "dual_clip": source.take(f"{ACTOR}.clip_ratio_c", 3.0),
        "proximal": "recomputed",
    }
    match source.take(f"{ACTOR}.policy_loss.loss_mode", "vanilla"):
        case "vanilla":
            pass
        case "gspo":
            ratio["level"] = "sequence"
        case "cispo":
            ratio["surrogate"] = "cispo"
            ratio["clip_low"] = min(ratio["clip_low"], 1.0)  # a ratio is at least 0 anyway
            del ratio["dual_clip"]
        case mode:
            source.untranslated(f"{ACTOR}.policy_loss.loss_mode", f"the clipped surrogate is used instead of {mode}")
    aggregation = source.take(f"{ACTOR}.loss_agg_mode", "token-mean")
    if aggregation not in AGGREGATIONS:
        source.untranslated(f"{ACTOR}.loss_agg_mode", "token-mean is used instead")
    objective: dict[str, Any] = {"ratio": ratio, "aggregation": AGGREGATIONS.get(aggregation, "token-mean")}
    if entropy := source.take(f"{ACTOR}.entropy_coeff", 0):
        objective["entropy_weight"] = entropy
    in_loss, in_reward = source.take(f"{ACTOR}.use_kl_loss"), source.take("algorithm.use_kl_in_reward")
    kinds = {"loss": f"{ACTOR}.kl_loss", "reward": "algorithm.kl"}
    weight, kind = source.take(f"{ACTOR}.kl_loss_coef", 0.001), source.take(f"{ACTOR}.kl_loss_type", "low_var_kl")
    of_reward = source.take("algorithm.kl_ctrl.kl_coef", 0.001), source.take("algorithm.kl_penalty", "kl")
    if in_loss or in_reward:
        place = "loss" if in_loss else "reward"
        weight, kind = (weight, kind) if in_loss else of_reward
        if kind not in KL_ESTIMATORS:
            source.note("untranslated", f"{kinds[place]}_type", "k3 is used instead", value=kind)
        objective["kl"] = {"weight": weight, "estimator": KL_ESTIMATORS.get(str(kind), "k3"), "place": place}
        if in_loss and in_reward:
            source.untranslated("algorithm.use_kl_in_reward", "the KL has one place, and is in the loss here")
    if estimator == "gae":
        return objective
    advantage = dict(ESTIMATORS.get(estimator, ESTIMATORS["grpo"]))
    if estimator not in ESTIMATORS:
        source.note("untranslated", "algorithm.adv_estimator", "that of grpo is used instead", value=estimator)
    if source.take("algorithm.norm_adv_by_std_in_grpo", default=True) is False and estimator == "grpo":
        advantage["scale"] = "none"
    if generations == 1 and estimator in {"grpo", "rloo", "reinforce_plus_plus_baseline"}:
        # Theirs takes the reward of a group of one as it is.
        advantage |= {"baseline": "none", "scale": "none"}
    objective["advantage"] = advantage
    if source.take("algorithm.gamma", 1.0) != 1.0 and estimator == "reinforce_plus_plus":
        source.untranslated("algorithm.gamma", "every token has the whole return here")
    source.take("algorithm.lam")  # of GAE
    objective["selection"] = {"groups_without_signal": "keep"}
    if source.take("algorithm.filter_groups.enable"):
        objective["selection"] = {"groups_without_signal": "drop"}
        if (most := source.take("algorithm.filter_groups.max_num_gen_batches")) and most > 0:
            objective["selection"]["max_generation_batches"] = most
        by_reward = {None, "acc", "score", "seq_reward", "seq_final_reward"}
        if source.take("algorithm.filter_groups.metric") not in by_reward:
            source.untranslated("algorithm.filter_groups.metric", "groups are told apart by the reward")
    return objective


def _optimizer(
    source: Source, section: str, *, clip: Any, steps: int, lr: float = 1e-6, style: str = "constant"
) -> dict[str, Any]:
    ours: dict[str, Any] = {
        "lr": source.take(f"{section}.lr", lr),
        "weight_decay": source.take(f"{section}.weight_decay", 0.01),
        "schedule": "constant",
        "max_grad_norm": clip,
    }
    if betas := source.take(f"{section}.betas"):
        ours["betas"] = betas
    warmup, share = source.take(f"{section}.lr_warmup_steps", -1), source.take(f"{section}.lr_warmup_steps_ratio", 0.0)
    if isinstance(warmup, int) and warmup > 0:
        if warmup < steps:
            ours["warmup_steps"] = warmup
        else:
            source.note("untranslated", f"{section}.lr_warmup_steps", f"it does not end within {steps} steps")
    elif share:
        if steps < MOST_STEPS:
            ours["warmup_steps"] = int(share * steps)
        else:
            source.untranslated(f"{section}.lr_warmup_steps_ratio", "a stage of epochs needs warmup_steps as a number")
    usual = source.take(f"{section}.warmup_style", source.take(f"{section}.lr_decay_style", style))
    style = source.take(f"{section}.lr_scheduler_type", usual)
    ratio = source.take(f"{section}.min_lr_ratio", 0.0)
    if style == "cosine":
        ours |= {"schedule": "cosine", "final_lr_ratio": ratio or 0.0}
    elif style not in (None, "constant"):
        source.note("untranslated", f"{section}.lr_scheduler_type", "ours is constant", value=style)
    return ours


def _policy(source: Source, name: str) -> dict[str, Any]:
    ours: dict[str, Any] = {"model_name": name, "padded_vocabulary": True}
    if source.take(f"{MODEL}.trust_remote_code"):
        ours["trust_remote_code"] = True
    megatron = "megatron" in str(source.take("config_name", "")) or source.peek(f"{ACTOR}.strategy") == "megatron"
    backend: dict[str, Any] = {"device": "cuda", "precision": "bfloat16"}
    rows = source.take(f"{ACTOR}.ppo_micro_batch_size_per_gpu", source.take(f"{ACTOR}.ppo_micro_batch_size"))
    backend["micro_batch_size"] = rows if isinstance(rows, int) else 1
    tokens = source.take(f"{ACTOR}.ppo_max_token_len_per_gpu", 16384)
    if source.take(f"{ACTOR}.use_dynamic_bsz"):
        backend |= {"micro_batch_size": 1024, "micro_batch_tokens": tokens if isinstance(tokens, int) else 16384}
    packed = source.take(f"{MODEL}.use_remove_padding", default=True)
    recompute = source.take(f"{MODEL}.enable_gradient_checkpointing", default=True)
    if megatron:
        for key in ("tensor", "pipeline", "context"):
            size = source.take(f"{ACTOR}.megatron.{key}_{'' if key == 'context' else 'model_'}parallel_size")
            if isinstance(size, int):
                backend[f"{key}_{'' if key == 'context' else 'model_'}parallel_size"] = size
        if backend.get("tensor_model_parallel_size", 1) > 1:
            backend["sequence_parallel"] = bool(source.take(f"{ACTOR}.megatron.sequence_parallel", default=True))
        experts = source.take(f"{ACTOR}.megatron.expert_model_parallel_size")
        if isinstance(experts, int):
            backend["expert_model_parallel_size"] = experts
        kind = source.take(f"{ACTOR}.megatron.override_transformer_config.recompute_granularity")
        if kind or recompute:
            backend["recompute_granularity"] = kind or "full"
        if isinstance(adapters := source.take(f"{MODEL}.lora.rank", 0), int) and adapters > 0:
            backend["lora_cfg"] = {"rank": adapters, "alpha": source.take(f"{MODEL}.lora.alpha", 32)}
            backend["lora_cfg"]["base_dtype"] = backend["precision"]
            backend["transformer_impl"] = "local"  # adapters are in plain torch's layers
        return {**ours, "dtensor_cfg": {"enabled": False}, "megatron_cfg": {"enabled": True, **backend}}
    if packed:
        backend["sequence_packing"] = True
    if recompute:
        backend["activation_checkpointing"] = "full"
    context = source.take(f"{ACTOR}.ulysses_sequence_parallel_size", 1)
    if isinstance(context, int) and context > 1:
        backend["context_parallel_size"] = context
    rank = source.take(f"{MODEL}.lora_rank", 0)
    alpha, targets = source.take(f"{MODEL}.lora_alpha", 16), source.take(f"{MODEL}.target_modules")
    if isinstance(rank, int) and rank > 0:
        backend["lora_cfg"] = {"rank": rank, "alpha": alpha}
        if isinstance(targets, list):
            backend["lora_cfg"]["target_modules"] = targets
    return {**ours, "dtensor_cfg": backend}


def _generation(source: Source) -> dict[str, Any]:
    engine = source.take(f"{ROLLOUT}.name", "vllm")
    if engine not in {"vllm", "hf"}:
        source.note("untranslated", f"{ROLLOUT}.name", "vllm is used instead", value=engine)
    prompt = source.peek("data.max_prompt_length", 512)
    response = _number(source, "data.max_response_length", 512)
    ours: dict[str, Any] = {
        "backend": "transformers" if engine == "hf" else "vllm",
        "max_new_tokens": response,
        "temperature": source.take(f"{ROLLOUT}.temperature", 1.0),
        **_cuts(source, ROLLOUT),
    }
    names = ("gpu_memory_utilization", "max_num_seqs", "enforce_eager", "enable_prefix_caching")
    given = {name: source.take(f"{ROLLOUT}.{name}") for name in names}
    vllm: dict[str, Any] = {name: value for name, value in given.items() if isinstance(value, int | float)}
    vllm["tensor_parallel_size"] = _number(source, f"{ROLLOUT}.tensor_model_parallel_size", 2)
    if _number(source, f"{ROLLOUT}.expert_parallel_size", 1) > 1:
        vllm["enable_expert_parallel"] = True
    if (stages := _number(source, f"{ROLLOUT}.pipeline_model_parallel_size", 1)) > 1:
        vllm["pipeline_parallel_size"] = stages
    length = source.take(f"{ROLLOUT}.max_model_len")
    vllm["max_model_len"] = (
        length if isinstance(length, int) else prompt + response if isinstance(prompt, int) else None
    )
    return ours if engine == "hf" else {**ours, "vllm_cfg": vllm}


def _cuts(source: Source, section: str) -> dict[str, Any]:
    given = {name: source.take(f"{section}.{name}") for name in ("top_p", "top_k")}
    return {name: value for name, value in given.items() if value not in (None, -1, 0, 1, 1.0)}


def _evaluation(source: Source) -> dict[str, Any]:
    """How theirs samples held-out prompts: greedily, unless `do_sample`."""
    section = f"{ROLLOUT}.val_kwargs"
    samples, temperature = source.take(f"{section}.n", 1), source.take(f"{section}.temperature", 0)
    cuts = _cuts(source, section)
    ours: dict[str, Any] = {}
    if source.take(f"{section}.do_sample") and temperature:
        ours |= {"temperature": temperature, "while_training": "sampled", "greedy": False, **cuts}
    if isinstance(samples, int) and samples > 1:
        ours |= {"samples_per_prompt": samples, "pass_at": [1, samples]}
    return ours | _sets(source)


def _sets(source: Source) -> dict[str, Any]:
    files = source.peek("data.val_files")
    files = files if isinstance(files, list) else [files] if files else []
    columns = {"prompt": str(source.peek("data.prompt_key", "prompt")), "answer": "reward_model.ground_truth"}
    return (
        {
            "sets": {
                f"set{number}": {"source": str(file), "columns": columns}
                for number, file in enumerate(files[1:], start=2)
            }
        }
        if len(files) > 1
        else {}
    )


def _data(source: Source) -> dict[str, Any]:
    ours = _files(source, usual="~/data/rlhf/gsm8k/train.parquet")
    ours["columns"] = {"prompt": str(source.take("data.prompt_key", "prompt")), "answer": "reward_model.ground_truth"}
    if source.take("data.shuffle", default=True) is False:
        source.untranslated("data.shuffle", "rows are always shuffled, with the seed")
    return ours


def _files(source: Source, *, usual: str) -> dict[str, Any]:
    """Return the files of rows that are learned from, and those that are held out."""
    train, held_out = source.take("data.train_files"), source.take("data.val_files")
    train = train if isinstance(train, list) else [train]
    held_out = held_out if isinstance(held_out, list) else [held_out] if held_out else []
    ours: dict[str, Any] = {"source": str(train[0] or usual)}
    if len(train) > 1:
        ours["mix"] = {f"set{number}": str(file) for number, file in enumerate(train[1:], start=2)}
    if held_out:
        ours["held_out"] = str(held_out[0])
    if source.take("data.filter_overlong_prompts"):
        ours["on_bad_row"] = "skip"
    if options := source.take("data.apply_chat_template_kwargs"):
        ours["chat_template_kwargs"] = options
    return ours


def _environment(source: Source) -> dict[str, Any]:
    """Return `env`: the function that the script names, or one to fill in where verl chooses it by the data."""
    for section in ("custom_reward_function", "reward.custom_reward_function"):
        file, function = source.take(f"{section}.path"), source.take(f"{section}.name", "compute_score")
        if file:
            return {"reward": f"{file}:{function}"}
    files = str(source.peek("data.train_files"))
    if source.peek("reward_model.enable") or source.peek("reward.reward_model.enable"):
        reason = "theirs scores with a reward model of a folder; a recipe trains its own, or names a function"
        source.note("fill_in", "env.reward", reason, value=OURS["verl"])
        return {"reward": OURS["verl"]}
    known = any(name in files.lower() for name in ("gsm8k", "math", "aime", "dapo"))
    reason = "theirs chooses the reward by the column data_source" + "; this one compares boxed answers" * known
    reward = OURS["math" if known else "verl"]
    source.note("fill_in", "env.reward", reason, value=reward)
    return {"reward": reward}


def _reward_shaping(source: Source, objective: dict[str, Any]) -> None:
    for section in ("reward_model", "reward.reward_model"):
        overlong = f"{section}.reward_kwargs.overlong_buffer_cfg"
        limit = source.take(f"{section}.reward_kwargs.max_resp_len") or source.peek("data.max_response_length")
        if source.take(f"{section}.reward_manager") not in {None, "naive", "dapo", "batch"}:
            source.untranslated(f"{section}.reward_manager", "rewards are a function of env.reward")
        length, factor = source.take(f"{overlong}.len", 0), source.take(f"{overlong}.penalty_factor", 1.0)
        source.take(f"{overlong}.log")
        if source.take(f"{overlong}.enable") and isinstance(limit, int) and isinstance(length, int) and length:
            objective["overlong"] = {"max_length": limit, "buffer": length, "penalty": factor}
