"""Where a value of a recipe was written, and what is wrong with it.

Knows nothing of YAML, of schemas or of merging.

Knows how to show problems; does not know how they are found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from pathlib import Path

Scalar = str | int | float | bool | None
KeyPath = tuple[str | int, ...]
SHIPPED = Path(__file__).resolve().parents[1] / "recipes"
"""Where the recipes of the package lie: a folder that people need not read in every line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a value comes from; with neither file nor override it is the schema's default."""

    file: Path | None = None
    """The recipe which holds it, as the user or an inheriting recipe spelled it."""

    line: int | None = None
    """Line of `file`, counted from 1; None for a file as a whole."""

    column: int | None = None
    """Column of `line`, counted from 1."""

    override: str | None = None
    """The override as the user wrote it."""

    source: str = field(default="", compare=False, repr=False)
    """The text of `line`, for error messages."""

    @property
    def is_default(self) -> bool:
        """Whether nobody wrote it."""
        return self.file is None and self.override is None

    def __str__(self) -> str:
        """Return `file:line`, `override "a.b=3"` or `default`; of a shipped recipe the file's name is enough."""
        if self.override is not None:
            return f'override "{self.override}"'
        if self.file is None:
            return "default"
        name = str(self.file)
        if self.file.is_absolute() and (file := self.file.resolve()).is_relative_to(SHIPPED):
            name = f"shipped {file.relative_to(SHIPPED)}"
        return name if self.line is None else f"{name}:{self.line}"


DEFAULT = Origin()


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A value of a recipe with the places of its key and of itself."""

    value: Scalar | Mapping[str, Node] | Sequence[Node]
    origin: Origin
    """Where the value starts."""

    key: Origin
    """Where its key starts; the file as a whole for the root, the value's own place for items of lists."""

    @property
    def where(self) -> Origin:
        """Where to point when the value is wrong: at the value if it shares its key's line, else at the key."""
        return self.origin if self.origin.line == self.key.line else self.key

    def children(self) -> Iterator[tuple[str | int, Node]]:
        """Yield what a mapping or a list holds; nothing for a scalar."""
        if isinstance(self.value, Mapping):
            yield from self.value.items()
        elif isinstance(self.value, Sequence) and not isinstance(self.value, str):
            yield from enumerate(self.value)

    def child(self, name: str | int) -> Node | None:
        """Return the value under `name` (a key, or a position in a list), or None."""
        return dict(self.children()).get(name)

    def nearest(self, path: KeyPath) -> tuple[Node, bool]:
        """Return the value at `path` and True, or its deepest written ancestor and False."""
        here = self
        for name in path:
            below = here.child(name)
            if below is None:
                return here, False
            here = below
        return here, True

    def plain(self) -> object:
        """Return dicts, lists and scalars, without places."""
        if isinstance(self.value, Mapping):
            return {name: child.plain() for name, child in self.value.items()}
        if isinstance(self.value, Sequence) and not isinstance(self.value, str):
            return [child.plain() for child in self.value]
        return self.value

    def without(self, path: KeyPath) -> Node:
        """Return a copy that lacks the mapping's key at `path`."""
        if not path or self.child(path[0]) is None:
            return self
        head, rest = path[0], path[1:]
        kept = [(name, child.without(rest) if name == head else child) for name, child in self.children()]
        if isinstance(self.value, Mapping):
            return replace(self, value={str(name): child for name, child in kept if rest or name != head})
        return replace(self, value=[child for _, child in kept])


def default_node(plain: object) -> Node:
    """Return plain data as a value that nobody wrote."""
    if isinstance(plain, Mapping):
        return Node(value={str(k): default_node(v) for k, v in plain.items()}, origin=DEFAULT, key=DEFAULT)
    if isinstance(plain, list | tuple):
        return Node(value=[default_node(item) for item in plain], origin=DEFAULT, key=DEFAULT)
    if plain is None or isinstance(plain, str | int | float | bool):
        return Node(value=plain, origin=DEFAULT, key=DEFAULT)
    raise TypeError(f"a default of a recipe is plain data, got {plain!r} of type {type(plain).__name__}")


def dotted(path: KeyPath) -> str:
    """Return `("a", "b", 0)` as `a.b.0`."""
    return ".".join(str(name) for name in path)


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
