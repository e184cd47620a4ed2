"""Calls of a run's processes: made, awaited with a deadline, and named when they fail."""

import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rl_launcher.ray.actor_host import end_process, write_stacks
from rl_launcher.ray.stack_dump import collect_stacks, describe_stacks, find_awaited
from rl_launcher.ray.worker_failures import (
    Failure,
    ProcessInfo,
    RemoteDiedError,
    RemoteError,
    RemoteFailedError,
    RemoteTimeoutError,
    died,
    first_cause,
    hung,
    without_cpp_frames,
)

GRACE_S = 10.0
"""Seconds that the others get to return once one has failed, so that they notice it and stay usable."""

STACKS_S = 30.0
"""Seconds that processes get to write their stacks when they have not answered."""

LOG_LINES = 20
"""Lines of its process's log that an error shows."""


class Pending:
    """A call that is running."""

    def __init__(self, actor: "Actor", call: str, reference: Any, *, key: str = "cluster.call_timeout_s") -> None:
        self.actor, self.call, self.reference, self.key = actor, call, reference, key

    def done(self, *, within_s: float = 0.0) -> bool:
        """Whether it has ended, successfully or not; waits for that so long."""
        return bool(wait_any([self], timeout_s=within_s)[0])

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
            raise self.timed_out(timeout_s) from None
        except RayTaskError as error:  # outside of our own methods: an argument that cannot be unpickled there
            failure = Failure.of(error.cause if isinstance(error.cause, Exception) else error)
            raise RemoteFailedError.of(failure, who=self.actor.who, call=self.call) from None
        except RayError as error:
            self.actor.alive = False
            # Ray's text is a page; what it knows of the end comes before its list of common causes.
            known = " ".join(str(error).partition("Some common causes")[0].split())
            reason = (known.rpartition("Worker exit type:")[2] or known).strip()[-400:]
            how = (
                "its process ended without a message: it was killed (kill -9, or by the kernel when memory ran out), "
                f"or it crashed. Ray says: {reason}"
            )
            if service := self.actor.dead_service():
                how = f"{service} died, and all processes of the run on that node with it"
            raise died(how, who=self.actor.who, call=self.call, log_tail=self.actor.log_tail()) from None
        if isinstance(value, Failure):
            raise RemoteFailedError.of(value, who=self.actor.who, call=self.call)
        return value

    def timed_out(self, timeout_s: float, *, stacks: str = "") -> RemoteTimeoutError:
        """The error of a call that has not ended in time."""
        tail = "" if stacks else self.actor.log_tail()
        return RemoteTimeoutError(
            who=self.actor.who, call=self.call, timeout_s=timeout_s, key=self.key, log_tail=tail, stacks=stacks
        )


class Actor:
    """A process of the run, as the driver holds it; `RayRuntime.start_actors` makes it.

    `handle` is Ray's, of an `ActorHost`; `ip` the address of its node that the other nodes reach; `strategy` the
    scheduling strategy that puts a task on the same node.
    """

    def __init__(
        self,
        handle: Any,
        *,
        who: ProcessInfo,
        name: str,
        ip: str,
        strategy: Any,
        dead_service: Callable[[], str] = str,
    ) -> None:
        self.handle, self.who, self.name, self.ip, self._strategy = handle, who, name, ip, strategy
        self.dead_service = dead_service
        """Which of Ray's own processes has died, and with it this one; empty if none has."""
        self.alive = True
        """False once it was seen dead, or was killed."""

    def make(self, kind: Callable[..., Any], *arguments: Any, timeout_s: float, **options: Any) -> None:
        """Make the object whose methods are called later; its class is imported there."""
        self.submit_make(kind, *arguments, **options).result(timeout_s=timeout_s)

    def submit_make(self, kind: Callable[..., Any], *arguments: Any, **options: Any) -> Pending:
        """Begin to make the object."""
        reference = self.handle.make.remote(kind, *arguments, **options)
        return Pending(self, "its start", reference, key="cluster.start_timeout_s")

    def submit(self, method: str, *arguments: Any, **options: Any) -> Pending:
        """Begin a method of the object; arguments may be references that `ray.put` returned."""
        return Pending(self, method, self.handle.call.remote(method, *arguments, **options))

    def call(self, method: str, *arguments: Any, timeout_s: float, **options: Any) -> Any:
        """Call a method of the object, and return or raise as `Pending.result`."""
        return self.submit(method, *arguments, **options).result(timeout_s=timeout_s)

    def free_port(self, *, timeout_s: float = 60.0) -> int:
        """A port of its node that was free a moment ago."""
        port: int = Pending(self, "free_port", self.handle.free_port.remote(self.ip)).result(timeout_s=timeout_s)
        return port

    def write_stacks(self) -> None:
        """Have its process write its threads' stacks into its log: by a task beside it, since it answers no call."""
        import ray

        if self.who.pid is not None:
            options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": self._strategy}
            ray.remote(write_stacks).options(**options).remote(self.who.pid)

    def close(self, *, grace_s: float = 10.0) -> None:
        """Give the object up to `grace_s` seconds to `close` what it holds, and kill the process."""
        if self.alive and grace_s > 0:
            with contextlib.suppress(RemoteError):  # it is killed in any case
                self.call("close", timeout_s=grace_s)
        self.kill()

    def kill(self) -> None:
        """Kill the process at once, also if it is stopped (SIGSTOP), in which state it does not obey Ray."""
        import ray

        self.alive = False
        with contextlib.suppress(Exception):  # Ray may be gone, and the process with it
            ray.kill(self.handle, no_restart=True)
        if self.who.pid is not None and self.who.node.startswith(socket.gethostname()):
            end_process(self.who.pid)

    def kill_on_its_node(self) -> None:
        """Kill the process by a task beside it: for one that hangs, on whatever node."""
        import ray

        self.kill()
        if self.who.pid is not None:
            options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": self._strategy}
            with contextlib.suppress(Exception):  # Ray may be gone, and the process with it
                ray.remote(end_process).options(**options).remote(self.who.pid)

    def log_tail(self) -> str:
        """The last lines that it printed; empty if there are none, or its log cannot be read from this node."""
        try:
            with Path(self.who.log).open("rb") as file:
                file.seek(max(0, file.seek(0, 2) - 65_536))
                return last_lines(file.read().decode(errors="replace"))
        except OSError:
            return ""


