"""`${…}` in a file of NeMo-RL, worked out: keys, relative keys, arithmetic, environment variables.

`${a.b}` is the key from the root, `${.b}` the one beside, `${..b}` one section up; `add`, `mul`, `div` and `max` take
two arguments; `${oc.env:NAME}` is left as ours, `${env:NAME}`. What cannot be worked out stays as it is, and is told.
"""

import re
from collections.abc import Callable
from typing import Any

__all__ = ["interpolate"]

INNERMOST = re.compile(r"\$\{([^${}]*)\}")
# Ours for an environment variable, hidden from the search for what is left to do.
HIDDEN = "\0{env:"
DEEPEST = 50
ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda left, right: left + right,
    "mul": lambda left, right: left * right,
    "div": lambda left, right: left / right,
    "max": max,
}
Path = tuple[str, ...]


def interpolate(data: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the data worked out, and by dotted key the reason why something could not be."""
    failures: dict[str, str] = {}
    worked_out = _walk(data, (), data, failures=failures)
    assert isinstance(worked_out, dict)
    return worked_out, failures


def _walk(value: Any, path: Path, root: dict[str, Any], *, failures: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {str(name): _walk(each, (*path, str(name)), root, failures=failures) for name, each in value.items()}
    if isinstance(value, list):
        return [_walk(each, (*path, str(index)), root, failures=failures) for index, each in enumerate(value)]
    if not isinstance(value, str):
        return value
    try:
        return _unhidden(_text(value, path, root, depth=0))
    except (LookupError, TypeError, ValueError, ZeroDivisionError) as error:
        failures[".".join(path)] = str(error).strip("'\"")
        return value


def _text(text: str, path: Path, root: dict[str, Any], *, depth: int) -> Any:
    if depth > DEEPEST:
        raise ValueError("it refers to itself")
    while found := INNERMOST.search(text):
        value = _expression(found[1].strip(), path, root, depth=depth)
        if found.span() == (0, len(text)):
            return value
        text = text[: found.start()] + str(value) + text[found.end() :]
    return text


def _expression(expression: str, path: Path, root: dict[str, Any], *, depth: int) -> Any:
    name, colon, words = expression.partition(":")
    if not colon:
        target = _target(expression, path)
        value = _look_up(target, root)
        return _text(value, target, root, depth=depth + 1) if isinstance(value, str) else value
    if name == "oc.env":
        variable, _, default = words.partition(",")
        return HIDDEN + variable.strip() + (f":{default.strip()}" if default else "") + "}"
    if name not in ARITHMETIC:
        raise ValueError(f"${{{name}:…}} is not known")
    left, right = (_number(word) for word in words.split(","))
    return ARITHMETIC[name](left, right)


def _target(reference: str, path: Path) -> Path:
    dots = len(reference) - len(reference.lstrip("."))
    names = tuple(reference.lstrip(".").split("."))
    return names if dots == 0 else (*path[: max(len(path) - dots, 0)], *names)


def _look_up(target: Path, root: dict[str, Any]) -> Any:
    value: Any = root
    for name in target:
        if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, dict) and name in value:
            value = value[name]
        else:
            raise LookupError(f"{'.'.join(target)} is not in the file")
    return value


def _number(word: str) -> int | float:
    try:
        return int(word)
    except ValueError:
        return float(word)


def _unhidden(value: Any) -> Any:
    return value.replace(HIDDEN, "${env:") if isinstance(value, str) else value
