"""Whole refits through files, four real processes: commits, an abort, a source that is killed."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent / "programs" / "files_refit.py"


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_four_processes_commit_abort_commit_and_survive_a_dead_source(tmp_path):
    with contextlib.ExitStack() as stack:
        parties = {}
        for side, rank in [("source", 0), ("source", 1), ("sink", 0), ("sink", 1)]:
            parties[f"{side} {rank}"] = stack.enter_context(start(side, rank, tmp_path))
        try:
            printed = {name: process.communicate(timeout=500) for name, process in parties.items()}
        finally:
            for process in parties.values():
                process.kill()
    assert parties["source 0"].returncode == -9
    for name in ("source 1", "sink 0", "sink 1"):
        out, err = printed[name]
        assert parties[name].returncode == 0, err
        said = json.loads(out.splitlines()[-1])
        check_outcomes(said["files"]["outcomes"])
        check_outcomes(said["delta"]["outcomes"][:4])
        assert said["delta"]["outcomes"][4].startswith("PeerError: ")
        assert "source 0 is dead" in said["delta"]["outcomes"][4]
        if name == "source 1":
            check_bases(said["delta"]["bases"])
        else:
            assert (said["files"]["version"], said["delta"]["version"]) == (4, 4)


def check_outcomes(outcomes):
    first, second, third, fourth = outcomes
    assert (first, second, fourth) == ("committed", "committed", "committed")
    assert "no room for it" in third


def check_bases(bases):
    """Version 3 was aborted: what it was is the base of version 4 if both sinks took it, else version 2 is."""
    versions = [base and base.split(" (refit")[0] for base in bases]
    assert versions[:3] == [None, "version 1", "version 2"]
    assert versions[3] in ("version 2", "version 3")
