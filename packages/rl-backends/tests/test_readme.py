"""The README's programs, as they are written: the first on one process and under torchrun on two."""

import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
TRAIN, LIVE = re.findall(r"```python\n((?:(?!```).)*)```\n\n```text\n(.*?)```", README, re.DOTALL)


def printed(program, command, folder):
    """What the program prints, in a folder of its own."""
    folder.mkdir()
    (folder / "program.py").write_text(program, encoding="utf-8")
    completed = subprocess.run(
        [sys.executable, *command, "program.py"], cwd=folder, capture_output=True, text=True, timeout=600, check=False
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def test_the_first_program_prints_what_is_shown_and_two_ranks_print_it_twice(tmp_path):
    program, shown = TRAIN
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for times, command, folder in ((1, [], tmp_path / "one"), (2, launch, tmp_path / "two")):
        found = printed(program, command, folder)
        assert [found.count(line) for line in shown.splitlines()] == [times] * 4


def test_the_program_of_dtypes_checkpoints_and_lifetimes_prints_what_is_shown(tmp_path):
    program, shown = LIVE
    assert printed(program, [], tmp_path / "live") == shown
