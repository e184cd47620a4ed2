"""What happens when a worker process fails: which rank or engine it was, on which node, why, and its last log lines.

There are three ways to fail: it raised (`RemoteFailedError`), it died (`RemoteDiedError`), or it did not answer in time
(`RemoteTimeoutError`). When several fail together, `first_cause` picks the one that began, not those that only noticed.
The death of a trainer rank (`TrainerDiedError`) can be repaired by a restart from the last checkpoint, which
`rl_launcher.run` does; a dead engine is replaced by `engine_pool`.
"""

import contextlib
import pickle
import re
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl_launcher.errors import RestartableError

FRAMES = 3
"""Innermost frames of a traceback that a message shows."""

CPP_FRAME = re.compile(r"\bframe #\d+: ")
"""A line of a C++ stack as torch prints it."""

# When one rank raises, rl_backends and rl_refit raise these on the others; when one dies, their connections break.
_NOTICED_TYPES = frozenset({"RankError", "PeerError", "AbortedError", "DistBackendError", "DistNetworkError"})
_NOTICED_PHRASES = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "gloo",
    "nccl",
    "timed out waiting",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessInfo:
    """A process of the run."""

    role: str
    """`trainer` or `engine`."""
    index: int
    """Rank of the trainer, or number of the engine."""
    node: str
    """Name and address of its node."""
    pid: int | None
    """On that node; None if it never started."""
    log: str = ""
    """The file that has what it printed."""

    def __str__(self) -> str:
        """As messages name it."""
        name = f"trainer rank {self.index}" if self.role == "trainer" else f"{self.role} {self.index}"
        return f"{name} ({self.node}{'' if self.pid is None else f', pid {self.pid}'})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An exception as it leaves its process: as text, and the exception itself if it can be pickled."""

    type_name: str
    message: str
    traceback: str
    where: str
    """The innermost frames of the traceback, for messages."""
    at: float
    """Seconds since the epoch, by the clock of that node."""
    noticed: bool
    """Whether it only reports another process that failed."""
    pickled: bytes | None
    """The exception; None if it cannot be pickled. Ray carries it, as everything between the processes of a run."""

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """Of an exception that is being handled."""
        name, message = type(error).__name__, str(error)
        pickled = None
        with contextlib.suppress(Exception):  # whatever the exception's own code raises; then its text must do
            data = pickle.dumps(error)
            pickle.loads(data)  # noqa: S301 - our own bytes: some exceptions can be pickled and not unpickled
            pickled = data
        return cls(
            type_name=name,
            message=message,
            traceback="".join(traceback.format_exception(error)).rstrip(),
            # Without its last part, which is the message again.
            where="".join(traceback.format_tb(error.__traceback__, limit=-FRAMES)).rstrip(),
            at=time.time(),
            noticed=name in _NOTICED_TYPES or any(phrase in message.lower() for phrase in _NOTICED_PHRASES),
            pickled=pickled,
        )


class RemoteError(RuntimeError):
    """A process of the run failed.

    Attributes:
        who: which one.
        log_tail: the last lines of its log.
        all_returned: whether all processes that were called have returned, so that they can be called again.
    """

    def __init__(self, message: str, *, who: ProcessInfo, log_tail: str = "", at: float | None = None) -> None:
        text = message + (f"\nThe last lines of {who.log}:\n{_indented(log_tail)}" if log_tail else "")
        RuntimeError.__init__(self, text)  # not super(): a class that was raised remotely may want other arguments
        self.who, self.log_tail, self.message = who, log_tail, message
        self.at = time.time() if at is None else at
        self.noticed = False
        self.all_returned = False

    def __str__(self) -> str:
        """The whole message, even if the class that was raised remotely prints itself differently."""
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        """With all attributes, as the class of this module that a class made by `RemoteFailedError.of` derives from."""
        own = next(each for each in type(self).__mro__ if globals().get(each.__name__) is each)
        return _unpickled, (own, self.args, self.__dict__)


