"""Errors of a run: which are the user's to mend, and where in the user's own code one was raised.

`Refusal` is the base of what this package refuses; `is_refusal` decides about every other error. What is no refusal is
a bug of ours or an error in the user's functions, and deserves its traceback.
"""

import linecache
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

FAILED, TO_BE_RESUMED, INTERRUPTED = 1, 75, 130
"""Exit codes of runs that ended early. 75 is EX_TEMPFAIL of sysexits.h: nothing is wrong, resume it."""


class Refusal(ValueError):  # noqa: N818 - the word that users read
    """A run that cannot be made as requested; the message says why and what to do."""


class RestartableError(RuntimeError):
    """A process of the run died; with new ones the run can continue from its last checkpoint."""

    condition: ClassVar[str] = "trainer_died"
    """The name in `rl_launcher.run.conditions.CONDITIONS` of what happened."""

    weights_lost: ClassVar[bool] = True
    """Whether the policy's weights died with it, so that only checkpoints are left."""


class ConditionError(Exception):
    """A named condition ends the run after the current step."""

    def __init__(self, condition: str, message: str) -> None:
        super().__init__(f"{condition}: {message}")
        self.condition = condition


class RunStoppedError(Exception):
    """A run that ended early; `interrupted` is True if a signal ended it. The cause is chained."""

    def __init__(self, message: str, *, interrupted: bool = False, to_be_resumed: bool = False) -> None:
        super().__init__(message)
        self.interrupted, self.to_be_resumed = interrupted, to_be_resumed
        self.result: Any = None
        """The `rl_launcher.RunResult` of what there is, where `rl_launcher.train` or `resume` was called."""

    @property
    def exit_code(self) -> int:
        """130 if a signal ended it, 75 if it ended as configured and is to be resumed, 1 if it failed."""
        return INTERRUPTED if self.interrupted else TO_BE_RESUMED if self.to_be_resumed else FAILED


OURS = ("algorithms", "backends", "generation", "launcher", "observe", "parallel_plans", "refit")
PACKAGES = {f"rl_{name}" for name in OURS}
# Of a virtual environment and of the interpreter that it was made from.
INSTALLED = tuple({str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "platstdlib", "purelib")})


def is_refusal(error: BaseException) -> bool:
    """Whether the message of `error` is all that the user needs, without a traceback.

    True for errors of a class that one of our packages defines (`DataError`, `PlanError`, `RefitError` ...), for a
    ValueError that our code raises in so many words, and for an OSError that names a file. Any other error is a bug: a
    TypeError, a KeyError, or a ValueError that Python itself raised, as for too many values to unpack.
    """
    if isinstance(error, OSError) and error.filename is not None:
        return True
    if any(_package(each.__module__) in PACKAGES for each in type(error).__mro__):
        return True
    frames = [*traceback.walk_tb(error.__traceback__)]
    if type(error) is not ValueError or not frames:
        return False
    frame, line = frames[-1]
    stated = linecache.getline(frame.f_code.co_filename, line).lstrip().startswith("raise ")
    return stated and _package(frame.f_globals.get("__name__", "")) in PACKAGES


def user_frames(error: BaseException) -> str:
    """The last frames of `error` in the user's own code, with file, line and source, and what was raised there.

    Frames of our packages and of installed ones are left out; the innermost error of the chain that has any frame left
    is shown. Empty if none of it was raised in the user's code.
    """
    found = _raised_by_user(error)
    if found is None:
        return ""
    raised, frames = found
    lines = [f"  {each.filename}:{each.lineno} in {each.name}\n    {each.line}" for each in frames[-3:]]
    return "\n".join([*lines, *(f"  {line}" for line in "".join(traceback.format_exception_only(raised)).splitlines())])


def user_location(error: BaseException) -> str | None:
    """`file.py:line` of the innermost frame in the user's own code, or None."""
    found = _raised_by_user(error)
    return None if found is None else f"{found[1][-1].filename}:{found[1][-1].lineno}"


def _raised_by_user(error: BaseException) -> tuple[BaseException, list[traceback.FrameSummary]] | None:
    found = None
    for each in _chain(error):
        if frames := [*_frames_of_user(each.__traceback__)]:
            found = each, frames
    return found


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _frames_of_user(trace: TracebackType | None) -> Iterator[traceback.FrameSummary]:
    called = False  # what called us, a notebook or a test, is above our first frame and did not raise
    for frame, line in traceback.walk_tb(trace):
        file, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__", ""))
        if _package(module) in PACKAGES:
            called = True
        elif called and not file.startswith("<frozen") and not str(Path(file).resolve()).startswith(INSTALLED):
            name = frame.f_code.co_name
            yield traceback.FrameSummary(file, line, name, line=linecache.getline(file, line).strip() or None)


def _package(module: str) -> str:
    return module.partition(".")[0]
