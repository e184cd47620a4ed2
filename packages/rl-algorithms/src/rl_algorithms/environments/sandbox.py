"""Python programs of others, run under limits: processor time, memory, files, processes, output, a deadline.

THIS IS RESOURCE ISOLATION AND NOT A SECURITY BOUNDARY. It keeps a program that is wrong (an endless loop, a list that
grows for ever, a thousand children) from taking the run along. It does not keep a program that is malicious from
anything that the kernel allows an ordinary user: reading every file that everybody can read, say.
Unless root starts it a program runs as you, and reads and changes your files: keys, checkpoints, and under `/proc` the
environment variables of your other processes, this one's included. For code that you would not run yourself, give
`code.CodeTests` a `Runner` of your own that asks a real sandbox.

Each program runs in a session of its own, as `python -I -S` (no site-packages, no user site), in an empty directory
that is removed afterwards, and is handed none of this process's environment variables. Where the kernel allows it, it
has no network, and directories `/tmp`, `/var/tmp` and `/dev/shm` of its own, in memory and of bounded size, which are
gone when it has ended; elsewhere it has this machine's, and what it writes there stays. `sandbox_supervisor.py`
sets the limits and, when the program ends or the deadline passes, kills every process that it has started. A limit is
per process, except the number of processes; the kernel counts those per user, so that, started by root, a program runs
as a user that owns nothing else. Linux only.
"""

import contextlib
import functools
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, ClassVar, Literal, Protocol, runtime_checkable

from rl_algorithms.choices import check_fields
from rl_algorithms.environments.scores import CannotJudgeError

__all__ = ["Execution", "Limits", "Runner", "SandboxError", "check_runs", "run_python"]

SUPERVISOR = Path(__file__).with_name("sandbox_supervisor.py")
# What the supervisor needs beyond the deadline, to start and to kill all that is left, on a busy machine.
GRACE_S = 30.0
PROBE_S = 60.0  # seconds for an empty program, on a machine that is busy

logger = logging.getLogger(__name__)
NOT_A_BOUNDARY = "limits keep programs that are wrong from doing harm, they are not a security boundary"


class SandboxError(ValueError):
    """A program could not be run as its limits promise; it says nothing of the program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a program may use. Resource isolation, not a security boundary."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid"}

    wall_s: float = 10.0
    """Seconds until the program and all that it started are killed; also, rounded up, of each process's processor."""

    memory_bytes: int = 512 << 20
    """Address space of each process. Python itself takes about 32 MB; beyond the limit a program gets a MemoryError."""

    file_bytes: int = 16 << 20
    """Size of each file that is written, standard output included. How many there are is bounded by time alone."""

    output_bytes: int = 1 << 20
    """How much of the standard output, and of the errors, is looked at."""

    open_files: int = 64
    """Files that each process may have open at once."""

    processes: int = 4
    """Processes and threads that the program may have at once besides itself."""

    network: Literal["auto", "none", "host"] = "auto"
    """`"none"` gives the program a network of its own with nothing in it (`unshare -n`), or refuses to run where that
    takes rights that this process lacks; `"auto"` does so where the kernel allows it, and `Execution.isolated` says
    whether it did. `"host"` leaves it the network of this machine."""

    files: Literal["auto", "private", "host"] = "auto"
    """`"private"` gives the program directories `/tmp`, `/var/tmp` and `/dev/shm` of its own, in memory, which are gone
    when it has ended, or refuses to run; `"auto"` does so where the kernel allows it. `"host"` leaves it those of this
    machine, and what it writes there stays."""

    disk_bytes: int = 64 << 20
    """Size of each of its private directories; `file_bytes` limits each file anywhere."""

    python: str | None = None
    """The interpreter; None is this process's, or, where programs cannot run that (root starts them as another user,
    who cannot read root's home), the first `python3` of the system that they can. The log says which."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("wall_s", "memory_bytes", "file_bytes", "output_bytes", "open_files", "disk_bytes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be > 0")
        if self.processes < 0:
            raise ValueError(f"processes={self.processes} must be >= 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """What became of a program."""

    ending: Literal["exit", "signal", "timeout"]
    """Whether it ended by itself, was killed by a signal (a limit, for one), or was still running at the deadline."""

    code: int
    """The exit code, or the signal's number; 0 for a timeout."""

    stdout: str
    """What it printed; what is no UTF-8 is replaced."""

    stderr: str
    """What it printed as errors."""

    cut: bool
    """Whether more was printed than `output_bytes`."""

    isolated: frozenset[str] = frozenset()
    """What the program had to itself: `"network"`, `"files"`."""

    @property
    def succeeded(self) -> bool:
        """Whether it ended by itself with exit code 0, and all its output is here."""
        return self.ending == "exit" and self.code == 0 and not self.cut


@runtime_checkable
class Runner(Protocol):
    """What runs a Python program: `run_python`, or a client of a sandbox elsewhere."""

    def __call__(self, source: str, *, stdin: str, limits: Limits) -> Execution:
        """Run it to its end or its deadline.

        Raises:
            SandboxError: it could not be run.
        """


