"""The rows of a JSON Lines file of prompts, every bad one refused before anything runs.

A row is an object with one of
    "prompt": text          "messages": [{"role": …, "content": …}, …]          "prompt_token_ids": [1, 2, …]
and, if wanted, "id" (text or integer, given back with its answers) and "sampling" (fields of Sampling for this row).
"""

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from rl_generation.commands.console import CommandError
from rl_generation.commands.flags import is_integer, override
from rl_generation.errors import PromptError
from rl_generation.requests import Limits, Prompt, Sampling, make_requests

__all__ = ["Encode", "PromptRow", "check_limits", "read_rows"]

KINDS = ("prompt", "messages", "prompt_token_ids")
SHOWN = 10
"""Bad rows that a refusal shows; it counts the others."""

Encode = Callable[[str, Any], Sequence[int]]
"""Makes the token ids of what a row has under `prompt` or `messages`; raises ValueError where it cannot."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """One row of the input."""

    line: int
    """Of the file, from 1; blank lines count."""

    prompt: Prompt
    """Its token ids."""

    sampling: Sampling
    """How it is answered."""

    overrides: dict[str, Any] = field(default_factory=dict)
    """What of that the row says itself."""

    id: str | int | None
    """What it calls itself."""

    carried: dict[str, Any]
    """Its other fields, which go with its answers."""


def read_rows(path: Path, sampling: Sampling, *, encode: Encode, carry: Collection[str] = ()) -> list[PromptRow]:
    """Read the rows of a file in UTF-8. The seed of row i is that of prompt i in `Sampling.spread`, or its own.

    Args:
        path: The file.
        sampling: For what a row does not say itself.
        encode: Of texts and conversations.
        carry: Fields besides those above that a row may have; they are given back with its answers.

    Raises:
        CommandError: The file cannot be read, is empty, or has bad rows; it names their lines and reasons.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}") from None
    filled = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not filled:
        raise CommandError(f"{path} has no rows: each prompt is one line of JSON")
    rows: list[PromptRow] = []
    with _complaints(path) as complaints:
        for (number, line), how in zip(filled, sampling.spread(len(filled)), strict=True):
            try:
                rows.append(_row(line, how, number=number, encode=encode, carry=carry))
            except ValueError as error:
                complaints.append(f"line {number}: {error}")
    return rows


def check_limits(path: Path, rows: Sequence[PromptRow], limits: Limits) -> None:
    """Refuse the rows that an engine with these `limits` would refuse.

    Raises:
        CommandError: There are some; it names their lines and reasons.
    """
    with _complaints(path) as complaints:
        for row in rows:
            try:
                make_requests([row.prompt], [row.sampling], limits)
            except PromptError as error:
                complaints.append(f"line {row.line}: {error}".replace("prompt 0", "the prompt", 1))


@contextlib.contextmanager
def _complaints(path: Path) -> Iterator[list[str]]:
    """Gather what is wrong with the rows of a file, so that one refusal names all of it."""
    found: list[str] = []
    yield found
    if found:
        listed = "".join(f"\n  {complaint}" for complaint in found[:SHOWN])
        more = f"\n  and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise CommandError(f"{path} has {len(found)} bad row(s); nothing was generated:{listed}{more}")


def _row(line: bytes, sampling: Sampling, *, number: int, encode: Encode, carry: Collection[str]) -> PromptRow:
    try:
        row = json.loads(line, object_pairs_hook=_without_repeats, parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error.msg} at character {error.pos + 1}") from None
    _require(isinstance(row, dict), f"must be a JSON object; got {row!r}")
    present = [kind for kind in KINDS if kind in row]
    _require(len(present) == 1, f"needs one of {', '.join(KINDS)}; it has {' and '.join(present) or 'none of them'}")
    unknown = [name for name in row if name not in {*KINDS, "id", "sampling", *carry}]
    _require(
        not unknown,
        f"has fields that mean nothing here: {', '.join(map(repr, unknown))}; "
        f"give --carry {unknown[0] if unknown else ''} to have it beside the answers",
    )
    name, overrides = row.get("id"), row.get("sampling", {})
    _require(name is None or isinstance(name, str) or is_integer(name), f"id must be text or an integer; got {name!r}")
    _require(isinstance(overrides, dict), f"sampling must be an object with fields of Sampling; got {overrides!r}")
    kind, content = present[0], row[present[0]]
    some = isinstance(content, list) and bool(content)
    if kind == "prompt":
        _require(isinstance(content, str), f"prompt must be text; got {content!r}")
    elif kind == "messages":
        right = some and all(
            isinstance(each, dict) and isinstance(each.get("role"), str) and "content" in each for each in content
        )
        _require(right, 'messages must be a list, not empty, of objects with a "role" and a "content"')
    else:
        _require(some and all(map(is_integer, content)), f"{kind} must be a list of integers, not empty")
    return PromptRow(
        line=number,
        prompt=tuple(content if kind == "prompt_token_ids" else encode(kind, content)),
        sampling=override(sampling, overrides),
        overrides=overrides,
        id=name,
        carried={each: row[each] for each in carry if each in row},
    )


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    repeated = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    _require(not repeated, f"has the field {', '.join(map(repr, repeated))} twice")
    return dict(pairs)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"holds {name}, which is no number of JSON")


def _require(holds: bool, otherwise: str) -> None:  # noqa: FBT001 -- the condition is the subject
    if not holds:
        raise ValueError(otherwise)
