"""Console output that all commands share, and the one place that turns an error into a message and an exit code."""

import json
import os
import traceback as tracebacks
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

FAILED, REFUSED, INTERRUPTED = 1, 2, 130
ResultT = TypeVar("ResultT")


def or_refuse(action: Callable[[], ResultT], *, traceback: bool = False) -> ResultT:
    """Return the result of `action`, or report what it raised and end the process."""
    try:
        return action()
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - report_and_exit raises what it does not know
        report_and_exit(error, traceback=traceback)


def report_and_exit(error: BaseException, *, traceback: bool = False) -> NoReturn:
    """Print an error and end the process with its exit code.

    A refusal is the user's to correct: its message fits on a screen, and the exit code is 2. A run that ended early has
    an exit code of its own. Of an error in the user's own code the last frames are shown, and of any other error, which
    is a bug of RL Stack, the whole traceback; both exit with 1.

    Args:
        error: What a command raised.
        traceback: Print the whole traceback first (`--traceback`).
    """
    from rl_launcher import errors

    if isinstance(error, typer.Exit):
        raise error
    if traceback:
        warn("".join(tracebacks.format_exception(error)).rstrip())
    if isinstance(error, errors.RunStoppedError):
        refuse(error, error.exit_code)
    if isinstance(error, KeyboardInterrupt):
        refuse("interrupted before training began; nothing was written", INTERRUPTED)
    frames = errors.user_frames(error)
    if isinstance(error, OSError) and not frames:
        refuse(_describe(error))
    if errors.is_refusal(error):
        refuse(f"{error}\n{frames}".rstrip())
    if frames:
        refuse(f"{type(error).__name__}: {error}\n{frames}", FAILED)
    raise error


def refuse(reason: object, code: int = REFUSED) -> NoReturn:
    """Print why, and end the process with `code`."""
    _errors().print("[bold red]rl-launcher:[/] " + escape(str(reason)), soft_wrap=True)
    raise typer.Exit(code)


def show(text: object, *, end: str = "\n") -> None:
    """Print a result to stdout."""
    typer.echo(f"{text}{end}", nl=False)


def write(text: str, out: Path | None) -> None:
    """Print `text`, or write it to the file `out`."""
    if out is None:
        show(text, end="")
    else:
        or_refuse(lambda: out.write_text(text, encoding="utf-8"))
        warn(f"written: {out}")


def warn(text: str) -> None:
    """Print a remark to stderr, so that it is not taken for part of the result."""
    _errors().print(escape(text), soft_wrap=True)


def print_json(figures: Mapping[str, Any]) -> None:
    """Print every figure as one line of JSON; infinities and NaN become null."""
    show(json.dumps(_finite(figures)))


def _errors() -> Console:
    return Console(stderr=True, highlight=False, emoji=False)  # without emoji, or `a:x:b` would become one


def _describe(error: OSError) -> str:
    """Name the file, the reason and the remedy; an error without a file is shown as it is."""
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
    is_finite = not isinstance(value, float) or abs(value) < float("inf")
    return value if is_finite else None
