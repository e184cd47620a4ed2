"""The user's own code: Python objects that are given, and functions and classes that a recipe names as strings.

`take_objects` splits the arguments of `rl_launcher.train` into `Objects`, which are threaded to where the parts are
made, and overrides that put a description of each into the recorded recipe. A description cannot be loaded, so
`refuse_missing_objects` names what must be given again.
"""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_algorithms.pieces import source_digest
from rl_launcher.errors import Refusal
from rl_launcher.recipe_files import imported_digest, load_object
from rl_launcher.schema import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Objects:
    """Python objects instead of what a recipe names as a string; None where the recipe decides."""

    model: Any = None
    """A `transformers` model, instead of loading `policy.model_name`."""

    tokenizer: Any = None
    """Its tokenizer."""

    data: Any = None
    """Training rows instead of `data.source`: a list of dicts, a `datasets.Dataset`, a path or a
    `rl_algorithms.data.Dataset`."""

    held_out: Any = None
    """Held-out rows of the same kinds, instead of `data.held_out_share`."""

    reward: Any = None
    """A reward function, or a list or dict of several, instead of `env.reward` and `env.rewards`."""

    environment: Any = None
    """A class or function that makes an environment, instead of `env.environment`."""


NO_OBJECTS = Objects()
"""The recipe names everything, as on the command line."""


PYTHON_OBJECT = "<python object: "
"""How the recorded recipe begins to name a value that was given as a Python object."""


def take_objects(
    *, model: Any, tokenizer: Any, data: Any, held_out: Any, reward: Any, environment: Any, resuming: bool = False
) -> tuple[list[str], Objects]:
    """Tell strings from objects among the arguments of `rl_launcher.train`.

    Return overrides that put names, and descriptions of objects, into the recipe; and the objects. While `resuming`
    the recipe is recorded and says that objects were given, so that a name is loaded as one, too.

    Raises:
        Refusal: an argument is of the wrong kind, or excludes another.
    """
    if held_out is not None and data is None:
        raise Refusal("held_out= replaces the rows that are held out of data=; give data= too")
    if reward is not None and environment is not None:
        raise Refusal("reward= and environment= exclude each other: an environment returns its own rewards")
    model_changes, model, tokenizer = _take_model(model, tokenizer, resuming=resuming)
    data_changes, data = _take_data(data, held_out, resuming=resuming)
    env_changes, reward = _take_reward(reward, resuming=resuming)
    if environment is not None:
        env_changes, environment = _take_environment(environment, resuming=resuming)
    objects = Objects(
        model=model, tokenizer=tokenizer, data=data, held_out=held_out, reward=reward, environment=environment
    )
    return [*model_changes, *data_changes, *env_changes], objects


def _take_model(model: Any, tokenizer: Any, *, resuming: bool) -> tuple[list[str], Any, Any]:
    from rl_backends import load_causal_lm, load_tokenizer

    changes = []
    if isinstance(model, str | Path) and resuming:
        model = load_causal_lm(str(model))
    if isinstance(model, str | Path):
        changes = [_set("policy.model_name", str(model)), _set("policy.revision", None)]
        model = None
    elif model is not None:
        if not (hasattr(model, "save_pretrained") and hasattr(model, "config")):
            raise Refusal(f"model= is a {type(model).__name__}; give a transformers model, its name or its folder")
        tokenizer = tokenizer or getattr(model, "name_or_path", None)
        if not tokenizer:
            raise Refusal(f"model= is a {type(model).__name__} without name_or_path; give tokenizer= too")
        changes = [_set("policy.model_name", describe_object(model)), _set("policy.revision", None)]
    if isinstance(tokenizer, str | Path):
        tokenizer = load_tokenizer(str(tokenizer))
    return changes, model, tokenizer