def run_python(source: str, *, stdin: str = "", limits: Limits | None = None) -> Execution:
    """Run a Python program under limits and wait for its end. Resource isolation, not a security boundary.

    Raises:
        SandboxError: not on Linux; the interpreter cannot be started; no network of its own can be made and none was
            asked for; or something that the program started could not be killed.
    """
    limits = limits or Limits()
    if sys.platform != "linux":
        raise SandboxError(
            f"programs are run under limits on Linux only, and this is {sys.platform}; use another Runner"
        )
    if limits.python is None:
        limits = replace(limits, python=_runnable_python())
    return _run(source, stdin=stdin, limits=limits)


@functools.cache
def _runnable_python() -> str:
    """This process's interpreter, or the first of the system's that programs can run.

    Raises:
        SandboxError: there is none.
    """
    errors = []
    found = [shutil.which("python3", path=folder) for folder in ("/usr/local/bin", "/usr/bin", "/bin")]
    for python in dict.fromkeys([sys.executable, *filter(None, found)]):
        try:
            execution = _run("", stdin="", limits=Limits(wall_s=PROBE_S, python=python, network="host", files="host"))
        except SandboxError as error:
            errors.append(error)
            continue
        if execution.succeeded:
            if python != sys.executable:
                logger.warning("programs are run by %s: %s", python, errors[0])
            return python
        errors.append(
            SandboxError(f"{python} ended by {execution.ending} {execution.code}: {execution.stderr[-200:]!r}")
        )
    raise SandboxError(
        f"{errors[0]}. None of the system's interpreters can be started either. Install one that every user can read "
        f"(apt-get install python3) and set Limits(python='/usr/bin/python3')"
    )


def _run(source: str, *, stdin: str, limits: Limits) -> Execution:
    directory = Path(tempfile.mkdtemp(prefix="rl-program-"))
    try:
        (directory / "main.py").write_bytes(source.encode("utf-8", "replace"))
        with contextlib.ExitStack() as files:
            streams = [files.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
            streams[0].write(stdin.encode("utf-8", "replace"))
            streams[0].seek(0)
            report = _supervised(directory, streams, limits)
            (stdout, cut), (stderr, cut_too) = (_read(stream, limits.output_bytes) for stream in streams[1:])
    finally:
        _remove(directory)
    return Execution(
        ending=report["ending"],
        code=report["code"],
        stdout=stdout,
        stderr=stderr,
        cut=cut or cut_too,
        isolated=frozenset(report["isolated"]),
    )


@functools.cache
def check_runs(limits: Limits) -> None:
    """Refuse limits under which no program runs here, whatever it is. Asked once a process; only a yes is remembered.

    Raises:
        CannotJudgeError: the interpreter cannot be started, by the user that programs run as, or not with these limits.
    """
    try:
        execution = run_python("", limits=limits)
    except SandboxError as error:
        raise CannotJudgeError(f"no program can be run here: {error}") from error
    if not execution.succeeded:
        raise CannotJudgeError(
            f"no program can be run here: an empty one ended by {execution.ending} {execution.code} under {limits}: "
            f"{execution.stderr[-300:]!r}"
        )


def _supervised(directory: Path, streams: Sequence[IO[bytes]], limits: Limits) -> dict[str, Any]:
    # Files and not pipes: nothing to be drained, and nobody waits for what a stray child holds open.
    reading, writing = os.pipe()
    config = {**asdict(limits), "cwd": str(directory), "report": writing}
    try:
        process = subprocess.Popen(  # noqa: S603 - our own script
            [sys.executable, "-I", "-S", str(SUPERVISOR), json.dumps(config)],
            stdin=streams[0],
            stdout=streams[1],
            stderr=streams[2],
            pass_fds=(writing,),
            env={},
            start_new_session=True,
        )
    except OSError as error:
        os.close(reading)
        raise SandboxError(f"the interpreter {sys.executable} cannot be started: {error}") from error
    finally:
        os.close(writing)
    with open(reading, "rb") as pipe:  # noqa: PTH123 - a descriptor
        try:
            code = process.wait(timeout=limits.wall_s + GRACE_S)
        except subprocess.TimeoutExpired as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise SandboxError(f"the program's supervisor did not end {GRACE_S} s after the deadline") from error
        text = pipe.read()
    if code != 0 or not text:
        raise SandboxError(f"the program's supervisor ended with exit code {code} and no report")
    report: dict[str, Any] = json.loads(text)
    if "refused" in report:
        raise SandboxError(f"{report['refused']} ({NOT_A_BOUNDARY})")
    return report


def _read(stream: IO[bytes], limit: int) -> tuple[str, bool]:
    stream.seek(0)
    data = stream.read(limit + 1)
    return data[:limit].decode("utf-8", "replace"), len(data) > limit


def _remove(directory: Path) -> None:
    try:
        shutil.rmtree(directory)
    except (OSError, RecursionError):
        # A program may nest directories deeper than Python's recursion, and take away its own right to open them.
        for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            subprocess.run([*command, "--", str(directory)], check=False, capture_output=True)  # noqa: S603
        if directory.exists():
            raise SandboxError(f"the program's directory {directory} could not be removed; remove it by hand") from None
