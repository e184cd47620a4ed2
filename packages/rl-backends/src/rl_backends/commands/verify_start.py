"""Start the ranks of a comparison, wait for all of them under one deadline, and end them all when one fails."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_backends.commands.console import CommandError

__all__ = ["run_ranks"]

PROGRAM = "rl_backends.commands.verify_rank"
POLL_S = 0.1


def run_ranks(task: Mapping[str, Any], *, deadline_s: float) -> None:
    """Run the task on `task["ranks"]` processes over gloo; what they found lies in `task["folder"]`.

    Raises:
        CommandError: the backend refuses what was asked.
        RuntimeError: a rank failed.
        TimeoutError: not all were done in time.
    """
    folder, ranks = Path(task["folder"]), int(task["ranks"])
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(_ended(_start(task, rank, folder))) for rank in range(ranks)]
        _wait(processes, folder, deadline_s=deadline_s)
    for rank in range(ranks):
        note = folder / f"{rank}.json"
        if note.is_file():
            raise CommandError(json.loads(note.read_text(encoding="utf-8"))["refused"])


def _start(task: Mapping[str, Any], rank: int, folder: Path) -> "subprocess.Popen[bytes]":
    found = [os.environ.get("PYTHONPATH", ""), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, found)), "OMP_NUM_THREADS": "1"}
    environment["CUDA_VISIBLE_DEVICES"] = ""  # ranks are CPU ranks, and Megatron takes a GPU where it sees one
    with (folder / f"{rank}.log").open("wb") as log:
        return subprocess.Popen(  # noqa: S603 - this interpreter, this package
            [sys.executable, "-m", PROGRAM, json.dumps({**task, "rank": rank})],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


@contextlib.contextmanager
def _ended(process: "subprocess.Popen[bytes]") -> Any:
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _wait(processes: "Sequence[subprocess.Popen[bytes]]", folder: Path, *, deadline_s: float) -> None:
    until = time.monotonic() + deadline_s
    codes = [process.poll() for process in processes]
    while None in codes and not any(codes):
        if time.monotonic() > until:
            raise TimeoutError(f"the ranks were not done after {deadline_s:g} s, and were ended; raise --deadline-s")
        time.sleep(POLL_S)
        codes = [process.poll() for process in processes]
    for rank, process in enumerate(processes):
        if process.poll():
            said = (folder / f"{rank}.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise RuntimeError(f"rank {rank} ended with status {process.poll()}: {said[-1] if said else 'no word'}")
