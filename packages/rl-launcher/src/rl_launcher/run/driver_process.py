"""The driver of a run over Ray as a child of a small process that is no part of Ray.

When the raylet or the GCS of its node dies, Ray's C++ core ends the driver without a word: Python never hears of it. So
the command that a person started forks, and only the child becomes a process of Ray. The parent passes signals on and
waits. If the child ends without having concluded the run, the parent names what happened, writes event, summary and
report, and goes on from the last checkpoint where `cluster.max_restarts` is not used up.

    command (parent) ── pipe: claimed, training N, ended CODE ── driver (child) ── raylet, GCS, ranks, engines
"""

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_launcher.checkpoints import CheckpointError, find_latest
from rl_launcher.checkpoints.folders import root_of
from rl_launcher.errors import FAILED, INTERRUPTED
from rl_launcher.run.signals import SIGNALS, Interruption
from rl_launcher.schema import Recipe
from rl_observe import RunDirectory, read_metrics, write_report
from rl_observe.health import count_events
from rl_observe.log_files import EventLog

REFUSED = 2
START_GRACE_S = 20.0
"""Seconds that a driver may take to end after a signal while the run still starts; Ray's C++ code may ignore it."""
END_GRACE_S = 90.0
"""Seconds that a driver may take to end after its last word, or after a second signal."""
PASSED_ON = signal.SIGUSR2
"""By which the driver gets the signals of its parent: it tells them from those that were sent to it, too."""
POLL_S = 0.2
LINUX_PR_SET_PDEATHSIG = 1
SERVICES = {"raylet": "Ray's raylet", "gcs_server": "Ray's GCS"}
"""Roles in `processes.json` of Ray's own processes."""

_to_parent: int | None = None


def note(word: str, *values: object) -> None:
    """Tell the parent how far this driver has come; does nothing where there is no parent."""
    if _to_parent is not None:
        with contextlib.suppress(OSError):
            os.write(_to_parent, f"{' '.join([word, *map(str, values)])}\n".encode())


def can_have_parent() -> bool:
    """Whether this process may fork a driver: on Linux, in its main thread, and while it has no other."""
    alone = threading.current_thread() is threading.main_thread() and threading.active_count() == 1
    return sys.platform == "linux" and alone and _to_parent is None


def supervise(recipe: Recipe, go_on: Callable[[int], Any], *, resuming: bool) -> int | None:
    """Fork a driver; return None in it, and the run's exit code in the parent once the run has ended.

    Args:
        recipe: of the run.
        go_on: carries on with the run as restart number N, in a new driver whose own driver died.
        resuming: whether the run directory is that of an earlier run.
    """
    parent = _Parent(recipe, resuming=resuming)
    restart: int | None = None
    while True:
        if parent.fork():
            if restart is not None:
                go_on(restart)
                raise SystemExit(0)
            return None
        code = parent.wait()
        if code is not None:
            return code
        restart = parent.next_restart()
        if restart is None:
            return parent.code


def _end_at_once(_number: int, _frame: object) -> None:
    """The driver's answer to a signal before it has come to its run: nothing is to be cleaned up, and the parent tells.

    An exception would be raised in the middle of an import, and whoever imports may make another error of it.
    """
    if Interruption.entered:
        raise KeyboardInterrupt
    os._exit(INTERRUPTED)


