"""Train, resume, evaluate and explain from Python: what the command line does, with objects instead of strings.

    result = rl_launcher.train("grpo", model="Qwen/Qwen3-0.6B", data=rows, reward=score)
    result.dataframe, result.model, result.report

Importing this module loads neither torch nor transformers.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_launcher.errors import Refusal, RunStoppedError

if TYPE_CHECKING:
    from rl_launcher.checks.explain import Explained
    from rl_launcher.recipe_files import Resolved
    from rl_launcher.run.evaluate import Measured
    from rl_launcher.schema import Recipe
    from rl_launcher.user_code import Objects
    from rl_observe import RunDirectory

__all__ = ["RunResult", "evaluate", "explain", "load_recipe", "resume", "run_recipe", "train"]

RecipeLike = str | Path | Mapping[str, Any]
Overrides = Sequence[str] | Mapping[str, Any]


def train(
    recipe: RecipeLike,
    *,
    model: Any = None,
    tokenizer: Any = None,
    data: Any = None,
    held_out: Any = None,
    reward: Any = None,
    environment: Any = None,
    overrides: Overrides = (),
    **keys: Any,
) -> RunResult:
    """Run a recipe to completion and return its result.

    Args:
        recipe: the name of a shipped recipe ("grpo", "sft", "dpo"), a YAML file, or a dict with the keys of one.
        model: a name, a folder, or a `transformers` model. A model object is trained in place and left in evaluation
            mode; `result.model` is a fresh copy of what was saved. Over Ray the object stays as it was: its weights
            are written to `run_dir/initial_model`, from where the ranks read them.
        tokenizer: a name, a folder, or a tokenizer. Left out, it is loaded from where the model came from
            (`model.name_or_path`).
        data: rows as a list of dicts or a `datasets.Dataset`; or a file, a data set on the hub, or
            `file.py:function`. Columns are those of files: `prompt` (a text or chat messages) and any columns that the
            reward reads; `messages` for SFT; `prompt`, `chosen` and `rejected` for DPO.
        held_out: rows of the same kinds that are never trained on; left out, a share of `data` is held out.
        reward: a function `reward(prompts, completions, **columns) -> list[float]`, as of TRL; a list of functions
            or a dict of them by name, whose weighted sum is the reward; or `file.py:function`.
        environment: instead of a reward, a class or function that makes an environment of several turns; or
            `file.py:name`.
        overrides: further keys as on the command line, `["grpo.max_num_steps=5"]`, or as a dict.
        **keys: further keys by section, `grpo={"max_num_steps": 5}`, or `seed=1`, or dotted,
            `**{"grpo.max_num_steps": 5}`. None switches a section off: `sft=None`.

    Without a `run_dir` of yours the recipe's is taken, with `-2`, `-3`, ... behind it where a run is there already.

    Raises:
        Refusal: the recipe, the data, the reward or the model cannot be used; nothing was trained or left behind.
        RunStoppedError: the run ended early. The error's `result` holds what there is; `resume` goes on from there.
    """
    replaced, objects = _take_objects(model, tokenizer, data, held_out, reward, environment)
    changes = [*replaced, *_as_texts(overrides), *_as_texts(keys)]
    resolved = _load(recipe, changes)
    if not any(change.partition("=")[0] == "run_dir" for change in changes):
        resolved = _load(recipe, [*changes, f"run_dir={json.dumps(_unused(resolved.value.run_dir))}"])
    return run_recipe(resolved, objects)


def run_recipe(resolved: Resolved[Recipe], objects: Objects | None = None) -> RunResult:
    """Run a recipe that `load_recipe` returned, into exactly its `run_dir`.

    Raises:
        Refusal: as of `train`; also where the run directory exists already.
        RunStoppedError: as of `train`.
    """
    from rl_launcher.run.run import run
    from rl_launcher.user_code import NO_OBJECTS

    return _finish(lambda: run(resolved, objects=objects or NO_OBJECTS), Path(resolved.value.run_dir))


def resume(
    run_dir: str | Path | RunResult,
    *,
    model: Any = None,
    tokenizer: Any = None,
    data: Any = None,
    held_out: Any = None,
    reward: Any = None,
    environment: Any = None,
    overrides: Overrides = (),
    **keys: Any,
) -> RunResult:
    """Continue an interrupted or killed run from its last checkpoint; on a CPU to the same bits as without a stop.

    Args:
        run_dir: of the run, or its result.
        model: the object that `train` was given, if it was one, for its architecture: weights come from the
            checkpoint. `tokenizer`, `data`, `held_out`, `reward` and `environment` likewise.
        tokenizer: see `model`.
        data: see `model`; rows that changed are refused.
        held_out: see `model`.
        reward: see `model`.
        environment: see `model`.
        overrides: keys that say where and how the run runs, not what it learns, as of `train`.
        **keys: the same by section.

    Raises:
        Refusal: there is nothing to resume; an object is missing, or is given for what the recipe names as a string.
        RunStoppedError: it ended early again.
    """
    from rl_launcher.run.run import resume as resume_run
    from rl_launcher.user_code import refuse_missing_objects
    from rl_observe import RunDirectory

    folder = RunDirectory.open(_folder_of(run_dir)).path
    _, objects = _take_objects(model, tokenizer, data, held_out, reward, environment, load_strings=True)
    recorded = _load(folder / "recipe.yaml", [])
    refuse_missing_objects(recorded.value, objects, remedy=f"rl_launcher.resume({str(folder)!r}, {{}})")
    changes = [*_as_texts(overrides), *_as_texts(keys)]
    return _finish(lambda: resume_run(folder, changes, objects=objects), folder)


def evaluate(
    subject: RecipeLike | RunResult,
    *,
    model: Any = None,
    tokenizer: Any = None,
    data: Any = None,
    held_out: Any = None,
    reward: Any = None,
    environment: Any = None,
    overrides: Overrides = (),
    **keys: Any,
) -> Measured:
    """Sample responses to the held-out prompts and score them: mean reward and pass@k with confidence intervals.

    Args:
        subject: a recipe as of `train`; or a run, its directory or its result, whose trained model is then measured.
        model: what to measure instead; as of `train`, and so are the other arguments.
        tokenizer: as of `train`.
        data: as of `train`.
        held_out: as of `train`.
        reward: as of `train`.
        environment: as of `train`.
        overrides: as of `train`.
        **keys: as of `train`.

    Returns:
        The measurement; `.figures()` is a dict, `.text()` a table.

    Raises:
        Refusal: something cannot be loaded, or no reward and no environment is given.
    """
    from rl_launcher.run.evaluate import measure, measured_recipe
    from rl_launcher.user_code import refuse_missing_objects

    replaced, objects = _take_objects(model, tokenizer, data, held_out, reward, environment)
    changes = [*replaced, *_as_texts(overrides), *_as_texts(keys)]
    folder = _folder_of(subject) if isinstance(subject, RunResult | str | Path) else None
    if folder is not None and folder.is_dir():
        resolved = measured_recipe(folder, overrides=changes, model=_model_name(changes))
        remedy = f"rl_launcher.evaluate({str(folder)!r}, {{}})"
        refuse_missing_objects(resolved.value, objects, remedy=remedy)
    else:
        resolved = _load(subject, changes)  # type: ignore[arg-type]  # a RunResult has a folder
    return measure(resolved, objects)


def explain(
    recipe: RecipeLike,
    *,
    model: Any = None,
    tokenizer: Any = None,
    data: Any = None,
    held_out: Any = None,
    reward: Any = None,
    environment: Any = None,
    overrides: Overrides = (),
    **keys: Any,
) -> Explained:
    """Report what `train` with the same arguments would do: placement, sharding, memory, refit, objective.

    Needs no GPU, trains nothing and writes nothing. `print(explain("grpo", ...).text())`; `.figures` is a dict.

    Raises:
        Refusal: what `train` would refuse before training. Too little memory is not raised: `.refusal` says so.
    """
    from rl_launcher.checks.explain import explain as explain_recipe
    from rl_launcher.user_code import refuse_missing_objects

    replaced, objects = _take_objects(model, tokenizer, data, held_out, reward, environment)
    resolved = _load(recipe, [*replaced, *_as_texts(overrides), *_as_texts(keys)])
    refuse_missing_objects(resolved.value, objects, remedy="rl_launcher.explain(recipe, {})")
    return explain_recipe(resolved, objects)


def load_recipe(recipe: RecipeLike, *, overrides: Overrides = (), **keys: Any) -> Resolved[Recipe]:
    """Read and validate a recipe: `.value` is the `Recipe`, `.origins` where each key was set, `.to_yaml()` all of it.

    Raises:
        Refusal: there is no such recipe.
        RecipeError: naming each wrong key with its file and line, the nearest valid key and the values it takes.
    """
    return _load(recipe, [*_as_texts(overrides), *_as_texts(keys)])


class RunResult:
    """What a run left behind. `RunResult(run_dir)` opens that of an earlier run.

    Raises:
        RunDirectoryError: the folder is not a run directory.
    """

    def __init__(self, run_dir: str | Path) -> None:
        from rl_observe import RunDirectory

        self._run: RunDirectory = RunDirectory.open(run_dir)

    @property
    def run_dir(self) -> Path:
        """The run directory, absolute."""
        return self._run.path

    @property
    def report(self) -> Path:
        """The report: one HTML file that needs nothing else to be opened."""
        return self._run.report

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The run's result in figures, as `summary.json` holds it; empty where the run was killed before its end."""
        if not self._run.summary.is_file():
            return {}
        summary: dict[str, Any] = json.loads(self._run.summary.read_text(encoding="utf-8"))
        return summary

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """One dict for each logged step, in order: `stage`, `step`, `reward`, `loss`, ..."""
        from rl_observe import read_metrics

        return [dict(line) for line in read_metrics(self._run)]

    @cached_property
    def dataframe(self) -> Any:
        """`metrics` as a `pandas.DataFrame`.

        Raises:
            Refusal: pandas is not installed.
        """
        return self.to_pandas()

    def to_pandas(self) -> Any:
        """Return `metrics` as a new `pandas.DataFrame`.

        Raises:
            Refusal: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise Refusal("a DataFrame needs pandas: pip install pandas; .metrics is a list of dicts") from error
        return pd.DataFrame(self.metrics)

    @cached_property
    def model(self) -> Any:
        """The trained model, loaded from `run_dir/model` when first asked for, in evaluation mode on the CPU.

        Raises:
            Refusal: the run ended early and has written no model.
        """
        from rl_backends import load_causal_lm

        return load_causal_lm(self._model_folder()).eval()

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer that was saved with the model.

        Raises:
            Refusal: the run ended early and has written no model.
        """
        from rl_backends import load_tokenizer

        return load_tokenizer(self._model_folder())

    def _model_folder(self) -> str:
        if not self._run.model.is_dir():
            raise Refusal(
                f"{self.run_dir} holds no model, since the run ended early. Continue it: "
                f"rl_launcher.resume({str(self.run_dir)!r}); or export a checkpoint: rl-launcher export "
                f"{self.run_dir} FOLDER"
            )
        return str(self._run.model)

    def __repr__(self) -> str:
        """One short screen: where the run is, what came of it, and what to look at next."""
        shown = {key: value for key, value in self.summary.items() if key.startswith(("held_out_", "pair_"))}
        shown |= {key: self.summary[key] for key in ("algorithm", "steps", "wall_s") if key in self.summary}
        if self.summary.get("interrupted"):
            shown["ended_by"] = self.summary.get("ended_by")
        lines = [f"  {key:<26} {value:.4g}" for key, value in shown.items() if isinstance(value, int | float)]
        lines += [f"  {key:<26} {value}" for key, value in shown.items() if isinstance(value, str)]
        attributes = "  .metrics  .dataframe  .model  .tokenizer  .summary  .report"
        return "\n".join([f"RunResult({str(self.run_dir)!r})", *lines, attributes])

    def _repr_html_(self) -> str:
        """What a notebook shows: the summary of the report."""
        from rl_observe.report import summary_html

        return summary_html(self._run)


