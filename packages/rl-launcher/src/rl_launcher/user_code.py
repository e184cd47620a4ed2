"""What a recipe names as a text and the user has written: functions, found, checked and called.

What they raise is an error of the recipe key that names them, and no traceback.
"""

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
    """Python objects that take the place of what a recipe would name as a string; None where the recipe decides."""

    model: Any = None
    """A `transformers` model; replaces loading `policy.model_name`."""

    tokenizer: Any = None
    """Its tokenizer."""

    data: Any = None
    """Training rows: a list of dicts or a `datasets.Dataset`; replaces reading `data.source`."""

    held_out: Any = None
    """Held-out rows, of the same kinds; replaces cutting `data.held_out_share`."""

    reward: Any = None
    """A reward function, or a dict of several by name; replaces `env.reward` and `env.rewards`."""

    environment: Any = None
    """A class or function that makes an environment; replaces `env.environment`."""


NO_OBJECTS = Objects()
"""Everything is named by the recipe, as on the command line."""


def is_import_string(source: str) -> bool:
    """`package.module:name` or `file.py:name`, as against a path or a hub id, neither of which ends in `:name`."""
    location, colon, name = source.rpartition(":")
    return bool(colon and location) and name.isidentifier()


def load_function(text: str, *, wanted: str) -> Callable[..., Any]:
    """The function that `text` names; `wanted` says what for.

    Raises:
        ImportStringError: it names nothing.
        Refusal: it names what cannot be called.
    """
    function = load_object(text, wanted=wanted)
    if not callable(function):
        raise Refusal(f"{text} is {function!r:.80}, and {wanted} must be callable")
    return function


def call(text: str, *arguments: object, wanted: str) -> Any:
    """Call the function that `text` names.

    Raises:
        Refusal: it raised.
    """
    function = load_function(text, wanted=wanted)
    try:
        return function(*arguments)
    except Exception as error:
        raise Refusal(f"{text}, {wanted}, raised {type(error).__name__}: {error}") from error


def named_code(recipe: Recipe) -> dict[str, str]:
    """By key, what `recipe` names of the user's functions and classes: data, models, rewards, environment."""
    found = {"data.source": recipe.data.source, "policy.model_name": recipe.policy.model_name}
    if recipe.distill is not None:
        found["distill.teacher.model_name"] = recipe.distill.teacher.model_name
    if (env := recipe.env) is not None:
        found |= {f"env.rewards.{name}": text for name, text in env.rewards.items()}
        found |= {"env.reward": env.reward or "", "env.environment": env.environment or ""}
    return {key: text for key, text in found.items() if is_import_string(text)}


def code_digests(recipe: Recipe) -> dict[str, str]:
    """By key, a digest of the file that each was imported from, as it was then; not of what that file imports."""
    digests = {key: imported_digest(text) for key, text in named_code(recipe).items()}
    return {key: digest for key, digest in digests.items() if digest is not None}


def changed_code(recipe: Recipe, before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Which of them are no longer what they were, a sentence for each file; of what only one knows, nothing."""
    keys: dict[str, list[str]] = {}
    for key, text in named_code(recipe).items():
        if key in before and key in after and before[key] != after[key]:
            keys.setdefault(text.rpartition(":")[0], []).append(key)
    return [f"{place} ({', '.join(named)}) has changed since" for place, named in keys.items()]
