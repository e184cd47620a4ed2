"""Train, resume, evaluate and explain from Python: what the command line does, with objects in place of strings.

    result = rl_launcher.train("grpo", model="Qwen/Qwen3-0.6B", data=rows, reward=score)
    result.dataframe, result.model, result.report

Importing this module loads neither torch nor transformers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_launcher.errors import Refusal, RunStoppedError, is_refusal
from rl_launcher.run_result import RunResult

if TYPE_CHECKING:
    from rl_algorithms.evaluation import Measured
    from rl_launcher.checks.explain import Explained
    from rl_launcher.recipe_files import Resolved
    from rl_launcher.schema import Recipe
    from rl_launcher.user_code import Objects


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
            mode; `result.model` is loaded from what was saved. Over Ray the object stays as it was: its weights are
            written to `run_dir/initial_model`, from where the ranks read them.
        tokenizer: a name, a folder, or a tokenizer. If left out, it is loaded from where the model came from
            (`model.name_or_path`).
        data: rows as a list of dicts or a `datasets.Dataset`; or a file, a data set on the hub, or
            `file.py:function`. Rows have the columns that they have in files: `prompt` (a text or chat messages) and
            any columns that the reward reads; `messages` for SFT; `prompt`, `chosen` and `rejected` for DPO. The
            recipe's own `data.split`, `name`, `revision`, `columns` and `held_out_share` do not apply to it.
        held_out: rows of the same kinds that are never trained on. If left out, a tenth of the prompts is held out.
        reward: a function `reward(prompts, completions, **columns) -> list[float]`, as in TRL; a list of functions or
            a dict of them by name, whose weighted sum is the reward; or `file.py:function`. Replaces the recipe's
            section `env`.
        environment: instead of a reward, a class or function that makes an environment of several turns; or
            `file.py:name`. Replaces the recipe's section `env`.
        overrides: further keys as on the command line, `["grpo.max_num_steps=5"]`, or as a dict.
        **keys: further keys by section, `grpo={"max_num_steps": 5}`, `seed=1`, or dotted,
            `**{"grpo.max_num_steps": 5}`. None switches a section off: `sft=None`.

    The run directory is `run_dir=...`, which must not exist; if left out, that of the recipe, with `-2`, `-3`, ...
    appended if it exists.

    Raises:
        Refusal: the recipe, the data, the reward or the model cannot be used; nothing was trained or left behind.
        RunStoppedError: the run ended early. The error's `result` holds what there is; `resume` continues it.
    """
    changes, objects = _take(locals())
    resolved = _load(recipe, changes)
    if not any(change.startswith("run_dir=") for change in changes):
        resolved = _load(recipe, [*changes, f"run_dir={json.dumps(_unused(resolved.value.run_dir))}"])
    for note in resolved.notes:
        sys.stderr.write(f"{note}\n")
    return run_recipe(resolved, objects)


def run_recipe(resolved: Resolved[Recipe], objects: Objects | None = None) -> RunResult:
    """Run a recipe that `load_recipe` returned, with the Python objects that it describes, into exactly its `run_dir`.

    Raises:
        Refusal: as of `train`; also if the run directory exists.
        RunStoppedError: as of `train`.
    """
    from rl_launcher.run import run
    from rl_launcher.user_code import NO_OBJECTS

    with _refusals(Path(resolved.value.run_dir)):
        summary = run(resolved, objects=objects or NO_OBJECTS)
    return RunResult(resolved.value.run_dir, summary)


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
    """Continue an interrupted or killed run from its last checkpoint; on a CPU, bit for bit as if it had not stopped.

    The objects that `train` was given must be given again: of a model the architecture counts, since the weights come
    from the checkpoint; rows that changed are refused. The other keys are those that say where and how the run runs,
    not what it learns.

    Raises:
        Refusal: there is nothing to resume, or an object is missing: the message names it.
        RunStoppedError: the run ended early again.
    """
    from rl_launcher.run import resume as resume_run
    from rl_launcher.user_code import refuse_missing_objects

    changes, objects = _take(locals(), resuming=True)
    folder = Path(run_dir.run_dir if isinstance(run_dir, RunResult) else run_dir)
    if (folder / "recipe.yaml").is_file():
        recorded = _load(folder / "recipe.yaml", []).value
        refuse_missing_objects(recorded, objects, remedy=f"rl_launcher.resume({str(folder)!r}, {{}})")
    with _refusals(folder):
        summary = resume_run(folder, changes, objects=objects)
    return RunResult(folder, summary)


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

    `subject` is a recipe, or a run by its directory or its result, whose trained model is measured unless `model` is
    given. The other arguments are those of `train`. Of what is returned `.figures()` is a dict and `.text()` a table.

    Raises:
        Refusal: something cannot be loaded, or neither reward nor environment is given.
    """
    from rl_launcher.run import measure, measured_recipe
    from rl_launcher.user_code import refuse_missing_objects

    changes, objects = _take(locals())
    folder = subject.run_dir if isinstance(subject, RunResult) else subject
    with _refusals():
        if isinstance(folder, str | Path) and Path(folder).is_dir():
            named = [json.loads(text.partition("=")[2]) for text in changes if text.startswith("policy.model_name=")]
            resolved = measured_recipe(Path(folder), overrides=changes, model=named[-1] if named else None)
        else:
            resolved = _load(folder, changes)
        refuse_missing_objects(resolved.value, objects, remedy=f"rl_launcher.evaluate({str(folder)!r}, {{}})")
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

    Needs no GPU, trains nothing and writes nothing.

    Returns:
        The explanation: `.text()` for people, `.figures` as a dict, `.refusal` if the memory does not suffice.

    Raises:
        Refusal: what `train` would refuse before training, except for too little memory.
    """
    from rl_launcher.checks.explain import explain as explain_recipe
    from rl_launcher.user_code import refuse_missing_objects

    changes, objects = _take(locals())
    with _refusals():
        resolved = _load(recipe, changes)
        refuse_missing_objects(resolved.value, objects, remedy="rl_launcher.explain(recipe, {})")
        return explain_recipe(resolved, objects)