def _finish(execute: Callable[[], dict[str, Any]], run_dir: Path) -> RunResult:
    """Run `execute`; give its result, or the error that ended it early with the result of what there is."""
    try:
        execute()
    except RunStoppedError as error:
        error.result = RunResult(run_dir)
        raise
    return RunResult(run_dir)


def _take_objects(
    model: Any,
    tokenizer: Any,
    data: Any,
    held_out: Any,
    reward: Any,
    environment: Any,
    *,
    load_strings: bool = False,
) -> tuple[list[str], Objects]:
    """Tell strings from objects.

    Returns overrides that put strings, or the descriptions of objects, in their places in the recipe; and the objects.
    With `load_strings` strings are objects too, since the recipe is recorded and says that objects were given.

    Raises:
        Refusal: an argument is of the wrong kind, or two of them exclude each other.
    """
    from rl_launcher.user_code import Objects, describe_object, load_function

    changes: list[str] = []

    def put(key: str, value: Any) -> None:
        changes.append(f"{key}={json.dumps(value)}")

    def is_name(value: Any) -> bool:
        return isinstance(value, str | Path)

    if is_name(model) and load_strings:
        model = _load_by_name(str(model))
    if is_name(model):
        put("policy.model_name", str(model))
        put("policy.revision", None)
        model = None
    elif model is not None:
        if not (hasattr(model, "save_pretrained") and hasattr(model, "config")):
            raise Refusal(f"model= is a {type(model).__name__}; give a transformers model, its name or its folder")
        put("policy.model_name", describe_object(model))
        put("policy.revision", None)
        if tokenizer is None:
            tokenizer = getattr(model, "name_or_path", None)
            if not tokenizer:
                raise Refusal(f"model= is a {type(model).__name__} without name_or_path; give tokenizer= too")
    if is_name(tokenizer):
        from rl_backends import load_tokenizer

        tokenizer = load_tokenizer(str(tokenizer))

    if isinstance(data, Mapping):  # the section's keys: data={"source": "rows.jsonl", "columns": {...}}
        put("data", data)
        data = None
    if held_out is not None and data is None:
        raise Refusal("held_out= replaces the rows that are held out of data=; give data= too")
    if data is not None:
        for key in ("split", "name", "revision", "held_out_share", "columns"):  # they are about the recipe's own data
            put(f"data.{key}", None)
        put("data.columns", {})  # after null, since a mapping would merge
        if is_name(data) and held_out is None and not load_strings:
            put("data.source", str(data))
            data = None
        else:
            apart = "" if held_out is None else f", held out {describe_object(held_out)[16:-1]}"
            put("data.source", f"{describe_object(data)[:-1]}{apart}>")
            data = str(data) if isinstance(data, Path) else data

    if reward is not None and environment is not None:
        raise Refusal("reward= and environment= exclude each other: an environment returns its own rewards")
    if isinstance(reward, Sequence) and not isinstance(reward, str):
        reward = {getattr(each, "__name__", type(each).__name__): each for each in reward}
    several = reward if isinstance(reward, Mapping) else {"": reward} if reward is not None else {}
    for name, each in several.items():
        if not (isinstance(each, str) or callable(each)):
            label = f"reward {name!r}" if name else "reward="
            raise Refusal(f"{label} is a {type(each).__name__}; give a function or file.py:function")
    if several:
        told = {name: each if isinstance(each, str) else describe_object(each) for name, each in several.items()}
        put("env", None)  # whatever the recipe judged by, all of it
        put("env", {"rewards": told} if isinstance(reward, Mapping) else {"reward": told[""]})
        if load_strings or not all(isinstance(each, str) for each in several.values()):
            loaded = {
                name: load_function(each, wanted="a reward function (reward=)") if isinstance(each, str) else each
                for name, each in several.items()
            }
            reward = loaded if isinstance(reward, Mapping) else loaded[""]
        else:
            reward = None
    if isinstance(environment, str):
        put("env", None)
        put("env", {"environment": environment})
        environment = load_function(environment, wanted="an environment (environment=)") if load_strings else None
    elif environment is not None:
        if not callable(environment):
            raise Refusal(
                f"environment= is a {type(environment).__name__}; give its class, or a function that makes one: each "
                f"rollout needs its own"
            )
        put("env", None)
        put("env", {"environment": describe_object(environment)})
    return changes, Objects(
        model=model, tokenizer=tokenizer, data=data, held_out=held_out, reward=reward, environment=environment
    )


