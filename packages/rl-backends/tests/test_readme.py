"""The README's program, as it is written, on one process and under torchrun on two."""

import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
PROGRAM, SHOWN = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, re.DOTALL).groups()


def printed(command, folder):
    (folder / "train.py").write_text(PROGRAM, encoding="utf-8")
    completed = subprocess.run(
        [sys.executable, *command, "train.py"], cwd=folder, capture_output=True, text=True, timeout=150, check=False
    )
    assert completed.returncode == 0, completed.stderr
    return sorted(completed.stdout.splitlines())


def test_the_program_prints_what_is_shown_and_two_ranks_print_it_twice(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    assert printed([], tmp_path / "one") == sorted(SHOWN.splitlines())
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert printed(ranks, tmp_path / "two") == sorted(SHOWN.splitlines() * 2)
