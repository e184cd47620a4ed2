"""What to do about a wrong key or value: the nearest valid key, the choices, the docstring.

Knows the schema; does not know the recipe.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rl_launcher.recipe.annotations import (
    Annotation,
    choices_of,
    is_section,
    key_types,
    members,
    origin_of,
    type_text,
)
from rl_launcher.recipe.errors import Failure
from rl_launcher.recipe.locations import Origin, dotted
from rl_launcher.recipe.problems import nearest, similarity
from rl_launcher.recipe.schema import docstrings, keys

_FEW = 10
_FEW_SECTIONS = 20
_CUTOFF = 0.65
_SIBLING_BONUS = 0.1
_YAML_1_1_BOOLEANS = {"yes", "no", "on", "off", "y", "n", "true", "false"}


def unknown_hint(failure: Failure, schema: type) -> str:
    """Return the valid key that resembles the unknown one most, and the section's keys if they are few."""
    if "." in str(failure.path[-1]):
        return "dots join keys in overrides only: in a file, indent the inner key below the outer one"
    parts = []
    meant = _nearest_keys(failure, schema)
    if meant:
        parts.append(f"did you mean {' or '.join(meant)}?")
    siblings = list(key_types(failure.section)) if failure.section is not None else []
    if 0 < len(siblings) <= (_FEW if len(failure.path) > 1 else _FEW_SECTIONS):
        parts.append(f"valid keys here: {', '.join(siblings)}")
    return " ".join(parts) or "remove it"


def missing_hint(failure: Failure) -> str:
    """Return the line to add and what the key means."""
    meaning = described(failure)
    return f"add `{failure.path[-1]}: …` ({type_text(failure.annotation)})" + (f": {meaning}" if meaning else "")


def type_hint(failure: Failure, where: Origin) -> str:
    """Return the likely reason for a value of a wrong type, else what the key means."""
    given, wanted = failure.given, members(failure.annotation)
    if isinstance(given, str):
        return _text_hint(given, wanted) or described(failure)
    if str in wanted and isinstance(given, int | float):
        return "write it in quotes"
    if isinstance(given, float) and int in wanted and given.is_integer():
        return f"write {int(given)}"
    if given is None and any(is_section(member) for member in wanted):
        return "write {} for its defaults, or delete the line"
    if isinstance(given, dict) and where.override and any(origin_of(member) in {list, tuple} for member in wanted):
        return "a list is replaced whole: key=[…]"
    return described(failure)


def described(failure: Failure) -> str:
    """Return the first sentence under the key."""
    name = str(failure.path[-1]) if failure.path else ""
    return docstrings(failure.section).get(name, "") if failure.section is not None else ""


def _text_hint(given: str, wanted: Sequence[Annotation]) -> str:
    like = nearest(given, [str(choice) for member in wanted for choice in choices_of(member)])
    if like:
        return f'did you mean "{like[0]}"?'
    if bool in wanted and given.lower() in _YAML_1_1_BOOLEANS:
        return "write true or false without quotes: in a recipe yes, no, on and off are strings"
    if {int, float} & set(wanted) and re.fullmatch(r"[-+.\d_eE]+", given):
        return "write the number without quotes or leading zeros (an environment variable is always a string)"
    return ""


def _nearest_keys(failure: Failure, schema: type) -> list[str]:
    """Compare the unknown name with the last name of each key, and with the key in full; the same section is ahead.

    Several, at most three, where they are equally near.
    """
    name = str(failure.path[-1])
    siblings = {dotted((*failure.path[:-1], other)) for other in key_types(failure.section or schema)}

    def score(candidate: str) -> float:
        last = similarity(name, candidate.rpartition(".")[2])
        if candidate in siblings:
            return last + _SIBLING_BONUS
        return max(last, similarity(name, candidate))

    scores = {candidate: score(candidate) for candidate in sorted(siblings | {key.dotted for key in keys(schema)})}
    best = max(scores.values())
    return [candidate for candidate in scores if scores[candidate] == best][:3] if best >= _CUTOFF else []