def _load_by_name(name: str) -> Any:
    from rl_backends import load_causal_lm

    return load_causal_lm(name)


def _as_texts(overrides: Overrides) -> list[str]:
    """Overrides as the command line writes them; a dict's values are JSON, which is YAML."""
    if isinstance(overrides, str):
        raise Refusal(f"overrides={overrides!r} is one text; give a list of them")
    if isinstance(overrides, Mapping):
        return [f"{key}={json.dumps(value, default=str)}" for key, value in overrides.items()]
    return list(overrides)


def _load(recipe: RecipeLike, overrides: Sequence[str]) -> Resolved[Recipe]:
    from rl_launcher.bundled_recipes import find_recipe
    from rl_launcher.recipe_files import load_recipe as load
    from rl_launcher.schema import STAGES, Recipe

    if not isinstance(recipe, Mapping):
        return load(find_recipe(recipe), schema=Recipe, overrides=overrides)
    named = [stage for stage in STAGES if recipe.get(stage)] or ["run"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "recipe.yaml"
        file.write_text(json.dumps({"run_dir": f"runs/{named[-1]}", **recipe}, default=str), encoding="utf-8")
        return load(file, schema=Recipe, overrides=overrides)


def _unused(run_dir: str) -> str:
    """`run_dir`, or with the least number behind it under which nothing is."""
    from rl_launcher.checks.preflight import taken

    names = (run_dir, *(f"{run_dir}-{number}" for number in range(2, 10_000)))
    return next(name for name in names if taken(name) is None)


def _model_name(changes: Sequence[str]) -> str | None:
    """What `policy.model_name` is overridden by."""
    names = [text.partition("=")[2] for text in changes if text.startswith("policy.model_name=")]
    return json.loads(names[-1]) if names else None


def _folder_of(run: Any) -> Path:
    return run.run_dir if isinstance(run, RunResult) else Path(run)
