"""The user's own code: Python objects that are given, and functions and classes that a recipe names as strings."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rl_launcher.errors import Refusal
from rl_launcher.recipe_files import imported_digest, load_object
from rl_launcher.schema import Recipe

__all__ = [
    "NO_OBJECTS",
    "Objects",
    "call",
    "changed_code",
    "code_digests",
    "is_import_string",
    "load_function",
    "named_code",
]


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
    """The functions and classes that `recipe` names, by key: data, models, rewards, environment."""
    found = {"data.source": recipe.data.source, "policy.model_name": recipe.policy.model_name}
    if recipe.distill is not None:
        found["distill.teacher.model_name"] = recipe.distill.teacher.model_name
    if (env := recipe.env) is not None:
        found |= {f"env.rewards.{name}": text for name, text in env.rewards.items()}
        found |= {"env.reward": env.reward or "", "env.environment": env.environment or ""}
    return {key: text for key, text in found.items() if is_import_string(text)}


def code_digests(recipe: Recipe) -> dict[str, str]:
    """A digest of the file that each of `named_code` was imported from; not of what that file imports."""
    digests = {key: imported_digest(text) for key, text in named_code(recipe).items()}
    return {key: digest for key, digest in digests.items() if digest is not None}


def changed_code(recipe: Recipe, before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """A sentence for each file whose digest differs between `before` and `after`; keys of only one are ignored."""
    keys: dict[str, list[str]] = {}
    for key, text in named_code(recipe).items():
        if key in before and key in after and before[key] != after[key]:
            keys.setdefault(text.rpartition(":")[0], []).append(key)
    return [f"{place} ({', '.join(named)}) has changed since" for place, named in keys.items()]
