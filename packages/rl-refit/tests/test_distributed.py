"""DTensor parameters in real processes over gloo; the programs assert, these tests run them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"


def assert_ok(program, *, rendezvous, world_size):
    """Run `program` as every rank, and require that each prints `ok`."""
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(start(program, rendezvous, rank)) for rank in range(world_size)]
        try:
            results = [(*process.communicate(timeout=300), process.returncode) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    for out, err, code in results:
        assert code == 0, err
        assert out.endswith("ok\n")  # gloo may print before it


def start(program, *arguments):
    return subprocess.Popen(
        [sys.executable, str(PROGRAMS / program), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_fsdp_on_one_rank_is_refitted_from_its_shards(tmp_path):
    assert_ok("fsdp_on_one_rank.py", rendezvous=tmp_path / "rendezvous", world_size=1)


def test_a_policy_over_two_ranks_yields_its_shards_and_is_refused_in_process(tmp_path):
    assert_ok("two_ranks.py", rendezvous=tmp_path / "rendezvous", world_size=2)