def ended(code: int) -> None:
    """Tell the parent that this driver has concluded, with this exit code; what Ray does at exit changes it no more."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    note("ended", code)


@dataclass(kw_only=True)
class _Said:
    """What a driver has told so far."""

    claimed: bool = False
    restarts: int | None = None
    """Of the run, once it trains; None before."""
    ended: int | None = None


class _Parent:
    """The process that a person started, while a driver runs."""

    def __init__(self, recipe: Recipe, *, resuming: bool) -> None:
        self._recipe, self._resuming = recipe, resuming
        self._run_dir = Path(recipe.run_dir).expanduser()
        self._missing = [each for each in (self._run_dir, *self._run_dir.parents) if not each.exists()]
        self._signals = 0
        self._child = 0
        self._pipe = -1
        self._first_gone: dict[str, str] = {}
        self._restarts = 0
        self._how = ""
        self.code = FAILED

    # -- Start ------------------------------------------------------------------------------------------------------

    def fork(self) -> bool:
        """Start a driver; True in it."""
        global _to_parent  # noqa: PLW0603 - the one connection of this process with its parent
        sys.stdout.flush()
        sys.stderr.flush()
        reading, writing = os.pipe()
        parent = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, (*SIGNALS, PASSED_ON))  # until whoever gets one has its handlers
        child = os.fork()
        if child == 0:
            os.close(reading)
            _to_parent = writing
            os.setpgrp()  # signals to the parent's group do not reach Ray's processes, which would end at once
            ctypes.CDLL(None).prctl(LINUX_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(FAILED)
            Interruption.passed_on = PASSED_ON
            for number in (*SIGNALS, PASSED_ON):
                signal.signal(number, _end_at_once)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (*SIGNALS, PASSED_ON))
            return True
        os.close(writing)
        self._child, self._pipe, self._said = child, reading, _Said()
        self._first_gone.clear()
        with contextlib.suppress(OSError):
            os.setpgid(child, child)  # whoever comes first
        for number in SIGNALS:
            signal.signal(number, self._pass_on)
        self._hand_terminal_to(child)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*SIGNALS, PASSED_ON))
        return False

    def _pass_on(self, _number: int, _frame: object) -> None:
        self._signals += 1
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._child, PASSED_ON)

    def _hand_terminal_to(self, group: int) -> None:
        """Ctrl-C, and what is typed at a breakpoint, reach the driver."""
        with contextlib.suppress(OSError, ValueError):
            terminal = sys.stdin.fileno()
            if os.isatty(terminal) and os.tcgetpgrp(terminal) in {os.getpgrp(), self._child}:
                before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
                os.tcsetpgrp(terminal, group)
                signal.signal(signal.SIGTTOU, before)

    # -- While it runs ----------------------------------------------------------------------------------------------

    def wait(self) -> int | None:
        """Wait for the driver's end: the exit code, or None if it ended without having concluded the run."""
        rest, deadline, ended, status = b"", None, False, 0
        processes = _RayServices(self._run_dir)
        while not ended:
            readable, _, _ = select.select([self._pipe], [], [], POLL_S)
            if readable and (data := os.read(self._pipe, 4096)):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._hear(line.decode().split())
            elif readable:
                time.sleep(POLL_S)  # its end of the pipe is closed
            child, status = os.waitpid(self._child, os.WNOHANG | os.WUNTRACED)
            if child and os.WIFSTOPPED(status) and os.WSTOPSIG(status) == signal.SIGTSTP:
                self._stop_too()
            ended = bool(child) and not os.WIFSTOPPED(status)
            if not (ended and self._first_gone):  # what ends with the driver is no cause
                self._first_gone |= processes.gone()
            starting = self._said.restarts is None
            if self._said.ended is not None or self._signals >= (1 if starting else 2):
                grace_s = START_GRACE_S if starting and self._said.ended is None else END_GRACE_S
                deadline = deadline or time.monotonic() + grace_s
                if time.monotonic() > deadline and not ended:
                    os.kill(self._child, signal.SIGKILL)
        while select.select([self._pipe], [], [], 0)[0] and (data := os.read(self._pipe, 4096)):
            rest += data
        for line in rest.split(b"\n"):
            self._hear(line.decode().split())
        os.close(self._pipe)
        self._hand_terminal_to(os.getpgrp())
        processes.end()
        if self._said.ended is not None:
            return self._said.ended
        how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit code {os.WEXITSTATUS(status)}"
        service = " and ".join(self._first_gone.values())
        self._how = (
            f"{service} died, and Ray ended the driver with it ({how})"
            if service
            else f"the driver ended without a message ({how}): it was killed (kill -9, or by the kernel when memory "
            f"ran out), or Ray's own code ended it"
        )
        return None

    def _hear(self, words: list[str]) -> None:
        match words:
            case ["claimed"]:
                self._said.claimed = True
            case ["training", number]:
                self._said.restarts = self._restarts = int(number)
            case ["ended", code]:
                self._said.ended = int(code)

    def _stop_too(self) -> None:
        """Ctrl-Z: stop with the driver, and continue with it."""
        self._hand_terminal_to(os.getpgrp())
        os.kill(os.getpid(), signal.SIGSTOP)
        self._hand_terminal_to(self._child)
        os.killpg(self._child, signal.SIGCONT)

    # -- The end of a driver that said nothing ------------------------------------------------------------------------

    def next_restart(self) -> int | None:
        """Number of the restart by which the run goes on; None if it ends here, which is then told, with `code`."""
        trained, claimed = self._said.restarts is not None, self._said.claimed
        begun = trained or self._resuming or self._restarts > 0
        if not begun:
            if claimed:
                self._discard()
            with contextlib.suppress(OSError):  # what it had made before it claimed it, and nobody has filled
                for made in self._missing:
                    made.rmdir()
            what = "interrupted before training began" if self._signals else f"{self._how} while the run started"
            _say(f"{what}; nothing was written")
            self.code = INTERRUPTED if self._signals else REFUSED
            return None
        directory = RunDirectory.open(self._run_dir)
        most, again = self._recipe.cluster.max_restarts, f"rl-launcher resume {self._run_dir}"
        if not self._signals and trained and self._restarts < most:
            self._restarts += 1
            reaction = f"restart {self._restarts} of cluster.max_restarts={most}: {self._from_where(directory)}"
            self._report(directory, "driver_died", reaction=reaction)
            _say(f"{self._how}; {reaction}")
            return self._restarts
        name = "interrupted" if self._signals else "driver_died"
        reaction = f"the run ends, with exit code {INTERRUPTED if self._signals else FAILED}"
        self._report(directory, name, reaction=reaction)
        self._conclude(directory, name)
        how = "interrupted at once" if self._signals else f"stopped: {self._how}"
        _say(f"{how}. {self._from_where(directory)}. Continue with: {again}")
        self.code = INTERRUPTED if self._signals else FAILED
        return None

    def _from_where(self, directory: RunDirectory) -> str:
        try:
            latest = find_latest(directory)
        except CheckpointError as error:
            return str(error)
        if latest is None:
            return "no checkpoint was saved, so the run starts from its beginning"
        return f"the newest whole checkpoint is {latest.folder.name}, {latest.describe()}"

    def _last_step(self, directory: RunDirectory) -> dict[str, Any]:
        rows = [row for row in read_metrics(directory) if row.get("step")]
        return {"stage": rows[-1]["stage"], "step": rows[-1]["step"]} if rows else {"stage": None, "step": None}

    def _report(self, directory: RunDirectory, name: str, *, reaction: str) -> None:
        where = self._last_step(directory)
        with contextlib.suppress(OSError, ValueError):
            EventLog(directory).write(name, where["step"], self._how, reaction=reaction, stage=where["stage"])

    def _conclude(self, directory: RunDirectory, name: str) -> None:
        """Write summary and report from what is on disk; what cannot be written is told."""
        rows = read_metrics(directory)
        summary = {
            "run_dir": str(directory.path),
            "task": self._recipe.data.source,
            "algorithm": self._recipe.headline,
            "seed": self._recipe.seed,
            "interrupted": True,
            "ended_by": name,
            "error": self._how,
            "conditions": count_events(directory),
            "restarts": self._restarts,
            "batches": sum(row["stage"] == self._recipe.headline and int(str(row["step"])) > 0 for row in rows),
        }
        for write in (
            lambda: directory.summary.write_text(json.dumps(summary, indent=2), encoding="utf-8"),
            lambda: write_report(directory),
        ):
            try:
                write()
            except (OSError, ValueError) as error:
                _say(f"not written: {error}")

    def _discard(self) -> None:
        """Remove the run directory of a driver that died before it had trained, as a refusal does."""
        directory = RunDirectory(self._run_dir.absolute())
        with contextlib.suppress(OSError, ValueError):
            if read_metrics(directory) or root_of(directory).exists() or directory.model.exists():
                return
            for entry in directory.path.iterdir():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


