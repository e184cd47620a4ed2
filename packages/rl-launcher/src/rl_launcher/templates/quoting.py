"""Values as a shell reads them back, whatever they hold; and scripts of this folder with values in their places."""

import re
import shlex
from collections.abc import Mapping, Sequence
from importlib.resources import files

from rl_launcher.templates.job import check_words

__all__ = ["array", "assignment", "fill"]


def assignment(name: str, value: str | int) -> str:
    """Return `name=value`, quoted.

    Raises:
        LauncherError: a value that no shell can hold.
    """
    check_words(str(value))
    return f"{name}={shlex.quote(str(value))}"


def array(name: str, words: Sequence[str]) -> str:
    """Return `name=(a b …)`, each word quoted.

    Raises:
        LauncherError: a word that no shell can hold.
    """
    for word in words:
        check_words(word)
    return f"{name}=({' '.join(map(shlex.quote, words))})"


def fill(script: str, parts: Mapping[str, str]) -> str:
    """Return a script of this folder with each `@@NAME@@` replaced, once: what a part holds stays as it is."""
    text = files("rl_launcher.templates").joinpath(script).read_text(encoding="utf-8")
    return re.sub("@@([A-Z]+)@@", lambda found: parts[found[1]], text)
