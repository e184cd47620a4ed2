"""What the README says holds: its first program, its table of conditions, its table of files."""

import json
import re
import subprocess
import sys
from pathlib import Path

from rl_observe import RunDirectory, read_metrics
from rl_observe.diagnose import diagnose
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


def test_the_program_of_recorded_steps_leaves_a_run_whose_fault_is_named(tmp_path, monkeypatch, capsys):
    programs = re.findall(r"^```python\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
    (program,) = (each for each in programs if "StepRollouts(" in each)
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip() in {"0.0", "1.0"}
    run = RunDirectory.open(tmp_path / "runs" / "grpo")
    assert [*run.steps] == [1, 2, 3]
    first = diagnose(run).findings[0]
    said = README.partition("`diagnose` says here:")[2].partition("```text\n")[2].partition("\n```")[0]
    assert " ".join(str(first).split()) == " ".join(said.removeprefix("1. ").split())


def test_the_table_of_conditions_is_that_of_the_code():
    assert conditions_table() in README


def test_the_table_of_files_names_every_file_of_a_run():
    table = README.partition("## What it writes")[2].partition("\n## ")[0]
    listed = {name.rstrip("/") for name in re.findall(r"`([\w.]+/?)`", table)}
    run = RunDirectory(Path("/run"))
    names = "recipe versions metrics samples spans events refits summary report trace tensorboard profile trackers"
    names += " recorded_steps"
    assert {getattr(run, name).name for name in names.split()} <= listed
