"""Read a NeMo-RL recipe with everything it inherits, and resolve its interpolations as OmegaConf does.

`defaults:` names files to start from; a section with `_override_: true` replaces what it inherits. Their YAML is 1.1
with `1e-6` as a number. `${a.b}` is a key from the root, `${.b}` one beside, `${..b}` one section up; `add`, `mul`,
`div` and `max` take two arguments; `${oc.env:NAME}` becomes our `${env:NAME}`. What cannot be resolved is kept and
reported.
"""

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from rl_launcher.errors import Refusal

DEFAULTS, REPLACE = "defaults", "_override_"
MISSING = "???"


class NemoRLError(Refusal):
    """A file that cannot be read as a NeMo-RL recipe, or that no recipe of ours corresponds to."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, with the floats that OmegaConf reads."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(?:\d[\d_]*)(?:\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


@functools.cache
def key_map() -> dict[str, Any]:
    """Return the table of keys that need no rule: what is copied, and what is dropped for which reason."""
    loaded: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "key_map.yaml").read_text(encoding="utf-8"))
    return loaded


def read(path: Path, *, chain: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read one file and what it inherits, later files and the file itself winning.

    Raises:
        NemoRLError: a file is missing, is not YAML, is not a mapping, or inherits itself.
    """
    if path.resolve() in [link.resolve() for link in chain]:
        raise NemoRLError(f"{path} inherits itself, through {' → '.join(map(str, (*chain, path)))}")
    own = _parse(path, chain)
    defaults = own.pop(DEFAULTS, None) or []
    names = defaults if isinstance(defaults, list) else [defaults]
    merged: dict[str, Any] = {}
    for name in names:
        merged = _merge(merged, read(path.parent / str(name), chain=(*chain, path)))
    return _merge(merged, own)


def _parse(path: Path, chain: tuple[Path, ...]) -> dict[str, Any]:
    through = f", inherited through {' → '.join(map(str, chain))}" if chain else ""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)  # noqa: S506 - a safe loader
    except FileNotFoundError:
        raise NemoRLError(f"there is no file {path}{through}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise NemoRLError(f"{path} cannot be read: {error}{through}") from error
    except yaml.YAMLError as error:
        raise NemoRLError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise NemoRLError(f"{path} is not a recipe: it holds no sections")
    return content


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in over.items():
        key = str(name)
        if value == MISSING and key in merged:
            continue
        if not isinstance(value, dict):
            merged[key] = value
            continue
        inherited = {} if value.get(REPLACE) or not isinstance(merged.get(key), dict) else merged[key]
        merged[key] = _merge(inherited, {inner: each for inner, each in value.items() if inner != REPLACE})
    return merged


INNERMOST = re.compile(r"\$\{([^${}]*)\}")
# Our form of an environment variable, hidden so that it is not resolved again.
HIDDEN = "\0{env:"
DEEPEST = 50
ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda left, right: left + right,
    "mul": lambda left, right: left * right,
    "div": lambda left, right: left / right,
    "max": max,
}
KeyPath = tuple[str, ...]


