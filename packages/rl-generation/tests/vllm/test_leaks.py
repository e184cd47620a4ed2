"""What vLLM leaves behind when it is stopped, in programs of their own; `benchmarks/start_stop.py` does it oftener."""

import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("vllm") is None:
    pytest.skip("needs vLLM", allow_module_level=True)

from watching import living

PROGRAMS = Path(__file__).parents[1] / "programs"
CACHE_BYTES = 64 << 20
"""Of each engine: less than one of them may stay."""


CYCLES = 2


@pytest.mark.slow
def test_a_stopped_engine_leaves_nothing_behind(checkpoints, monkeypatch):
    monkeypatch.syspath_prepend(PROGRAMS)
    import leaks

    # Of a short name: a socket's path, which has room for 107 characters, is longer below that of tmp_path.
    with tempfile.TemporaryDirectory() as folder:
        found = leaks.run(
            "vllm",
            CYCLES,
            model=checkpoints("llama", tokenizer=False),
            temporary=Path(folder),
            environment={"PYTHONPATH": ":".join(sys.path)},
        )
    assert len(found["after"]) == CYCLES
    assert leaks.leaks(found, growth_bytes=CACHE_BYTES) == []


def test_a_program_ends_with_an_engine_open_and_a_request_under_way(checkpoints):
    program = Path(__file__).parent / "programs" / "unclosed.py"
    command = [sys.executable, str(program), checkpoints("llama")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=540)
    assert ended.returncode == 0, ended.stderr[-4000:]
    processes = [int(each) for each in ended.stdout.splitlines()[-1].split()]
    assert processes
    assert not living(processes)