def last_lines(log: str) -> str:
    """The last lines of a log, without the C++ frames that torch prints after its own errors."""
    return "\n".join(without_cpp_frames(log).splitlines()[-LOG_LINES:])


def wait_any(pendings: Sequence[Pending], *, timeout_s: float) -> tuple[list[Pending], list[Pending]]:
    """Those that have ended, at least one unless the time is over; and the rest."""
    import ray

    if not pendings:
        return [], []
    references = [pending.reference for pending in pendings]
    ready, _ = ray.wait(references, num_returns=1, timeout=max(0.0, timeout_s))
    if ready:  # and all others that have ended by now
        ready, _ = ray.wait(references, num_returns=len(references), timeout=0)
    ended = [pending for pending in pendings if pending.reference in ready]
    return ended, [pending for pending in pendings if pending not in ended]


def gather(
    pendings: Sequence[Pending],
    *,
    timeout_s: float,
    grace_s: float = GRACE_S,
    stacks_s: float = STACKS_S,
    hang_s: float = float("inf"),
) -> list[Any]:
    """What calls that belong together return, in order.

    Args:
        pendings: the calls.
        timeout_s: for all of them.
        grace_s: for the others, once one has failed.
        stacks_s: to collect the stacks of those that have not answered; 0 does not collect them.
        hang_s: after so long without an answer the stacks are collected, and again after so long: a call that hangs
            fails then, and not only after `timeout_s`.

    Raises:
        RemoteError: the first that failed, and not those that failed because of it. Its `all_returned` says
            whether the others have ended, too.
    """
    values: dict[int, Any] = {}
    errors: list[RemoteError] = []
    waiting, until = list(pendings), time.monotonic() + timeout_s
    look_at = time.monotonic() + hang_s
    while waiting:
        ended, waiting = wait_any(waiting, timeout_s=min(until, look_at) - time.monotonic())
        if not ended and not errors and look_at <= time.monotonic() < until:
            if (hanging := _hanging(waiting, hang_s=hang_s, stacks_s=stacks_s)) is not None:
                raise hanging
            look_at = time.monotonic() + hang_s
            continue
        if ended:
            look_at = time.monotonic() + hang_s
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
        cause.all_returned = not waiting and all(isinstance(error, RemoteFailedError) for error in errors)
        raise cause
    if waiting:
        late = [(pending.actor.who, pending.actor.write_stacks) for pending in waiting]
        stacks = collect_stacks(late, timeout_s=stacks_s) if stacks_s else []
        awaited = find_awaited(stacks)
        named = waiting[awaited[0] if awaited else 0]
        raise named.timed_out(timeout_s, stacks=describe_stacks([who for who, _ in late], stacks))
    return [values[id(pending)] for pending in pendings]


def _hanging(waiting: Sequence[Pending], *, hang_s: float, stacks_s: float) -> RemoteError | None:
    """The error of the process that the others wait for; None while all of them may be computing."""
    late = [(pending.actor.who, pending.actor.write_stacks) for pending in waiting]
    stacks = collect_stacks(late, timeout_s=stacks_s)
    if not (awaited := find_awaited(stacks)):
        return None
    named = waiting[awaited[0]]
    told = describe_stacks([who for who, _ in late], stacks)
    return hung(who=named.actor.who, call=named.call, timeout_s=hang_s, key="cluster.hang_timeout_s", stacks=told)