def interpolate(data: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the data with references resolved, and by dotted key the reason why one could not be."""
    failures: dict[str, str] = {}
    resolved = _walk(data, (), data, failures=failures)
    assert isinstance(resolved, dict)
    return resolved, failures


def _walk(value: Any, path: KeyPath, root: dict[str, Any], *, failures: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {str(name): _walk(each, (*path, str(name)), root, failures=failures) for name, each in value.items()}
    if isinstance(value, list):
        return [_walk(each, (*path, str(index)), root, failures=failures) for index, each in enumerate(value)]
    if not isinstance(value, str):
        return value
    try:
        found = _text(value, path, root, depth=0)
        return found.replace(HIDDEN, "${env:") if isinstance(found, str) else found
    except (LookupError, TypeError, ValueError, ZeroDivisionError) as error:
        failures[".".join(path)] = str(error).strip("'\"")
        return value


def _text(text: str, path: KeyPath, root: dict[str, Any], *, depth: int) -> Any:
    if depth > DEEPEST:
        raise ValueError("it refers to itself")
    while found := INNERMOST.search(text):
        value = _expression(found[1].strip(), path, root, depth=depth)
        if found.span() == (0, len(text)):
            return value
        text = text[: found.start()] + str(value) + text[found.end() :]
    return text


def _expression(expression: str, path: KeyPath, root: dict[str, Any], *, depth: int) -> Any:
    name, colon, words = expression.partition(":")
    if not colon:
        target, value = _look_up(expression, path, root)
        return _text(value, target, root, depth=depth + 1) if isinstance(value, str) else value
    if name == "oc.env":
        variable, _, default = words.partition(",")
        return HIDDEN + variable.strip() + (f":{default.strip()}" if default else "") + "}"
    if name not in ARITHMETIC:
        raise ValueError(f"${{{name}:…}} is not known")
    left, right = (int(word) if word.strip().lstrip("-").isdecimal() else float(word) for word in words.split(","))
    return ARITHMETIC[name](left, right)


def _look_up(reference: str, path: KeyPath, root: dict[str, Any]) -> tuple[KeyPath, Any]:
    """Return the key that `reference`, written at `path`, means, and its value."""
    dots = len(reference) - len(reference.lstrip("."))
    target = tuple(reference.lstrip(".").split("."))
    target = (*path[: max(len(path) - dots, 0)], *target) if dots else target
    value: Any = root
    for name in target:
        if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, dict) and name in value:
            value = value[name]
        else:
            raise LookupError(f"{'.'.join(target)} is not in the file")
    return target, value


Kind = Literal["fill_in", "untranslated", "dropped"]
"""`fill_in`: our recipe needs what theirs does not say. `untranslated`: we have nothing like it, so the run differs.
`dropped`: it has no effect here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """One key, and what became of it."""

    kind: Kind
    """One of the three."""

    key: str
    """Their dotted key; our key if something has to be filled in."""

    value: object
    """Its value; the placeholder if something has to be filled in."""

    reason: str
    """Why."""

    def __str__(self) -> str:
        text = str(self.value).replace("\n", " ")
        return f"{self.key}={text[:60]}{'…' if len(text) > 60 else ''}: {self.reason}"


_ABSENT = object()


class Source:
    """A resolved file, whose every key must be accounted for: taken, or noted with a reason."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        self.notes: list[Note] = []
        self._seen: set[str] = set()

    def take(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or `default`, and count the key and everything below it as translated."""
        self._seen.add(key)
        return self.peek(key, default)

    def peek(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or `default`, without accounting for it."""
        value: Any = self.data
        for name in key.split("."):
            if not isinstance(value, dict) or name not in value:
                return default
            value = value[name]
        return value

    def note(self, kind: Kind, key: str, reason: str, *, value: Any = None) -> None:
        """Account for a key by the reason why it is not translated; a key that is not in the file gets no note."""
        self._seen.add(key)
        if value is None and kind != "fill_in" and self.peek(key, _ABSENT) is _ABSENT:
            return
        self.notes.append(Note(kind=kind, key=key, value=self.peek(key) if value is None else value, reason=reason))

    def untranslated(self, key: str, reason: str) -> None:
        """Account for a key that we have nothing for."""
        self.note("untranslated", key, reason)

    def copy(self, rules: str, section: str | None = None) -> dict[str, Any]:
        """Take the keys of a section that `key_map.yaml` copies; return those that have a value, by our names."""
        ours: dict[str, Any] = {}
        for theirs, written in key_map()["copied"][rules].items():
            rule: dict[str, Any] = {"to": written} if isinstance(written, str) else written
            value = self.take(key := f"{section or rules}.{theirs}")
            if value is not None and value not in (choices := list(rule.get("values", [value]))):
                self.untranslated(key, f"it is none of {', '.join(map(str, choices))}")
                value = None
            value = rule.get("default") if value is None else value
            value = rule["values"].get(value) if "values" in rule else value
            *parents, name = rule["to"].split(".")
            inner = functools.reduce(lambda below, parent: below.setdefault(parent, {}), parents, ours)
            if value is not None:
                inner[name] = value
        return ours

    def left(self, value: Any = _ABSENT, path: KeyPath = ()) -> Iterator[tuple[str, Any]]:
        """Yield the keys that are not accounted for, with their values."""
        value, key = self.data if value is _ABSENT else value, ".".join(path)
        if key in self._seen:
            return
        if isinstance(value, dict) and value:
            for name, each in value.items():
                yield from self.left(each, (*path, name))
        else:
            yield key, value
