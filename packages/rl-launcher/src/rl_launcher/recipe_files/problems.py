"""`Origin`, where a value of a recipe was written, and `RecipeError`, what is wrong with a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path

from rl_launcher.errors import Refusal

SHIPPED = Path(__file__).resolve().parents[1] / "recipes"
"""The folder of the recipes that come with the package."""

KeyPath = tuple[str | int, ...]
_MAX_SHOWN = 8
_MAX_WIDTH = 110


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a value was written: in a file, in an override, in Python, or nowhere, for a default of the schema."""

    file: Path | None = None
    """The recipe that holds it, as the user or an inheriting recipe spelled it."""

    line: int | None = None
    """Line of `file`, counted from 1; None for the file itself."""

    column: int | None = None
    """Column of `line`, counted from 1."""

    override: str | None = None
    """The override as the user wrote it, or the key of a keyword argument."""

    python: bool = False
    """True for a value that was passed in Python, in a recipe that is a dict or as a keyword argument."""

    source: str = field(default="", compare=False, repr=False)
    """The text of `line`, for error messages."""

    @property
    def is_default(self) -> bool:
        """Whether the value is the schema's default."""
        return self.file is None and self.override is None and not self.python

    @property
    def is_shipped(self) -> bool:
        """Whether a recipe of the package holds the value."""
        return self.file is not None and self.file.resolve().is_relative_to(SHIPPED)

    def __str__(self) -> str:
        """Return `file:line`, `override "a.b=3"`, `Python keyword a.b`, `Python` or `default`."""
        if self.python:
            return "Python" if self.override is None else f"Python keyword {self.override}"
        if self.override is not None:
            return f'override "{self.override}"'
        if self.file is None:
            return "default"
        # The installation's folder says nothing to a reader, so a shipped recipe is named without it.
        installed = self.is_shipped and self.file.is_absolute()
        name = f"shipped {self.file.resolve().relative_to(SHIPPED)}" if installed else str(self.file)
        return name if self.line is None else f"{name}:{self.line}"


DEFAULT = Origin()


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong, where it is, and what to do about it."""

    key: str
    """Dotted key, or "" if the problem concerns a whole file."""

    where: Origin
    """The place to change."""

    message: str
    """Which rule is broken, with the names and values."""

    hint: str = ""
    """What to do."""

    def __str__(self) -> str:
        """Render as `file:line:column: key: message`, the source line and the hint."""
        where = self.where
        place = f"{where}:{where.column}" if where.line is not None and where.column is not None else str(where)
        lines = [": ".join(part for part in (place, self.key, self.message) if part)]
        if where.source.strip():
            lines.append(f"    {where.line} | {shorten(where.source.rstrip(), _MAX_WIDTH)}")
        if self.hint:
            lines.append(f"    {self.hint}")
        return "\n".join(lines)


class RecipeError(Refusal):
    """A recipe that cannot be used. `problems` holds everything that was found; the text shows the first eight."""

    def __init__(self, recipe: str, problems: Sequence[Problem]) -> None:
        super().__init__(recipe, tuple(problems))
        self.recipe = recipe
        self.problems = tuple(problems)

    def __str__(self) -> str:
        """Render one screen."""
        count = len(self.problems)
        lines = [f"recipe {self.recipe} is refused: {count} problem{'s' if count != 1 else ''}"]
        lines += [str(problem) for problem in self.problems[:_MAX_SHOWN]]
        if count > _MAX_SHOWN:
            lines.append(f"… and {count - _MAX_SHOWN} more")
        return "\n".join(lines)


def reading_order(problem: Problem) -> tuple[bool, str, int, int]:
    """Sort key of problems: by file and line, overrides last."""
    where = problem.where
    return where.override is not None, str(where.file), where.line or 0, where.column or 0


def dotted(path: KeyPath) -> str:
    """Return `("a", "b", 0)` as `a.b.0`."""
    return ".".join(map(str, path))


def similarity(left: str, right: str) -> float:
    """Return difflib's ratio of two names, from 0 to 1, ignoring case."""
    return SequenceMatcher(None, left.lower(), right.lower()).ratio()


def nearest(name: str, candidates: Sequence[str], *, cutoff: float = 0.6) -> list[str]:
    """Return up to three candidates that resemble `name`, the best first."""
    scored = sorted(((similarity(name, other), other) for other in candidates), reverse=True)
    return [other for score, other in scored[:3] if score >= cutoff]


def shorten(text: str, width: int) -> str:
    """Cut `text` to `width` characters, the last of which is an ellipsis."""
    return text if len(text) <= width else text[: width - 1] + "…"
