"""What is wrong with a recipe, on one screen of plain text.

Knows how to show problems; does not know how they are found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from rl_launcher.recipe.locations import Origin

MAX_SHOWN = 8
_MAX_WIDTH = 110


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong, where, and what to do about it."""

    key: str
    """Dotted key, or "" where the problem belongs to a whole file."""

    where: Origin
    """The place to change."""

    message: str
    """Which rule broke, with the names and values."""

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


class RecipeError(ValueError):
    """A recipe that cannot be used, with every problem that was found in it.

    `problems` holds them all; the text shows the first eight.
    """

    def __init__(self, recipe: str, problems: Sequence[Problem]) -> None:
        super().__init__(recipe, tuple(problems))
        self.recipe = recipe
        self.problems = tuple(problems)

    def __str__(self) -> str:
        """Render one screen."""
        count = len(self.problems)
        lines = [f"recipe {self.recipe} is refused: {count} problem{'s' if count != 1 else ''}"]
        lines += [str(problem) for problem in self.problems[:MAX_SHOWN]]
        if count > MAX_SHOWN:
            lines.append(f"… and {count - MAX_SHOWN} more")
        return "\n".join(lines)


def similarity(left: str, right: str) -> float:
    """Return difflib's ratio of two names, 0 to 1, whatever their case."""
    return SequenceMatcher(None, left.lower(), right.lower()).ratio()


def nearest(name: str, candidates: Sequence[str], *, cutoff: float = 0.6) -> list[str]:
    """Return up to three candidates that resemble `name`, the best first."""
    scored = sorted(((similarity(name, other), other) for other in candidates), reverse=True)
    return [other for score, other in scored[:3] if score >= cutoff]


def shorten(text: str, width: int) -> str:
    """Cut `text` to `width` characters, the last an ellipsis."""
    return text if len(text) <= width else text[: width - 1] + "…"
