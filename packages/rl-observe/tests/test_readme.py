"""What the README says holds: its first program, its table of conditions, its table of files."""

import json
import re
import subprocess
import sys
from pathlib import Path

from rl_observe import RunDirectory, read_metrics
from rl_observe.health import conditions_table

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_first_program_runs_as_it_stands_and_leaves_a_report(tmp_path):
    program = re.search(r"^```python\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)[1]
    answer = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=240
    )
    run = RunDirectory.open(tmp_path / "runs" / "sine")
    assert answer.stdout.strip() == str(run.report)
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == [*range(201)]
    assert rows[-1]["held_out_loss"] < rows[0]["held_out_loss"]
    summary = json.loads(run.summary.read_text())
    assert (summary["steps"], summary["held_out_loss_after"]) == (200, rows[-1]["held_out_loss"])
    assert summary["held_out_loss_before"] == rows[0]["held_out_loss"]
    assert "Training lowered the held-out loss from" in run.report.read_text()
    assert "What this report lacks" not in run.report.read_text()


def test_the_table_of_conditions_is_that_of_the_code():
    assert conditions_table() in README


def test_the_table_of_files_names_every_file_of_a_run():
    table = README.partition("## What it writes")[2].partition("\n## ")[0]
    listed = {name.rstrip("/") for name in re.findall(r"`([\w.]+/?)`", table)}
    run = RunDirectory(Path("/run"))
    names = "recipe versions metrics samples spans events refits summary report trace tensorboard profile trackers"
    assert {getattr(run, name).name for name in names.split()} <= listed
