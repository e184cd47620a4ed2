"""What every command does at its end: print a result, or refuse on one screen with an exit code."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

__all__ = ["FAILED", "INTERRUPTED", "REFUSED", "or_refuse", "print_json", "refuse", "show", "warn"]

FAILED, REFUSED, INTERRUPTED = 1, 2, 130
ResultT = TypeVar("ResultT")


def or_refuse(action: Callable[[], ResultT]) -> ResultT:
    """The result of `action`; what it refuses is printed, and the process ends with exit code 2."""
    try:
        return action()
    except OSError as error:
        refuse(_in_words(error))
    except ValueError as error:
        refuse(error)


def refuse(reason: object, code: int = REFUSED) -> NoReturn:
    """Print why, and end with `code`."""
    _errors().print("[bold red]rl-launcher:[/] " + escape(str(reason)), soft_wrap=True)
    raise typer.Exit(code)


def show(text: object, *, end: str = "\n") -> None:
    """Print a result."""
    typer.echo(f"{text}{end}", nl=False)


def warn(text: str) -> None:
    """Say it beside the result, where pipes do not take it for one."""
    _errors().print(escape(text), soft_wrap=True)


def print_json(figures: Mapping[str, Any]) -> None:
    """Print every figure as one line of JSON; a number that is none becomes null."""
    show(json.dumps(_finite(figures)))


def _errors() -> Console:
    return Console(stderr=True, highlight=False, emoji=False)  # `a:x:b` is a place, and no cross


def _in_words(error: OSError) -> str:
    """The file, why not, and what to do; as it is where an error names no file."""
    if error.errno is None or error.filename is None:
        return str(error)
    file = Path(os.fsdecode(error.filename)).absolute()
    if isinstance(error, FileNotFoundError) and not file.parent.is_dir():
        return f"{file}: there is no folder {file.parent}; make it, or give another path"
    return f"{file}: {(error.strerror or type(error).__name__).lower()}; give another path"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    is_number = not isinstance(value, float) or abs(value) < float("inf")
    return value if is_number else None
