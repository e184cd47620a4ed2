"""The README's program, as it is written, on one process and under torchrun on two."""

import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
PROGRAM, SHOWN = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, re.DOTALL).groups()


def printed(command, folder):
    """How often each line that the README shows is in what the program prints."""
    folder.mkdir()
    (folder / "train.py").write_text(PROGRAM, encoding="utf-8")
    completed = subprocess.run(
        [sys.executable, *command, "train.py"], cwd=folder, capture_output=True, text=True, timeout=600, check=False
    )
    assert completed.returncode == 0, completed.stderr
    return [completed.stdout.count(line) for line in SHOWN.splitlines()]


def test_the_program_prints_what_is_shown_and_two_ranks_print_it_twice(tmp_path):
    assert printed([], tmp_path / "one") == [1, 1, 1, 1]
    assert (
        printed(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], tmp_path / "two") == [2] * 4
    )
