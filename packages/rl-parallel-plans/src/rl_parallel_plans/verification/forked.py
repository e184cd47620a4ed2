"""One forked process: it runs a function, logs to a file, and ends when the caller of all of them ends."""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path


def watch(lifeline: int) -> None:
    """End this process when the other end of the pipe `lifeline` is closed, whoever closed it and however."""

    def wait() -> None:
        os.read(lifeline, 1)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


class Forked:
    """A child process, running `function` from now on."""

    def __init__(self, function: Callable[[], None], *, log: Path, lifeline: int) -> None:
        self.log = log
        self.started = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            os._exit(_run(function, log, lifeline))

    def poll(self) -> str | None:
        """How it ended: "" for well; None while it runs."""
        ended, status = os.waitpid(self.pid, os.WNOHANG)
        return _described(status) if ended else None

    def wait(self) -> str:
        """How it ended, once it has: "" for well."""
        return _described(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        """End it now."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def tail(self) -> str:
        """The last words of its log."""
        return self.log.read_text(errors="replace")[-3000:] if self.log.exists() else ""


def _run(function: Callable[[], None], log: Path, lifeline: int) -> int:
    try:
        with log.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        watch(lifeline)
        function()
        status = 0
    except BaseException:  # noqa: BLE001 - the child ends here, whatever happened
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def _described(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit status {code}" if code else ""
