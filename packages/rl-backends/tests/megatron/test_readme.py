"""The README's program with the README's line for Megatron prints what it shows, on one process and on two."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
PROGRAM, SHOWN = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, re.DOTALL).groups()
MEGATRON = re.search(r"### Megatron\n.*?```python\n(.*?)```", README, re.DOTALL)[1]
TWO_RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.parametrize(
    ("command", "layout"),
    [
        pytest.param([], "", marks=pytest.mark.slow),
        (TWO_RANKS, ", tensor_model_parallel_size=2, sequence_parallel=True"),
    ],
)
def test_the_program_prints_on_megatron_what_it_prints_on_dtensor(tmp_path, command, layout):
    line = next(each for each in PROGRAM.splitlines() if each.startswith("backend = DTensorBackend"))
    program = PROGRAM.replace(line, MEGATRON.replace("sequence_packing=True", f"sequence_packing=True{layout}"))
    (tmp_path / "train.py").write_text(program, encoding="utf-8")
    completed = subprocess.run(
        [sys.executable, *command, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    assert completed.returncode == 0, completed.stderr
    assert [completed.stdout.count(each) for each in SHOWN.splitlines()] == [2 if command else 1] * 4
