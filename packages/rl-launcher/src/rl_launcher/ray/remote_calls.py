"""Calls of the processes of a run: made, awaited with a deadline, and told apart when they fail. Knows no method.

Ray is imported where a call is awaited.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rl_launcher.ray.actors import write_stacks
from rl_launcher.ray.failures import (
    Failure,
    RemoteDiedError,
    RemoteError,
    RemoteFailedError,
    RemoteTimeoutError,
    Who,
    describe,
    died,
    first_cause,
    where_they_stand,
)

__all__ = ["Actor", "Pending", "gather", "wait_any"]

GRACE_S = 10.0
"""Seconds in which the others may answer once one has failed, by which its peers notice and stay usable."""

LOG_LINES = 20
"""That an error shows of what its process printed."""

STACKS_S = 30.0
"""Seconds in which those that have not answered may write where they are."""

CALL_KEY = "cluster.call_timeout_s"


class Pending:
    """A call that is under way."""

    def __init__(self, actor: "Actor", call: str, reference: Any, *, key: str = CALL_KEY) -> None:
        self.actor, self.call, self.reference, self.key = actor, call, reference, key

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return bool(wait_any([self], timeout_s=0)[0])

    def result(self, *, timeout_s: float) -> Any:
        """What it returned.

        Raises:
            RemoteFailedError: it raised; also an instance of the class that it raised.
            RemoteDiedError: its process is gone.
            RemoteTimeoutError: it has not ended in time.
        """
        import ray
        from ray.exceptions import GetTimeoutError, RayError, RayTaskError

        try:
            value = ray.get(self.reference, timeout=timeout_s)
        except GetTimeoutError:
            raise self.late(timeout_s) from None
        except RayTaskError as error:  # outside of our own methods: an argument that cannot be read there
            failure = Failure.of(error.cause if isinstance(error.cause, Exception) else error)
            raise RemoteFailedError.of(failure, who=self.actor.who, call=self.call) from None
        except RayError as error:
            self.actor.alive = False
            raise self._died(str(error)) from None
        if isinstance(value, Failure):
            raise RemoteFailedError.of(value, who=self.actor.who, call=self.call)
        return value

    def late(self, timeout_s: float, *, stacks: str = "") -> RemoteTimeoutError:
        """The error of one that has not ended in time."""
        tail = "" if stacks else self.actor.log_tail()
        return RemoteTimeoutError(
            who=self.actor.who, call=self.call, timeout_s=timeout_s, key=self.key, log_tail=tail, stacks=stacks
        )

    def _died(self, words: str) -> RemoteDiedError:
        # Ray's text is a page; what it knows of the end stands before its list of what might have been.
        known = " ".join(words.partition("Some common causes")[0].split())
        said = known.rpartition("Worker exit type:")[2] or known
        how = (
            "its process ended without a word: it was killed (kill -9, or by the kernel for want of memory), or it "
            f"crashed. Ray says: {said.strip()[-400:]}"
        )
        return died(how, who=self.actor.who, call=self.call, log_tail=self.actor.log_tail())


class Actor:
    """A process of the run, as the driver holds it; `RayRuntime.start_actor` makes it."""

    def __init__(self, handle: Any, *, who: Who, name: str, ip: str, place: Any) -> None:
        """`place` is what has Ray put a task on the same machine."""
        self.handle, self.who, self.name, self.ip, self._place = handle, who, name, ip, place
        self.alive = True
        """False once it was seen dead, or was ended."""

    @property
    def role(self) -> str:
        """`trainer` or `engine`."""
        return self.who.role

    @property
    def index(self) -> int:
        """Rank of the trainer, or number of the engine."""
        return self.who.index

    @property
    def pid(self) -> int | None:
        """On its machine."""
        return self.who.pid

    def make(self, kind: Callable[..., Any], *arguments: Any, timeout_s: float, **options: Any) -> None:
        """Make the object that it is for; it is imported there.

        Raises:
            RemoteError: as `Pending.result`.
        """
        self.submit_make(kind, *arguments, **options).result(timeout_s=timeout_s)

    def submit_make(self, kind: Callable[..., Any], *arguments: Any, **options: Any) -> Pending:
        """The same, to be awaited with others'."""
        reference = self.handle.make.remote(kind, *arguments, **options)
        return Pending(self, "its start", reference, key="cluster.start_timeout_s")

    def submit(self, method: str, *arguments: Any, **options: Any) -> Pending:
        """Begin a method of its object; arguments may be references to what `ray.put` was given."""
        return Pending(self, method, self.handle.call.remote(method, *arguments, **options))

    def call(self, method: str, *arguments: Any, timeout_s: float, **options: Any) -> Any:
        """Call a method of its object, and wait.

        Raises:
            RemoteError: as `Pending.result`.
        """
        return self.submit(method, *arguments, **options).result(timeout_s=timeout_s)

    def free_port(self, *, timeout_s: float = 60.0) -> int:
        """A port of its machine that nobody listened on a moment ago."""
        port: int = Pending(self, "free_port", self.handle.free_port.remote(self.ip)).result(timeout_s=timeout_s)
        return port

    def write_stacks(self) -> None:
        """Have its process write where its threads are into its log, soon: by a task beside it, for it answers none."""
        import ray

        if self.pid is not None:
            options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": self._place}
            ray.remote(write_stacks).options(**options).remote(self.pid)

    def close(self, *, grace_s: float = 10.0) -> None:
        """Let its object end what it holds (`close`), for `grace_s` seconds at most, and end the process."""
        if self.alive and grace_s > 0:
            with contextlib.suppress(RemoteError):  # it is ended in any case
                self.call("close", timeout_s=grace_s)
        self.kill()

    def kill(self) -> None:
        """End the process at once."""
        import ray

        self.alive = False
        with contextlib.suppress(Exception):  # Ray may be gone, and with it the process
            ray.kill(self.handle, no_restart=True)

    def log_tail(self) -> str:
        """The last lines that it printed; empty where there are none, or this machine does not see them."""
        try:
            with Path(self.who.log).open("rb") as file:
                file.seek(max(0, file.seek(0, 2) - 16_384))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-LOG_LINES:])


