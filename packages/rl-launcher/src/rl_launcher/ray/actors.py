"""The process of a rank or an engine: holds one object, calls its methods, returns errors as values.

It knows neither what the object does nor Ray, whose actor it becomes. It is imported before the environment variables
of the process are set, so it imports nothing that would read them.
"""

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rl_launcher.gc_freeze import freeze
from rl_launcher.ray.failures import Failure, Who

__all__ = ["Host", "write_processes", "write_stacks"]


class Host:
    """What every actor is, with an object of a class of its own inside.

    Args:
        env: environment variables, set before anything heavy is imported. They travel as an argument, and not in Ray's
            runtime environment, which Ray writes to its logs.
        log: the file that takes what the process prints; None leaves that to Ray.
    """

    def __init__(self, env: Mapping[str, str], log: str | None) -> None:
        os.environ.update(env)
        if log is not None:
            _print_into(Path(log))
        # kill -USR1 prints where every thread is: for whoever looks at a run that stands still.
        faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
        self._held: Any = None

    def about(self) -> dict[str, Any]:
        """Who this process is."""
        return {"pid": os.getpid(), "host": socket.gethostname()}

    def make(self, make: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Make the object; None, or the `Failure`."""
        try:
            self._held = make(*arguments, **options)
        except Exception as error:  # noqa: BLE001 - told to the driver, whatever it is
            return Failure.of(error)
        freeze()
        return None

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """What a method of the object returns, or the `Failure`."""
        try:
            return getattr(self._held, method)(*arguments, **options)
        except Exception as error:  # noqa: BLE001 - told to the driver, whatever it is
            return Failure.of(error)

    def free_port(self, ip: str) -> int:
        """A port of `ip` that nobody listened on a moment ago."""
        with socket.create_server((ip, 0)) as server:
            port: int = server.getsockname()[1]
            return port

    def accelerators(self) -> list[str]:
        """The GPUs that Ray has set aside for this actor."""
        import ray

        return [str(number) for number in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]


def write_stacks(pid: int) -> None:
    """Have a `Host` of this machine write where its threads are; a process that is none of Ray's is left alone."""
    with contextlib.suppress(OSError):  # it has ended since
        if b"ray::" in Path(f"/proc/{pid}/cmdline").read_bytes():  # else the number is another's by now
            os.kill(pid, signal.SIGUSR1)


def _print_into(log: Path) -> None:
    """Standard output and error, of libraries in C too, to the end of a file; to Ray's own files where it cannot."""
    with contextlib.suppress(OSError):  # a node that does not see the run directory
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab", buffering=0) as file:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def write_processes(run_dir: Path, processes: Iterable[Who]) -> Path:
    """Write who is there now, this process as the driver, in the place of what was written before."""
    here = {"role": "driver", "index": 0, "node": socket.gethostname(), "pid": os.getpid()}
    entries: list[dict[str, Any]] = [here]
    entries += [{"role": who.role, "index": who.index, "node": who.node, "pid": who.pid} for who in processes]
    path = run_dir / "processes.json"
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(json.dumps(entries, indent=2), encoding="utf-8")
    unfinished.replace(path)
    return path
