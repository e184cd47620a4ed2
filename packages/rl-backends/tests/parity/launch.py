"""Run cells on as many processes as they need, and gather what they came to. No rank is waited for in vain.

A rank that dies takes its launch with it at once: its cell has failed with the end of its log, and what comes after it
is started anew. A cell in which native code crashed is run once more, and the crash is printed: seen once, with
torch 2.13 and gloo on an overloaded machine, as `malloc(): unaligned tcache chunk detected`.
"""

import json
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "launching"))

import forkserver

from parity import problems

PATIENCE_S = 300
"""A launch that has come no further for so long is killed, and the cell that it hangs in has failed."""

OURS = (0, -signal.SIGKILL, -signal.SIGUSR1)
"""How a rank ends that did not fail itself: at the end, or by what this file sends."""


def run(cells, *, folder, launches=3, trace_only=True, say=lambda _: None):
    """Outcomes by the cells' names, a list over ranks each: as `run_cell` returns them, or `{"died": why}`.

    trace_only: do not generate code for models that are compiled.
    """
    problems.answers([cell.problem for cell in cells if cell.refusal is None], folder)
    outcomes, crashed = {}, set()
    for ranks in sorted({cell.ranks for cell in cells}):
        todo = [cell.name for cell in cells if cell.ranks == ranks]
        for _ in range(launches):
            if todo:
                found = _launch(todo, ranks=ranks, folder=folder, trace_only=trace_only)
                for name in [name for name in found if found[name][0].get("crashed") and name not in crashed]:
                    print(f"{name} is run once more: {found.pop(name)[0]['died']}")
                    crashed.add(name)
                outcomes |= found
                todo = [name for name in todo if name not in outcomes]
        for name in todo:
            outcomes[name] = [{"died": f"not run: ranks died in {launches} cells before"}]
        say(f"{len(outcomes)} of {len(cells)} cells")
    return outcomes


def _launch(names, *, ranks, folder, trace_only):
    """Outcomes up to the cell in which a rank died, that one included."""
    place = Path(tempfile.mkdtemp(dir=folder))
    logs = [place / f"rank{rank}.log" for rank in range(ranks)]
    results = [place / f"rank{rank}.jsonl" for rank in range(ranks)]
    processes = []
    for rank in range(ranks):
        task = {
            "cells": names,
            "trace_only": trace_only,
            "rank": rank,
            "ranks": ranks,
            "folder": str(folder),
            "rendezvous": str(place / "rendezvous"),
            "outcomes": str(results[rank]),
        }
        processes.append(_start(task, logs[rank]))
    try:
        dead = _first_to_die(processes, results)
        if dead is not None:
            _tell_where_they_are(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if dead is None:
        return _gathered(names, results, died=None)
    died = {"died": _why(dead, logs, processes)}
    if any(process.returncode < 0 and process.returncode not in OURS for process in processes):
        died["crashed"] = True
    return _gathered(names, results, died=died)


def _start(task, log):
    return forkserver.start(Path(__file__).with_name("program.py"), task, log=log)


def _first_to_die(processes, results):
    """The first rank to end with an error, or a rank that hangs; None when all are done."""
    written, since = None, time.monotonic()
    while time.monotonic() < since + PATIENCE_S:
        now = [path.stat().st_size if path.exists() else 0 for path in results]
        if now != written:
            written, since = now, time.monotonic()
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code not in (None, 0):
                return rank
        if None not in codes:
            return None
        time.sleep(0.02)
    return next(rank for rank, process in enumerate(processes) if process.poll() is None)


def _tell_where_they_are(processes):
    """A rank that hangs writes its stack into its log; one that is about to raise, has the time to do it."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGUSR1)
    time.sleep(0.5)


def _why(first, logs, processes):
    """The end of every log of a rank that ended with an error or by a signal of its own, or of the one that hung."""
    failed = [rank for rank, process in enumerate(processes) if process.returncode not in OURS]
    if not failed:
        return f"rank {first} hung or was killed:\n{logs[first].read_text()[-4000:]}"
    return "\n".join(
        f"rank {rank} ended with code {processes[rank].returncode}:\n{logs[rank].read_text()[-3000:]}"
        for rank in failed
    )


def _gathered(names, results, *, died):
    """Lines of each rank by cell; the first cell that a rank has begun and not ended is the one that failed."""
    texts = [path.read_text().splitlines(keepends=True) if path.exists() else [] for path in results]
    lines = [[json.loads(line) for line in text if line.endswith("\n")] for text in texts]
    ended = [{line["cell"]: line for line in rank if len(line) > 1} for rank in lines]
    gathered = {}
    for name in names:
        if all(name in rank for rank in ended):
            gathered[name] = [rank[name] for rank in ended]
        else:
            return {**gathered, name: [died]}
    if died is not None:  # after the last cell, which must not hide it
        gathered[names[-1]] = [died]
    return gathered