def _take_data(data: Any, held_out: Any, *, resuming: bool) -> tuple[list[str], Any]:
    if data is None:
        return [], None
    if type(data) is dict:  # keys of the section, as of any other: data={"source": "rows.jsonl", "columns": {...}}
        return [_set("data", data)], None
    # These are about the recipe's own data. Null comes before {}, since a mapping would be merged.
    changes = [_set(f"data.{key}", None) for key in ("split", "name", "revision", "held_out_share", "columns")]
    changes.append(_set("data.columns", {}))
    if isinstance(data, str | Path) and held_out is None and not resuming:
        return [*changes, _set("data.source", str(data))], None
    text = describe_object(data)
    if held_out is not None:
        text = f"{text[:-1]}, held out {describe_object(held_out).removeprefix(PYTHON_OBJECT)}"
    return [*changes, _set("data.source", text)], data


def _take_reward(reward: Any, *, resuming: bool) -> tuple[list[str], Any]:
    if reward is None:
        return [], None
    if isinstance(reward, Sequence) and not isinstance(reward, str):
        named = {getattr(each, "__name__", type(each).__name__): each for each in reward}
        if len(named) < len(reward):
            raise Refusal("reward= has several functions of one name; give a dict, name -> function")
        reward = named
    several = reward if isinstance(reward, Mapping) else {"": reward}
    for name, each in several.items():
        if not (isinstance(each, str) or callable(each)):
            which = f"reward {name!r}" if name else "reward="
            raise Refusal(f"{which} is a {type(each).__name__}; give a function or file.py:function")
    texts = {name: each if isinstance(each, str) else describe_object(each) for name, each in several.items()}
    changes = _set_env({"rewards": texts} if isinstance(reward, Mapping) else {"reward": texts[""]})
    if not resuming and all(isinstance(each, str) for each in several.values()):
        return changes, None
    wanted = "a reward function (reward=)"
    loaded = {k: load_function(each, wanted=wanted) if isinstance(each, str) else each for k, each in several.items()}
    return changes, loaded if isinstance(reward, Mapping) else loaded[""]


def _take_environment(environment: Any, *, resuming: bool) -> tuple[list[str], Any]:
    if isinstance(environment, str):
        wanted = "a class or function that makes an environment (environment=)"
        loaded = load_function(environment, wanted=wanted) if resuming else None
        return _set_env({"environment": environment}), loaded
    if not callable(environment):
        raise Refusal(
            f"environment= is a {type(environment).__name__}; give its class, or a function that makes one: each "
            f"rollout needs its own"
        )
    return _set_env({"environment": describe_object(environment)}), environment


def _set(key: str, value: Any) -> str:
    return f"{key}={json.dumps(value)}"  # JSON is YAML


def _set_env(section: dict[str, Any]) -> list[str]:
    return [_set("env", None), _set("env", section)]  # null first: nothing of the recipe's own section is left


def describe_object(value: Any) -> str:
    """What the recorded recipe says instead of a Python object: `<python object: function score at reward.py:3>`."""
    if isinstance(value, str | Path):
        text = str(value)
    elif inspect.isclass(value) or inspect.isroutine(value):
        kind = "class" if inspect.isclass(value) else "function"
        text = f"{kind} {value.__qualname__}{_place(value)}"
    elif isinstance(value, Sized) and not callable(value):
        text = f"{type(value).__name__} of {len(value)} rows"
    else:
        text = f"{type(value).__name__}"
    return f"{PYTHON_OBJECT}{text}>"


def _place(value: Any) -> str:
    """` at file:line` of a function or class; nothing for one without source."""
    try:
        file = Path(inspect.getsourcefile(value) or "")
        line = inspect.getsourcelines(value)[1]
    except (OSError, TypeError):
        return ""
    here = Path.cwd()
    return f" at {file.relative_to(here) if file.is_relative_to(here) else file}:{max(line, 1)}"


def is_python_object(source: str) -> bool:
    """Whether a recipe says that its value was given as a Python object."""
    return source.startswith(PYTHON_OBJECT)


