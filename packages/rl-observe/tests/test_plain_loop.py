"""`RunLog` around a loop that knows nothing of this project: what is written, also when the loop fails."""

import json
import math
import subprocess
import sys

import pytest

from rl_observe import (
    HealthConfig,
    HealthError,
    LoggerConfig,
    RunDirectory,
    RunDirectoryError,
    RunLog,
    read_events,
    read_metrics,
    read_spans,
)

QUIET = LoggerConfig(tensorboard_enabled=False)


def test_steps_are_numbered_and_the_end_writes_summary_and_report(tmp_path):
    with RunLog(tmp_path / "runs" / "mine", QUIET, recipe={"lr": 0.1, "api_key": "hunter22"}) as log:
        for loss in (2.0, 1.0):
            log.step(loss=loss)
        log.step("evaluate", 1, {"held_out/math": 0.5})
        log.summary["accuracy"] = 0.75
    run = RunDirectory.open(tmp_path / "runs" / "mine")
    rows = [(row["stage"], row["step"], row.get("loss"), row.get("held_out/math")) for row in read_metrics(run)]
    assert rows == [("training", 1, 2.0, None), ("training", 2, 1.0, None), ("evaluate", 1, None, 0.5)]
    summary = json.loads(run.summary.read_text())
    assert (summary["steps"], summary["interrupted"], summary["ended_by"]) == (3, False, None)
    assert (summary["accuracy"], summary["conditions"]) == (0.75, {})
    assert "<html" in run.report.read_text()
    assert json.loads(run.recipe.read_text()) == {"lr": 0.1, "api_key": "<redacted>"}
    assert json.loads(run.versions.read_text())["python"]


def test_phases_are_timed_within_their_step_and_the_rest_is_other(tmp_path):
    with RunLog(tmp_path / "run", QUIET) as log:
        for _ in range(2):
            with log.phase("generate"):
                pass
            with log.phase("train"):
                pass
            with log.phase("train"):
                pass
            logged = log.step(loss=1.0)
    assert {"phase_s/generate", "phase_s/train", "phase_s/other"} <= logged.keys()
    spans = [(span["name"], span["step"], span["laid"]) for span in read_spans(log.run)]
    names = ["generate", "train", "train", "step"]
    assert spans == [(name, step, False) for step in (1, 2) for name in names]
    first, second = [span for span in read_spans(log.run) if span["name"] == "step"]
    assert first["end_s"] <= second["start_s"] + 1e-6
    shares = json.loads(log.run.summary.read_text())["phase_share"]
    assert shares.keys() == {"generate", "train", "other"}
    assert math.isclose(sum(shares.values()), 1.0, abs_tol=1e-3)


def test_a_tensor_of_one_element_is_logged_as_a_number(tmp_path):
    import torch

    with RunLog(tmp_path / "run", QUIET) as log:
        assert log.step(loss=torch.tensor(0.5))["loss"] == 0.5
    assert [row["loss"] for row in read_metrics(log.run)] == [0.5]


def test_an_evaluation_at_step_0_is_the_figure_of_before(tmp_path):
    with RunLog(tmp_path / "run", QUIET) as log:
        log.step("training", 0, {"held_out_greedy": 0.25})
        log.step(loss=1.0)
        log.step(loss=0.5, held_out_greedy=0.75)
    summary = json.loads(log.run.summary.read_text())
    assert (summary["held_out_greedy_before"], summary["held_out_greedy_after"]) == (0.25, 0.75)


def loop_that_raises(log, error):
    with log:
        log.step(loss=1.0)
        raise error


@pytest.mark.parametrize(("error", "name"), [(ZeroDivisionError, "failed"), (KeyboardInterrupt, "interrupted")])
def test_a_loop_that_raises_leaves_summary_and_report_and_its_error(tmp_path, error, name):
    log = RunLog(tmp_path / "run", QUIET)
    with pytest.raises(error):
        loop_that_raises(log, error)
    summary = json.loads(log.run.summary.read_text())
    assert (summary["interrupted"], summary["ended_by"], summary["steps"]) == (True, name, 1)
    assert log.run.report.exists()


def test_a_condition_is_reported_once_and_the_run_continues(tmp_path, capsys):
    with RunLog(tmp_path / "run", QUIET, health=HealthConfig(no_signal_batches=2)) as log:
        for _ in range(4):
            log.step("grpo", None, {"groups_with_signal": 0.0})
    (event,) = read_events(log.run)
    assert (event["name"], event["stage"], event["step"]) == ("no_signal", "grpo", 2)
    assert capsys.readouterr().err.startswith("rl-observe: no_signal at step 2: in 2 consecutive batches")
    assert json.loads(log.run.summary.read_text())["conditions"] == {"no_signal": 1}


def loop_without_signal(log):
    with log:
        while True:
            log.step("grpo", None, {"groups_with_signal": 0.0})


def test_a_condition_that_stops_ends_the_loop_by_name(tmp_path):
    log = RunLog(tmp_path / "run", QUIET, health=HealthConfig(no_signal_batches=2, on_no_signal="stop"))
    with pytest.raises(HealthError, match="no_signal: in 2 consecutive batches"):
        loop_without_signal(log)
    assert len(read_metrics(log.run)) == 2
    assert json.loads(log.run.summary.read_text())["ended_by"] == "no_signal"


def test_a_directory_that_holds_a_run_is_refused_and_an_open_one_is_continued(tmp_path):
    with RunLog(tmp_path / "run", QUIET, recipe={"lr": 1}) as log:
        log.step(loss=1.0)
    with pytest.raises(RunDirectoryError, match="exists and is not empty"):
        RunLog(tmp_path / "run", QUIET)
    with RunLog(RunDirectory.open(tmp_path / "run"), QUIET, recipe={"lr": 2}) as log:
        log.step(loss=0.5)
    first, second = read_metrics(log.run)
    assert (first["step"], second["step"]) == (1, 2)
    assert first["time_s"] <= second["time_s"]
    assert json.loads(log.run.recipe.read_text()) == {"lr": 1}


def test_a_report_that_cannot_be_written_does_not_hide_the_error_of_the_loop(tmp_path):
    log = RunLog(tmp_path / "run", QUIET)
    log.run.summary.mkdir()
    with pytest.raises(ZeroDivisionError) as raised:
        loop_that_raises(log, ZeroDivisionError())
    assert "summary.json cannot be written" in raised.value.__notes__[0]
    assert log.run.report.exists()


def test_importing_it_loads_neither_torch_nor_a_sibling():
    program = (
        "import sys, rl_observe, rl_observe.cli\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "assert not {'torch', 'pydantic', 'ray', 'tensorboard'} & loaded, loaded\n"
        "assert not {name for name in loaded if name.startswith('rl_')} - {'rl_observe'}, loaded\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=240)
