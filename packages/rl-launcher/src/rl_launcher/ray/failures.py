"""Failures of worker processes: which rank or engine, on which node, why, and its last log lines.

Three things: it raised, it died, it did not answer in time. Of several that fail together the first is meant, and not
those that only noticed. Knows no Ray.

Who hangs runs no code of ours. A signal reaches it all the same, and has its interpreter write the stacks of all
threads into its log (`Host`), which is read here.
"""

import pickle
import re
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_launcher.errors import RestartableError

__all__ = [
    "Failure",
    "RemoteDiedError",
    "RemoteError",
    "RemoteFailedError",
    "RemoteTimeoutError",
    "Standing",
    "TrainerDiedError",
    "Who",
    "describe",
    "died",
    "first_cause",
    "innermost",
    "where_they_stand",
]

FRAMES = 3
"""Of a traceback that a message shows: where it was raised, and who called that."""

# A rank that raised is told to the others by rl_backends and rl_refit; one that died breaks their connections.
_NOTICED_TYPES = frozenset({"RankError", "PeerError", "AbortedError", "DistBackendError", "DistNetworkError"})
_NOTICED_WORDS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "gloo",
    "nccl",
    "timed out waiting",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Who:
    """A process of the run."""

    role: str
    """`trainer` or `engine`."""

    index: int
    """Rank of the trainer, or number of the engine."""

    node: str
    """The machine's name and address."""

    pid: int | None
    """On that machine; None where it never came up."""

    log: str = ""
    """The file that holds what it printed."""

    def __str__(self) -> str:
        """As a sentence names it."""
        name = f"trainer rank {self.index}" if self.role == "trainer" else f"{self.role} {self.index}"
        return f"{name} ({self.node}{'' if self.pid is None else f', pid {self.pid}'})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An exception as it leaves the process that it was raised in: words, and the exception itself if it can travel."""

    type_name: str
    """Its class."""

    message: str
    """Its text."""

    traceback: str
    """As Python prints it there."""

    where: str
    """Its last lines, which a message has room for."""

    at: float
    """Seconds since the epoch, by that machine's clock."""

    noticed: bool
    """Whether it only tells of another process that failed."""

    pickled: bytes | None
    """The exception; None where it cannot be pickled. Ray carries it, as all else between the run's processes."""

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """Of an exception that is being handled."""
        name, message = type(error).__name__, str(error)
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)  # noqa: S301 - our own bytes: some exceptions pickle, and cannot be made again
        except Exception:  # noqa: BLE001 - of many kinds: whatever an exception's own code raises; then words must do
            pickled = None
        return cls(
            type_name=name,
            message=message,
            traceback="".join(traceback.format_exception(error)).rstrip(),
            where="".join(traceback.format_exception(error, limit=-FRAMES, chain=False)).rstrip(),
            at=time.time(),
            noticed=_only_noticed(name, message),
            pickled=pickled,
        )


class RemoteError(RuntimeError):
    """A process of the run failed.

    Attributes:
        who: which one.
        log_tail: the last lines that it printed.
        everyone_answered: whether all whom the call went to have answered it, so that they can be called again.
    """

    def __init__(self, message: str, *, who: Who, log_tail: str = "", at: float | None = None) -> None:
        text = message + (f"\nThe last lines of {who.log}:\n{_indented(log_tail)}" if log_tail else "")
        RuntimeError.__init__(self, text)  # not super(): what was raised there may want other arguments
        self.who, self.log_tail, self.message = who, log_tail, message
        self.at = time.time() if at is None else at
        self.noticed = False
        self.everyone_answered = False

    def __str__(self) -> str:
        """The whole message, also where the class that was raised prints itself in another way."""
        return str(self.args[0])

    @property
    def role(self) -> str:
        """`trainer` or `engine`."""
        return self.who.role

    @property
    def index(self) -> int:
        """Rank of the trainer, or number of the engine."""
        return self.who.index

    @property
    def node(self) -> str:
        """The machine."""
        return self.who.node

    @property
    def pid(self) -> int | None:
        """On that machine."""
        return self.who.pid

    def __reduce__(self) -> tuple[Any, ...]:
        """With all attributes, into another process."""
        return _again, (_own_class(type(self)), self.args, self.__dict__)


class RemoteFailedError(RemoteError):
    """It raised; also an instance of the class that was raised there, so that handlers of that class see it.

    Attributes:
        type_name: the class of what was raised.
        remote_traceback: as Python prints it there, whole.
    """

    def __init__(self, failure: Failure, *, who: Who, call: str) -> None:
        message = (
            f"{who} failed in {call}: {failure.type_name}: {failure.message}\nIts traceback ends:\n"
            f"{_indented(failure.where)}"
        )
        super().__init__(message, who=who, at=failure.at)
        self.type_name, self.remote_traceback, self.call = failure.type_name, failure.traceback, call
        self.noticed = failure.noticed

    @classmethod
    def of(cls, failure: Failure, *, who: Who, call: str) -> "RemoteFailedError":
        """Make it of the right class, with the original exception as its cause."""
        cause = None
        if failure.pickled is not None:
            try:
                cause = pickle.loads(failure.pickled)  # noqa: S301 - Ray carried it, from a process of this run
            except Exception:  # noqa: BLE001 - of a class that this process cannot import; the words are enough
                cause = None
        kind = cls if cause is None else _class_with(type(cause))
        error = kind(failure, who=who, call=call)
        error.__cause__ = cause
        return error