def refuse_missing_objects(recipe: Recipe, objects: Objects, *, remedy: str) -> None:
    """Refuse a recipe that was recorded with Python objects which are not given now.

    Raises:
        Refusal: naming each object, how the recipe describes it, and the call to make: `remedy`, with `{}` where its
            arguments go.
    """
    env = recipe.env
    named = {
        "model": [recipe.policy.model_name],
        "data": [recipe.data.source],
        "reward": [] if env is None else [env.reward or "", *env.rewards.values()],
        "environment": [] if env is None else [env.environment or ""],
    }
    missing = {
        name: next(filter(is_python_object, texts))
        for name, texts in named.items()
        if getattr(objects, name) is None and any(map(is_python_object, texts))
    }
    if missing:
        told = " and ".join(f"{name} was a Python object ({text[1:-1]})" for name, text in missing.items())
        again = remedy.format(", ".join(f"{name}=..." for name in missing))
        raise Refusal(f"{told}, which a recipe cannot name; call {again}")


def is_import_string(source: str) -> bool:
    """Whether `source` is `package.module:name` or `file.py:name`, and not a path or a hub id."""
    location, colon, name = source.rpartition(":")
    return bool(colon and location) and name.isidentifier()


def load_function(text: str, *, wanted: str) -> Callable[..., Any]:
    """Import the function or class that `text` names; `wanted` says what for, in errors.

    Raises:
        ImportStringError: there is no such function.
        Refusal: it cannot be called.
    """
    function = load_object(text, wanted=wanted)
    if not callable(function):
        raise Refusal(f"{text} is {function!r:.80}, and {wanted} must be callable")
    return function


def call(text: str, *arguments: object, wanted: str) -> Any:
    """Import the function that `text` names and call it.

    Raises:
        ImportStringError: there is no such function.
        Refusal: it raised; the cause is chained.
    """
    function = load_function(text, wanted=wanted)
    try:
        return function(*arguments)
    except Exception as error:
        raise Refusal(f"{text}, {wanted}, raised {type(error).__name__}: {error}") from error


def named_code(recipe: Recipe) -> dict[str, str]:
    """The functions and classes that `recipe` names, by key: data, models, rewards, environment, objective."""
    found = {"data.source": recipe.data.source, "policy.model_name": recipe.policy.model_name}
    if recipe.distill is not None:
        found["distill.teacher.model_name"] = recipe.distill.teacher.model_name
    if recipe.reward_model is not None and recipe.reward_model.data is not None:
        found["reward_model.data.source"] = recipe.reward_model.data.source
    if (env := recipe.env) is not None:
        found |= {f"env.rewards.{name}": text for name, text in env.rewards.items()}
        found |= {"env.reward": env.reward or "", "env.environment": env.environment or ""}
    for name, stage in (("grpo", recipe.grpo), ("ppo", recipe.ppo)):
        if stage is not None:
            found |= {f"{name}.objective.{key}": text for key, text in stage.objective.named_code().items()}
    return {key: text for key, text in found.items() if is_import_string(text)}


def code_digests(recipe: Recipe) -> dict[str, str]:
    """A digest of the file that each of `named_code` was imported from; not of what that file imports."""
    digests = {  # rl-algorithms imports the pieces of an objective, on every rank, and keeps what it imported
        key: source_digest(text) if key.startswith(("grpo.objective.", "ppo.objective.")) else imported_digest(text)
        for key, text in named_code(recipe).items()
    }
    return {key: digest for key, digest in digests.items() if digest is not None}


def changed_code(recipe: Recipe, before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """A sentence for each file whose digest differs between `before` and `after`; keys of only one are ignored."""
    keys: dict[str, list[str]] = {}
    for key, text in named_code(recipe).items():
        if key in before and key in after and before[key] != after[key]:
            keys.setdefault(text.rpartition(":")[0], []).append(key)
    return [f"{place} ({', '.join(named)}) has changed since" for place, named in keys.items()]