def wait_any(pendings: Sequence[Pending], *, timeout_s: float) -> tuple[list[Pending], list[Pending]]:
    """Those that have ended, at least one unless the time is over; and the rest."""
    import ray

    if not pendings:
        return [], []
    by_reference = {pending.reference: pending for pending in pendings}
    ready, _ = ray.wait(list(by_reference), num_returns=1, timeout=max(0.0, timeout_s))
    if ready:  # whoever else has ended by now, in one look
        ready, _ = ray.wait(list(by_reference), num_returns=len(by_reference), timeout=0)
    ended = {id(by_reference[reference]) for reference in ready}
    return [each for each in pendings if id(each) in ended], [each for each in pendings if id(each) not in ended]


def gather(
    pendings: Sequence[Pending], *, timeout_s: float, grace_s: float = GRACE_S, stacks_s: float = STACKS_S
) -> list[Any]:
    """What they return, in order.

    Args:
        pendings: calls that belong together.
        timeout_s: for all of them.
        grace_s: for the others, once one has failed.
        stacks_s: to find out where those stand that have not answered; 0 does not ask.

    Raises:
        RemoteError: the first that failed, and not those which failed because of it. `everyone_answered` tells whether
            the others have ended, too.
    """
    values: dict[int, Any] = {}
    errors: list[RemoteError] = []
    waiting, until = list(pendings), time.monotonic() + timeout_s
    while waiting:
        ended, waiting = wait_any(waiting, timeout_s=until - time.monotonic())
        for pending in ended:
            try:
                values[id(pending)] = pending.result(timeout_s=60.0)
            except RemoteError as error:
                errors.append(error)
                until = min(until, time.monotonic() + grace_s)
        if not ended or any(isinstance(error, RemoteDiedError) for error in errors):
            break  # the time is over; or one is dead, and the others wait for it
    if errors:
        cause = first_cause(errors)
        cause.everyone_answered = not waiting and all(isinstance(error, RemoteFailedError) for error in errors)
        raise cause
    if waiting:
        raise waiting[0].late(timeout_s, stacks=_stacks(waiting, timeout_s=stacks_s))
    return [values[id(pending)] for pending in pendings]


def _stacks(waiting: Sequence[Pending], *, timeout_s: float) -> str:
    late = [(pending.actor.who, pending.actor.write_stacks) for pending in waiting]
    return describe(where_they_stand(late, timeout_s=timeout_s), num_late=len(late)) if timeout_s else ""