class RemoteDiedError(RemoteError):
    """Its process is gone.

    Attributes:
        how: what is known of its end.
    """

    def __init__(self, how: str, *, who: Who, call: str, log_tail: str = "") -> None:
        super().__init__(f"{who} died during {call}: {how}", who=who, log_tail=log_tail)
        self.how, self.call = how, call


class TrainerDiedError(RemoteDiedError, RestartableError):
    """A rank of the trainer is gone, and with it the step that was under way.

    Attributes:
        rank: which one.
    """

    @property
    def rank(self) -> int:
        """Which one."""
        return self.who.index


class RemoteTimeoutError(RemoteError):
    """It has not answered in time.

    Attributes:
        timeout_s: how long it had.
    """

    def __init__(
        self, *, who: Who, call: str, timeout_s: float, key: str, log_tail: str = "", stacks: str = ""
    ) -> None:
        look = f"see where it stood.\n{stacks}" if stacks else f"look: py-spy dump --pid {who.pid}"
        super().__init__(
            f"{who} has not answered {call} within {key}={timeout_s:g} seconds; if it was still at work, raise that, "
            f"or else {look}",
            who=who,
            log_tail=log_tail,
        )
        self.call, self.timeout_s = call, timeout_s


def died(how: str, *, who: Who, call: str, log_tail: str = "") -> RemoteDiedError:
    """The error of a process that is gone, by its role."""
    kind = TrainerDiedError if who.role == "trainer" else RemoteDiedError
    return kind(how, who=who, call=call, log_tail=log_tail)


def first_cause(errors: Sequence[RemoteError]) -> RemoteError:
    """Of several that failed together, who began: the earliest of those that did not only notice another's failure."""
    dead = [error for error in errors if isinstance(error, RemoteDiedError)]
    own = [error for error in errors if not error.noticed]
    return min(dead or own or list(errors), key=lambda error: error.at)


def _only_noticed(name: str, message: str) -> bool:
    words = message.lower()
    return name in _NOTICED_TYPES or any(each in words for each in _NOTICED_WORDS)


def _class_with(kind: type[BaseException]) -> type[RemoteFailedError]:
    """`RemoteFailedError` that is a `kind`, too, where Python lets a class be both."""
    if not issubclass(kind, Exception) or issubclass(kind, RemoteError):
        return RemoteFailedError
    try:
        return type("RemoteFailedError", (RemoteFailedError, kind), {"__doc__": RemoteFailedError.__doc__})
    except TypeError:
        return RemoteFailedError


def _own_class(kind: type[RemoteError]) -> type[RemoteError]:
    """The class of this module that a class made at run time stands on."""
    found: type[RemoteError] = next(each for each in kind.__mro__ if globals().get(each.__name__) is each)
    return found


def _again(kind: type[RemoteError], args: tuple[Any, ...], attributes: dict[str, Any]) -> RemoteError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(attributes)
    return error


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


MOST = 64
"""Processes that are asked, each by a task on its machine; `describe` counts the others."""

FRAMES_standing = 8
"""Calls of each stack that are shown, from the innermost."""

NO_STACK = "wrote no stack in time: it is stopped, or this machine does not see its log"

PAUSE_S = 0.1

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A process that has not answered."""

    who: Who
    stack: str
    """The innermost calls of its main thread; empty where it wrote none, or this machine does not see its log."""


def where_they_stand(late: Sequence[tuple[Who, Callable[[], None]]], *, timeout_s: float) -> list[Standing]:
    """Ask the first `MOST`, and read what each wrote into its log.

    Args:
        late: who has not answered, and what has its process write its stacks.
        timeout_s: for all of them together.
    """
    asked = late[:MOST]
    before = [_size(who) for who, _ in asked]
    for _, ask in asked:
        ask()
    until = time.monotonic() + timeout_s
    written = [""] * len(asked)
    while time.monotonic() < until:
        time.sleep(PAUSE_S)
        now = [_since(who, size) for (who, _), size in zip(asked, before, strict=True)]
        if now == written and all(map(innermost, now)):
            break  # all have written, and none goes on
        written = now
    return [Standing(who=who, stack=innermost(text)) for (who, _), text in zip(asked, written, strict=True)]


def innermost(text: str) -> str:
    """The innermost calls of the main thread, which `faulthandler` writes last of all threads."""
    threads = [*_THREAD.finditer(text)]
    if not threads:
        return ""
    lines = text[threads[-1].end() :].splitlines()
    return "\n".join([line.strip() for line in lines if line.startswith("  File ")][:FRAMES_standing])


def describe(standing: Sequence[Standing], *, num_late: int) -> str:
    """Who stands where, those at one place together, and how many of `num_late` nobody asked; empty without stacks."""
    places: dict[str, list[Who]] = {}
    for each in standing:
        places.setdefault(each.stack, []).append(each.who)
    if not any(places):
        return ""
    lines = ["Where they stood, innermost call first:"]
    for stack, there in places.items():
        lines.append(f"  {', '.join(map(str, there))}:")
        lines += [f"    {line}" for line in (stack or NO_STACK).splitlines()]
    if num_late > len(standing):
        lines.append(f"  {num_late - len(standing)} more have not answered, and were not asked")
    return "\n".join(lines)


def _size(who: Who) -> int:
    try:
        return Path(who.log).stat().st_size
    except OSError:
        return 0


def _since(who: Who, size: int) -> str:
    try:
        with Path(who.log).open("rb") as file:
            file.seek(size)
            return file.read().decode(errors="replace")
    except OSError:
        return ""
