"""The process of a rank or an engine: holds one object, calls its methods, and returns exceptions as values.

It is imported before the environment variables of the process are set, so it must not import anything that reads them.
"""

import contextlib
import faulthandler
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rl_launcher.ray.worker_failures import Failure


class ActorHost:
    """What becomes a Ray actor; the object inside does the work.

    Args:
        env: environment variables, set before anything heavy is imported. They are an argument, and not part of Ray's
            runtime environment, because Ray writes that to its logs.
        log: the file that gets what the process prints; None leaves that to Ray.
    """

    def __init__(self, env: Mapping[str, str], log: str | None) -> None:
        os.environ.update(env)
        if log is not None:
            _redirect_output(Path(log))
        # kill -USR1 writes the stacks of all threads: to find out where a run hangs.
        faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
        self._object: Any = None

    def about(self) -> dict[str, Any]:
        """The process id and the host name."""
        return {"pid": os.getpid(), "host": socket.gethostname()}

    def make(self, make: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Make the object; return None, or the `Failure`."""
        try:
            self._object = make(*arguments, **options)
        except Exception as error:  # noqa: BLE001 - reported to the driver, whatever it is
            return Failure.of(error)
        gc.collect()
        gc.freeze()  # a full collection would visit every object of torch, transformers and the model
        return None

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """What a method of the object returns, or the `Failure`."""
        try:
            return getattr(self._object, method)(*arguments, **options)
        except Exception as error:  # noqa: BLE001 - reported to the driver, whatever it is
            return Failure.of(error)

    def free_port(self, ip: str) -> int:
        """A port of `ip` that was free a moment ago."""
        with socket.create_server((ip, 0)) as server:
            port: int = server.getsockname()[1]
            return port


def accelerators() -> list[str]:
    """The GPUs that Ray has reserved for the task that calls this."""
    import ray

    return [str(number) for number in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]


def write_stacks(pid: int) -> None:
    """Have an `ActorHost` of this node write its stacks; a process that is not Ray's is left alone."""
    with contextlib.suppress(OSError):  # it has ended since
        if b"ray::" in Path(f"/proc/{pid}/cmdline").read_bytes():  # else the pid belongs to another process by now
            os.kill(pid, signal.SIGUSR1)


def end_process(pid: int) -> None:
    """Kill an `ActorHost` of this node, also one that is stopped and would not end by itself."""
    with contextlib.suppress(OSError):  # it has ended since
        if b"ray::" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)


def _redirect_output(log: Path) -> None:
    """Append standard output and error, also of C libraries, to a file; if it cannot be opened, Ray's files get it."""
    with contextlib.suppress(OSError):  # a node that does not see the run directory
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab", buffering=0) as file:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
