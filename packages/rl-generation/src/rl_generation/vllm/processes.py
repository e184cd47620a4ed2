"""The processes of an engine: which they are, which of them died and how, and what they leave in shared memory.

Reads /proc, so this is Linux. Does not know requests.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, final

from rl_generation.child_process import process_stat
from rl_generation.vllm.leftovers import SHARED_MEMORY, VLLM, mapped_shared_memory

__all__ = ["EngineProcesses"]

KILL_TIMEOUT_S = 30.0
"""How long a process that was killed may take to end; only one that waits in the kernel takes that long."""


@final
class EngineProcesses:
    """All processes under `roots`, and the shared memory that they had mapped when this was made.

    Args:
        roots: `multiprocessing.Process` objects that the engine started; none where it lives in this process.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self.roots = tuple(roots)
        self._started: dict[int, int] = {}
        self._files: set[Path] = set()
        self.survey()
        # What vLLM has titled as one; compilers and trackers come and go.
        self._workers = {number: title for number in self._started if "Worker" in (title := _title(number))}

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Of all that were found, living or not."""
        return tuple(self._started)

    @property
    def started(self) -> Mapping[int, int]:
        """Process id → start of all that were found, living or not."""
        return self._started

    def survey(self) -> None:
        """Look for further processes and shared memory."""
        for process_id, started in _below({root.pid for root in self.roots}).items():
            self._started[process_id] = started
            mapped = mapped_shared_memory(process_id).values()
            self._files |= {path for path in mapped if path.parent == SHARED_MEMORY and path.name.startswith(VLLM)}

    def dead(self) -> str | None:
        """Say which root or worker is dead, and how it ended where that is known; None where all live."""
        for root in self.roots:
            if not root.is_alive():
                return f"{root.name} (process {root.pid}) of the engine is dead: {_ending(root.exitcode)}"
        for process_id, title in self._workers.items():  # how a worker ended is known to its parent alone
            if not self._lives(process_id):
                return f"{title} (process {process_id}) of the engine is dead; vLLM's log may say of what"
        return None

    def end(self, *, timeout_s: float = 10.0) -> None:
        """Wait until all have ended, kill those that have not, and remove what they left in shared memory."""
        self._wait(timeout_s)
        for process_id in filter(self._lives, self._started):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)
        # A worker is no child of this process, and on a busy machine one that was killed needs a while to end.
        self._wait(KILL_TIMEOUT_S)
        for root in self.roots:
            root.join(timeout_s)
        for file in self._files:
            file.unlink(missing_ok=True)

    def _wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while any(map(self._lives, self._started)) and time.monotonic() < deadline:
            time.sleep(0.02)

    def _lives(self, process_id: int) -> bool:
        stat = process_stat(process_id)
        return stat is not None and stat.started == self._started[process_id]


def _below(roots: set[int]) -> dict[int, int]:
    """Process id → start of `roots` and all of their descendants that live."""
    if not roots:
        return {}
    stats = {int(each.name): process_stat(int(each.name)) for each in Path("/proc").iterdir() if each.name.isdigit()}
    found: dict[int, int] = {}
    newest = roots
    while newest:
        found |= {process_id: stat.started for process_id in newest if (stat := stats.get(process_id)) is not None}
        newest = {process_id for process_id, stat in stats.items() if stat and stat.parent in newest} - found.keys()
    return found


def _title(process_id: int) -> str:
    try:
        return Path(f"/proc/{process_id}/cmdline").read_text(encoding="utf-8").partition("\0")[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _ending(code: int | None) -> str:
    if code is None:
        return "how it ended is unknown"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"it exited with code {code}"
