"""Judges what `start_stop.py` found: what an engine that was stopped has not given back, in words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from footprint import MARK, end_of

START_STOP = Path(__file__).with_name("start_stop.py")
TRACKER = "multiprocessing.resource_tracker"
"""Python's own, which lives until its program ends."""
ONCE = {"threads": 4, "files": 2}
"""How many may stay after the first time, for libraries that keep some until the program ends."""


def run(kind: str, cycles: int, *, model: str, temporary: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """Run `start_stop.py` with a folder for temporary files of its own; return what it found.

    Adds `remaining`, the processes that outlived the program, and `stderr`, what it printed.
    """
    mark = uuid.uuid4().hex
    done = subprocess.run(
        [sys.executable, str(START_STOP), kind, str(cycles), model],
        env={**os.environ, **environment, MARK: mark, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"start_stop.py {kind} ended with {done.returncode}:\n{done.stderr[-8000:]}")
    return {**json.loads(done.stdout), "remaining": end_of(mark), "stderr": done.stderr}


def leaks(found: Mapping[str, Any], *, growth_bytes: int) -> list[str]:
    """Return what is left, one complaint each; after a fifth of the cycles, memory may grow by `growth_bytes`."""
    before, after = found["before"], found["after"]
    first, last, warm = after[0], after[-1], after[len(after) // 5]
    complaints = [f"{name} lived on after cycle {n}" for n, names in enumerate(found["outlived"]) for name in names]
    complaints += [f"process {each}" for each in last["processes"] if TRACKER not in each]
    complaints += [f"process {each}, after the program's end" for each in found["remaining"]]
    for name in ("ports", "shared_memory", "temporary"):
        complaints += [f"{name}: {each}" for each in last[name] if each not in before[name]]
    complaints += _changed(before["environment"], last["environment"])
    for name, allowed in ONCE.items():
        complaints += [f"{name}: {more}" for more in _more(first[name], last[name])]
        if sum(first[name].values()) - sum(before[name].values()) > allowed:
            complaints += [f"{name}, once: {more}" for more in _more(before[name], first[name])]
    grown = last["resident_bytes"] - warm["resident_bytes"]
    if grown > growth_bytes:
        complaints.append(f"memory: {grown / 1e6:.1f} MB more, and {growth_bytes / 1e6:.1f} MB are allowed")
    said = (row.partition("resource_tracker: ")[2] for row in found["stderr"].splitlines())
    return complaints + [f"said at the program's end: {each}" for each in said if each]


def _changed(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    for name in sorted({*before, *after}):
        if before.get(name) != after.get(name):
            yield f"environment: {name} was {before.get(name)!r} and is {after.get(name)!r}"


def _more(before: Mapping[str, int], after: Mapping[str, int]) -> Iterator[str]:
    for name, count in sorted(after.items()):
        if count > before.get(name, 0):
            yield f"{count} of {name}, and {before.get(name, 0)} before"