@dataclass
class _RayServices:
    """Ray's own processes of this node, as `processes.json` of the run lists them."""

    run_dir: Path
    _read_at: float = 0.0
    _pids: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Role and start time of each process."""

    def gone(self) -> dict[str, str]:
        """Which services have died so far, by role, as messages name them."""
        self._read()
        found = {}
        for pid, (role, started) in self._pids.items():
            if role in SERVICES and _start_time(pid) != started:
                found[role] = f"{SERVICES[role]} (pid {pid})"
        return found

    def end(self) -> None:
        """Kill what is left of the run on this node: they have lost their driver."""
        for pid, (_, started) in self._pids.items():
            if _start_time(pid) == started:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)

    def _read(self) -> None:
        file = self.run_dir / "processes.json"
        with contextlib.suppress(OSError, ValueError, KeyError):
            if (changed := file.stat().st_mtime) == self._read_at:
                return
            entries = json.loads(file.read_text(encoding="utf-8"))
            self._read_at = changed
            host = os.uname().nodename
            for each in entries:
                pid, role, here = each["pid"], each["role"], str(each["node"]).startswith(host)
                if role != "driver" and here and pid is not None and pid not in self._pids:
                    started = _start_time(pid)
                    if started:
                        self._pids[pid] = (role, started)


def _start_time(pid: int) -> str:
    """When a process began, as the kernel counts; empty if it is gone or a zombie."""
    with contextlib.suppress(OSError):
        after = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return "" if after[0] == "Z" else after[19]
    return ""


def _say(text: str) -> None:
    sys.stderr.write(f"rl-launcher: {text}\n")
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")  # the driver's live view had hidden the cursor
    sys.stderr.flush()