class RemoteFailedError(RemoteError):
    """It raised; also an instance of the class that was raised there, so that `except` clauses for that class match."""

    def __init__(self, failure: Failure, *, who: ProcessInfo, call: str) -> None:
        failed = f"{who} failed in {call}: {failure.type_name}: {without_cpp_frames(failure.message)}"
        super().__init__(f"{failed}\nIts traceback ends:\n{_indented(failure.where)}", who=who, at=failure.at)
        self.type_name, self.remote_traceback, self.call = failure.type_name, failure.traceback, call
        self.noticed = failure.noticed

    @classmethod
    def of(cls, failure: Failure, *, who: ProcessInfo, call: str) -> "RemoteFailedError":
        """The error of a class that is also the class of what was raised, with the original exception as its cause."""
        cause = None
        if failure.pickled is not None:
            with contextlib.suppress(Exception):  # of a class that this process cannot import; the text is enough
                cause = pickle.loads(failure.pickled)  # noqa: S301 - Ray carried it, from a process of this run
        error = (cls if cause is None else _class_with(type(cause)))(failure, who=who, call=call)
        error.__cause__ = cause
        return error


class RemoteDiedError(RemoteError):
    """Its process is gone; `how` is what is known of its end."""

    def __init__(self, how: str, *, who: ProcessInfo, call: str, log_tail: str = "") -> None:
        super().__init__(f"{who} died during {call}: {how}", who=who, log_tail=log_tail)
        self.how, self.call = how, call


class TrainerDiedError(RemoteDiedError, RestartableError):
    """A rank of the trainer is gone, and with it the step that was running."""


class RemoteTimeoutError(RemoteError):
    """It did not answer within `timeout_s`."""

    def __init__(
        self, *, who: ProcessInfo, call: str, timeout_s: float, key: str, log_tail: str = "", stacks: str = ""
    ) -> None:
        look = f"see where it hangs.\n{stacks}" if stacks else f"look where it hangs: py-spy dump --pid {who.pid}"
        super().__init__(
            f"{who} has not answered {call} within {key}={timeout_s:g} seconds; raise that if it was still working, "
            f"otherwise {look}",
            who=who,
            log_tail=log_tail,
        )
        self.call, self.timeout_s = call, timeout_s


class TrainerHungError(RemoteTimeoutError, RestartableError):
    """A rank of the trainer hangs, and all others wait for it."""

    condition = "trainer_hung"


def hung(*, who: ProcessInfo, call: str, timeout_s: float, key: str, stacks: str) -> RemoteTimeoutError:
    """The error of a process that hangs, by its role."""
    kind = TrainerHungError if who.role == "trainer" else RemoteTimeoutError
    return kind(who=who, call=call, timeout_s=timeout_s, key=key, stacks=stacks)


def without_cpp_frames(text: str) -> str:
    """A text without the C++ frames that torch writes into its errors, and the line that introduces them."""
    lines = text.splitlines()
    return "\n".join(
        line.partition(" (most recent call first)")[0]
        for line in lines
        if not CPP_FRAME.search(line) and not line.startswith("Exception raised from")
    )


def died(how: str, *, who: ProcessInfo, call: str, log_tail: str = "") -> RemoteDiedError:
    """The error of a process that is gone, by its role."""
    kind = TrainerDiedError if who.role == "trainer" else RemoteDiedError
    return kind(how, who=who, call=call, log_tail=log_tail)


def first_cause(errors: Sequence[RemoteError]) -> RemoteError:
    """Of several errors together, the earliest of those that did not only notice another process's failure."""
    dead = [error for error in errors if isinstance(error, RemoteDiedError)]
    own = [error for error in errors if not error.noticed]
    return min(dead or own or list(errors), key=lambda error: error.at)


def _class_with(kind: type[BaseException]) -> type[RemoteFailedError]:
    """`RemoteFailedError` that is also a `kind`, if Python allows a class to be both."""
    if not issubclass(kind, Exception) or issubclass(kind, RemoteError):
        return RemoteFailedError
    try:
        return type("RemoteFailedError", (RemoteFailedError, kind), {"__doc__": RemoteFailedError.__doc__})
    except TypeError:
        return RemoteFailedError


def _unpickled(kind: type[RemoteError], args: tuple[Any, ...], attributes: dict[str, Any]) -> RemoteError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(attributes)
    return error


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
