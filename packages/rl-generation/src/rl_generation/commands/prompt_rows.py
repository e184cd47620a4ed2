"""The rows of a JSON Lines file of prompts, every bad one refused before anything runs.

A row is an object with one of
    "prompt": text          "messages": [{"role": …, "content": …}, …]          "prompt_token_ids": [1, 2, …]
and, if wanted, "id" (text or integer, given back with its answers) and "sampling" (fields of Sampling for this row).
"""

import contextlib
import json
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from rl_generation.commands.console import CommandError
from rl_generation.commands.sampling_flags import is_integer, override
from rl_generation.errors import PromptError
from rl_generation.requests import Limits, Prompt, Sampling, make_requests

__all__ = ["Complaints", "PromptRow", "check_limits", "read_rows"]

KINDS = ("prompt", "messages", "prompt_token_ids")
OWN_FIELDS = (*KINDS, "id", "sampling")
SHOWN = 10
"""Bad rows that a refusal shows; it counts the others."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """One row of the input."""

    line: int
    """Of the file, from 1; blank lines count."""

    kind: str
    """Which of `KINDS` it has."""

    content: Any
    """What stands there: text, messages, or token ids."""

    sampling: Sampling
    """How it is answered."""

    overrides: dict[str, Any] = field(default_factory=dict)
    """What of that the row says itself."""

    id: str | int | None
    """What it calls itself."""

    carried: dict[str, Any]
    """Its other fields, which go with its answers."""


@final
@dataclass(slots=True)
class Complaints:
    """What is wrong with the rows of a file, gathered so that one refusal names all of it."""

    path: Path
    found: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def about(self, line: int) -> Iterator[None]:
        """Take a ValueError raised within as a complaint about `line`."""
        try:
            yield
        except ValueError as error:
            self.found.append(f"line {line}: {error}")

    def refuse(self) -> None:
        """Raise CommandError if there were any."""
        if self.found:
            more = f"\n  and {len(self.found) - SHOWN} more" if len(self.found) > SHOWN else ""
            listed = "".join(f"\n  {complaint}" for complaint in self.found[:SHOWN])
            raise CommandError(f"{self.path} has {len(self.found)} bad row(s); nothing was generated:{listed}{more}")


def read_rows(path: Path, sampling: Sampling, *, carry: Collection[str] = ()) -> list[PromptRow]:
    """Read the rows of a file in UTF-8. The seed of row i is that of prompt i in `Sampling.spread`, or its own.

    Args:
        path: The file.
        sampling: For what a row does not say itself.
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
    complaints, rows = Complaints(path), []
    for (number, line), how in zip(filled, sampling.spread(len(filled)), strict=True):
        with complaints.about(number):
            rows.append(_row(_parse(line), how, line=number, carry=carry))
    complaints.refuse()
    return rows


def check_limits(path: Path, rows: Sequence[PromptRow], prompts: Sequence[Prompt], *, limits: Limits) -> None:
    """Refuse the rows that an engine with these `limits` would refuse.

    Raises:
        CommandError: There are some; it names their lines and reasons.
    """
    complaints = Complaints(path)
    for row, prompt in zip(rows, prompts, strict=True):
        with complaints.about(row.line):
            _check_request(prompt, row.sampling, limits)
    complaints.refuse()


def _check_request(prompt: Prompt, sampling: Sampling, limits: Limits) -> None:
    try:
        make_requests([prompt], [sampling], limits)
    except PromptError as error:
        raise ValueError(str(error).replace("prompt 0", "the prompt", 1)) from None


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line, object_pairs_hook=_without_repeats, parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error.msg} at character {error.pos + 1}") from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    parsed = dict(pairs)
    repeated = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    _require(not repeated, f"has the field {', '.join(map(repr, repeated))} twice")
    return parsed


def _refuse_constant(name: str) -> None:
    raise ValueError(f"holds {name}, which is no number of JSON")


def _row(parsed: Any, sampling: Sampling, *, line: int, carry: Collection[str]) -> PromptRow:
    _require(isinstance(parsed, dict), f"must be a JSON object; got {parsed!r}")
    present = [kind for kind in KINDS if kind in parsed]
    _require(len(present) == 1, f"needs one of {', '.join(KINDS)}; it has {' and '.join(present) or 'none of them'}")
    if unknown := [name for name in parsed if name not in OWN_FIELDS and name not in carry]:
        raise ValueError(
            f"has fields that mean nothing here: {', '.join(map(repr, unknown))}; "
            f"give --carry {unknown[0]} to have it beside the answers"
        )
    kind = present[0]
    _check_content(kind, parsed[kind])
    name, overrides = parsed.get("id"), parsed.get("sampling", {})
    _require(name is None or isinstance(name, str) or is_integer(name), f"id must be text or an integer; got {name!r}")
    _require(isinstance(overrides, dict), f"sampling must be an object with fields of Sampling; got {overrides!r}")
    return PromptRow(
        line=line,
        kind=kind,
        content=parsed[kind],
        sampling=override(sampling, overrides),
        overrides=overrides,
        id=name,
        carried={name: parsed[name] for name in carry if name in parsed},
    )


def _check_content(kind: str, content: object) -> None:
    if kind == "prompt":
        _require(isinstance(content, str), f"prompt must be text; got {content!r}")
        return
    some = isinstance(content, list) and bool(content)
    if kind == "messages":
        right = some and all(map(_is_message, content))  # type: ignore[call-overload]
        _require(right, 'messages must be a list, not empty, of objects with a "role" and a "content"')
    else:
        _require(some and all(map(is_integer, content)), f"{kind} must be a list of integers, not empty")  # type: ignore[call-overload]


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message


def _require(holds: bool, otherwise: str) -> None:  # noqa: FBT001 -- the condition is the subject
    if not holds:
        raise ValueError(otherwise)
