"""The processes of a verification: a server that imports torch and transformers once, and forks.

    caller -- server -- session (builds the model, runs it unsharded) -- ranks (shard, run, compare)

The server is a command and no fork of the caller, so that scripts without a main guard, notebooks, threads and GPUs of
the caller do no harm. Every process exits when its parent does, so that nothing outlives a caller that is killed. A
rank that raises, aborts or hangs costs its task only: the first failure is kept, and the tasks that are left run on new
ranks.
"""

import atexit
import io
import logging
import multiprocessing
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FunctionType
from typing import Any, Self

from rl_parallel_plans.errors import PlanError, UnusableModelError
from rl_parallel_plans.verification.tasks import Request, Task

FORK = multiprocessing.get_context("fork")
ENVIRONMENT = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    "CUDA_VISIBLE_DEVICES": "",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
STARTUP_S = 120.0
OTHER_ERRORS_S = 0.2
"""How long after a failure the other ranks may report errors that came before it."""


class Processes:
    """A server that answers one request after the other; a context manager."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="rl_parallel_plans_", ignore_cleanup_errors=True)
        self._server: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def answer(self, request: Request) -> dict[str, Any]:
        """What the session returned: `{"source", "facts", ...}`, or `{"failed": text, ...}`."""
        data = packed(request)
        with self._lock:
            if self._server is None or self._connection is None or self._server.poll() is not None:
                self._start()
            assert self._connection is not None
            try:
                self._connection.send_bytes(data)
                deadline_s = STARTUP_S + request.deadline_s * (len(request.tasks) + 2)
                if self._connection.poll(deadline_s):
                    answer: dict[str, Any] = pickle.loads(self._connection.recv_bytes())  # noqa: S301 - our own server
                    return answer
                failure = f"no answer in {deadline_s:.0f} s"
            except (EOFError, ConnectionError):
                failure = "the server of the ranks died"
            except BaseException:  # an interrupted answer would be taken for that of the next request
                self._stop()
                raise
            self._stop()
            return {"failed": f"{failure}:\n{_tail(self._log, 4000)}"}

    def close(self) -> None:
        """End the server and everything below it."""
        self._stop()
        self._folder.cleanup()

    @property
    def _log(self) -> Path:
        return Path(self._folder.name) / "server.log"

    def _start(self) -> None:
        self._stop()
        self._connection, server_end = multiprocessing.Pipe()
        command = f"from {__name__} import serve; serve()"
        path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            with self._log.open("wb") as log:
                self._server = subprocess.Popen(  # noqa: S603 - this interpreter, our own module
                    [sys.executable, "-c", command, self._folder.name, str(server_end.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(server_end.fileno(),),
                    env={**os.environ, **ENVIRONMENT, **path},
                )
        except OSError as error:
            raise PlanError(f"cannot start {sys.executable} for the ranks: {error}") from error
        finally:
            server_end.close()

    def _stop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._server = None


@cache
def shared() -> Processes:
    """The server of this process, which ends with it."""
    processes = Processes()
    atexit.register(processes.close)
    return processes


# -- Sending functions and classes ---------------------------------------------------------------


def packed(value: object) -> bytes:
    """`value` with the files of modules that another process cannot import by name, such as those of tests.

    Raises PlanError for a value that cannot be sent.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    try:
        pickler.dump(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise PlanError(
            f"{error}: what verify runs in other processes must be importable there; give a function at the top of a "
            "module, or its path 'package.module:name'"
        ) from error
    return pickle.dumps({"path": sys.path, "files": pickler.files, "value": stream.getvalue()})


def unpacked(data: bytes) -> Any:
    """The value, with its modules loaded."""
    sent = pickle.loads(data)  # noqa: S301 - from the process that started this one
    sys.path[:] = list(dict.fromkeys([*sent["path"], *sys.path]))
    for name, file in sent["files"].items():
        spec = spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return pickle.loads(sent["value"])  # noqa: S301 - as above


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.files: dict[str, str] = {}

    def reducer_override(self, value: Any) -> Any:
        """Note the file of a function's or class's module, then pickle it as usual."""
        if isinstance(value, FunctionType | type):
            if value.__module__ == "__main__":  # to load that file would run the script again
                raise PlanError(
                    f"{value.__qualname__} lies in the running script, which another process could only run again: "
                    "put it into a module"
                )
            file = getattr(sys.modules.get(value.__module__), "__file__", None)
            if file and not _importable(value.__module__, file):
                self.files[value.__module__] = file
        return NotImplemented


def _importable(name: str, file: str) -> bool:
    """Whether `sys.path` leads to the file; under pytest's importlib mode it does not."""
    loaded = sys.modules.pop(name)  # find_spec would answer from there
    try:
        spec = find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return False
    finally:
        sys.modules[name] = loaded
    return spec is not None and spec.origin == file


# -- The server and its sessions -----------------------------------------------------------------


def serve() -> None:
    """Answer requests until the caller ends; the arguments of the process are a folder and the number of a socket."""
    import torch

    folder, caller = Path(sys.argv[1]), Connection(int(sys.argv[2]))
    _exit_with_parent(caller.fileno())
    torch.set_num_threads(1)
    for name in ("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "transformers.modeling_utils"):
        with suppress(ImportError):  # the session reports it where it matters
            import_module(name)
    while True:
        request = caller.recv_bytes()
        with TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as home:
            caller.send_bytes(_answer_of_session(request, Path(home)))


def _answer_of_session(request: bytes, home: Path) -> bytes:
    """Fork a session, whose answer comes in a file, since ranks that outlive it would keep a pipe open."""
    answer, log = home / "answer", home / "session.log"

    def run() -> None:
        try:
            result = _session(unpacked(request), home)
        except Exception as error:  # noqa: BLE001 - the code of a model may raise anything
            result = {
                "failed": f"{type(error).__name__}: {error}",
                "refused": isinstance(error, PlanError),
                "unusable": isinstance(error, UnusableModelError),
                "traceback": traceback.format_exc(),
            }
        answer.write_bytes(pickle.dumps(result))

    session = FORK.Process(target=_child, args=(run, log))
    session.start()
    session.join()
    if session.exitcode or not answer.exists():
        failed = f"the session ended with {_ending(session.exitcode) or 'no answer'}:\n{_tail(log)}"
        return pickle.dumps({"failed": failed})
    return answer.read_bytes()


def _child(run: Callable[[], None], log: Path) -> None:
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    parent = multiprocessing.parent_process()
    assert parent is not None
    _exit_with_parent(parent.sentinel)
    run()


def _exit_with_parent(sentinel: int) -> None:
    """End this process when the other end of a pipe or socket is closed, which only the parent holds."""
    poller = select.poll()
    poller.register(sentinel, select.POLLHUP)

    def watch() -> None:
        poller.poll()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _tail(log: Path, characters: int = 3000) -> str:
    return log.read_text(errors="replace")[-characters:] if log.exists() else ""


def _ending(exitcode: int | None) -> str:
    """`signal SIGABRT` or `exit status 1`; empty for success."""
    if exitcode is not None and exitcode < 0:
        return f"signal {signal.Signals(-exitcode).name}"
    return f"exit status {exitcode}" if exitcode else ""


def _session(request: Request, home: Path) -> dict[str, Any]:
    """Run everything for a request. Raises PlanError if the plan is refused."""
    from rl_parallel_plans.verification.plan_under_test import plan_facts
    from rl_parallel_plans.verification.reference import add_rounding_noise, build_subjects, run_unsharded

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    subjects, skipped = build_subjects(request)
    plan = plan_facts(request, {variant: subject.model for variant, subject in subjects.items()})
    skipped |= run_unsharded(request, subjects)
    facts: dict[str, dict[str, Any]] = {name: {"skipped": reason} for name, reason in skipped.items()}
    number = 0
    while tasks := [task for task in request.tasks if task.name not in facts]:
        (round_home := home / f"round{number}").mkdir()
        facts |= _round(request, tasks, subjects=subjects, home=round_home)
        number += 1
    for task in request.tasks:
        if task.variant in subjects:
            add_rounding_noise(task, facts[task.name], subjects[task.variant])
    first = next(iter(subjects.values())).model
    return {
        **plan,
        "facts": {task.name: facts[task.name] for task in request.tasks},
        "model": type(first).__name__,
        "parameters": sum(p.numel() for p in first.parameters()),
    }


def _round(request: Request, tasks: Sequence[Task], *, subjects: Any, home: Path) -> dict[str, dict[str, Any]]:
    """Fork the ranks, which run `tasks` in order until all are done or one fails; that one's facts say why."""
    from rl_parallel_plans.verification.ranks import run_rank

    facts: dict[str, dict[str, Any]] = {}
    errors: list[tuple[int, int, str]] = []  # when, rank, traceback
    ended: dict[int, int | None] = {}  # rank to exit code
    processes, waiting = [], {}
    for rank in range(request.world):
        reader, writer = FORK.Pipe(duplex=False)

        def run(rank: int = rank, send: Callable[[Any], None] = writer.send) -> None:
            try:
                run_rank(request, tasks, subjects=subjects, rank=rank, home=home, send=lambda *each: send(each))
            except (Exception, SystemExit):
                send((None, (time.monotonic_ns(), rank, traceback.format_exc())))
                raise

        processes.append(FORK.Process(target=_child, args=(run, home / f"{rank}.log")))
        processes[-1].start()
        writer.close()  # so that the end of the rank is the end of what it sends
        waiting[reader] = rank

    def receive(ready: Sequence[Any]) -> bool:
        """Take one message of each; False if it tells of a failure."""
        well = bool(ready)
        for reader in ready:
            try:
                name, value = reader.recv()
            except (EOFError, OSError):
                rank = waiting.pop(reader)
                processes[rank].join()
                ended[rank] = processes[rank].exitcode
                well = well and not ended[rank]
                continue
            if name is None:
                errors.append(value)
                well = False
            else:
                facts[name] = value
        return well

    well = True
    while waiting and well:
        well = receive(wait(list(waiting), request.deadline_s))
    if not well or len(facts) < len(tasks):
        until = time.monotonic() + OTHER_ERRORS_S
        while waiting and (ready := wait(list(waiting), max(0.0, until - time.monotonic()))):
            receive(ready)
        unfinished = next((task for task in tasks if task.name not in facts), tasks[-1])
        facts[unfinished.name] = {"failed": _first_failure(errors, ended, home=home, request=request)}
    for process in processes:
        process.kill()
        process.join()
    return facts


def _first_failure(
    errors: list[tuple[int, int, str]], ended: dict[int, int | None], *, home: Path, request: Request
) -> str:
    """The failure that came first; errors that follow from it (a peer that hung up) are not the cause."""

    def last_words(rank: int) -> str:
        lines = [line.strip() for line in _tail(home / f"{rank}.log").splitlines() if line.strip()]
        telling = [line for line in lines if "what():" in line or "Enforce" in line or "Error" in line]
        return " ".join((telling or lines)[-2:])[-600:] or "it said nothing"

    for rank, exitcode in ended.items():
        if exitcode is not None and exitcode < 0:
            return f"rank {rank} was ended by {_ending(exitcode)}: {last_words(rank)}"
    if errors:
        _, rank, text = min(errors)
        return f"rank {rank}: {text}"
    for rank, exitcode in ended.items():
        if exitcode:
            return f"rank {rank} ended with {_ending(exitcode)}: {last_words(rank)}"
    if len(ended) == request.world:
        return "the ranks ended before the task did"
    return f"no rank made progress for {request.deadline_s:.0f} s: the ranks wait for one another"