def load_recipe(recipe: RecipeLike, *, overrides: Overrides = (), **keys: Any) -> Resolved[Recipe]:
    """Read and validate a recipe: `.value` is the `Recipe`, `.origins` where each key was set, `.to_yaml()` all of it.

    Raises:
        Refusal: there is no such recipe; or, as a `RecipeError`, a key is wrong: the message names each wrong key with
            its file and line, the nearest valid key and the values that it takes.
    """
    return _load(recipe, [*_as_texts(overrides), *_as_texts(keys)])


@contextmanager
def _refusals(run_dir: Path | None = None) -> Iterator[None]:
    """Raise what a sibling package refuses (`DataError`, `PlanError`, ...) as a `Refusal`, with that as its cause.

    An early end of the run in `run_dir` carries the result of what there is.
    """
    try:
        yield
    except RunStoppedError as error:
        error.result = None if run_dir is None else RunResult(run_dir)
        raise
    except ValueError as error:
        if isinstance(error, Refusal) or not is_refusal(error):
            raise
        raise Refusal(str(error)) from error


def _take(arguments: Mapping[str, Any], *, resuming: bool = False) -> tuple[list[str], Objects]:
    """The overrides and the objects among a public function's `arguments`; while resuming, objects change no key."""
    from rl_launcher.user_code import take_objects

    names = ("model", "tokenizer", "data", "held_out", "reward", "environment")
    with _refusals():
        changes, objects = take_objects(**{name: arguments[name] for name in names}, resuming=resuming)
    given = [*_as_texts(arguments["overrides"]), *_as_texts(arguments["keys"])]
    return given if resuming else [*changes, *given], objects


def _as_texts(overrides: Overrides) -> list[str]:
    """Overrides as the command line writes them; a dict's values become JSON, which is YAML."""
    if isinstance(overrides, str):
        raise Refusal(f"overrides={overrides!r} is one text; give a list of them")
    if isinstance(overrides, Mapping):
        return [f"{key}={json.dumps(value, default=str)}" for key, value in overrides.items()]
    return list(overrides)


def _load(recipe: RecipeLike, overrides: Sequence[str]) -> Resolved[Recipe]:
    from rl_launcher.recipe_files import load_recipe as load
    from rl_launcher.recipe_files.shipped import find_recipe
    from rl_launcher.schema import STAGES, Recipe

    if isinstance(recipe, Mapping):
        named = [stage for stage in STAGES if recipe.get(stage)] or ["run"]
        return load({"run_dir": f"runs/{named[-1]}", **recipe}, schema=Recipe, overrides=overrides)
    return load(find_recipe(recipe), schema=Recipe, overrides=overrides)


def _unused(run_dir: str) -> str:
    """`run_dir`, or with the smallest number appended that no other run has."""
    from rl_launcher.checks.preflight import taken

    names = (run_dir, *(f"{run_dir}-{number}" for number in range(2, 10_000)))
    return next(name for name in names if taken(name) is None)
