"""Whole refits through files, four real processes: commits, an abort, a source that is killed."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "files_refit.py"


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("kind", ["files", "delta"])
def test_four_processes_commit_abort_commit_and_survive_a_dead_source(tmp_path, kind):
    with contextlib.ExitStack() as stack:
        parties = {}
        for side, rank in [("source", 0), ("source", 1), ("sink", 0), ("sink", 1)]:
            parties[f"{side} {rank}"] = stack.enter_context(start(side, rank, kind, tmp_path))
        try:
            printed = {name: process.communicate(timeout=120) for name, process in parties.items()}
        finally:
            for process in parties.values():
                process.kill()
    assert parties["source 0"].returncode == -9
    said = {}
    for name in ("source 1", "sink 0", "sink 1"):
        out, err = printed[name]
        assert parties[name].returncode == 0, err
        said[name] = json.loads(out.splitlines()[-1])
        outcomes = said[name]["outcomes"]
        assert [outcomes[i] for i in (0, 1, 3)] == ["committed"] * 3
        assert "no room for it" in outcomes[2]
        assert outcomes[4].startswith("PeerError: ")
        assert "source 0 is dead" in outcomes[4]
    assert said["sink 0"]["version"] == said["sink 1"]["version"] == 4
    if kind == "delta":
        first, *others = said["source 1"]["bases"]
        assert first is None
        assert others[0] == "version 1 (refit 1)"
        assert others[2] in ("version 2 (refit 2)", "version 3 (refit 3)")
