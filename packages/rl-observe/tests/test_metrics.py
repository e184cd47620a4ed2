"""The log of a run: valid JSON whatever is measured, nothing lost by a kill, the same scalars for TensorBoard."""

import json
import math
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl_observe import LoggerConfig, MetricError, MetricsLog, RunDirectory, RunDirectoryError, RunLog, read_metrics
from rl_observe.log_files import JsonLinesWriter, read_json_lines


def strict(line):
    """Read JSON as the standard has it: NaN and Infinity are no numbers there."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(line, parse_constant=refuse)


def test_a_step_is_one_flat_line_with_stage_step_and_time(tmp_path):
    run = RunDirectory.create(tmp_path)
    with MetricsLog(run) as log:
        log.write("sft", 1, {"loss": 2.5, "phase_s/train": 0.07})
        log.write("grpo", 1, {"reward": 0.25, "version": 1})
    first, second = (strict(line) for line in run.metrics.read_text().splitlines())
    assert list(first) == ["stage", "step", "time_s", "loss", "phase_s/train"]
    assert (first["stage"], first["step"], first["loss"]) == ("sft", 1, 2.5)
    assert 0 <= first["time_s"] <= second["time_s"]
    assert second["version"] == 1
    assert isinstance(second["version"], int)
    assert read_metrics(run) == [first, second]


def test_a_value_that_is_not_finite_is_null_in_the_log_and_absent_from_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = RunDirectory.create(tmp_path)
    with MetricsLog(run) as log:
        log.write("grpo", 1, {"reward": 0.25, "loss": math.nan, "grad_norm": math.inf})
        log.write("grpo", 2, {"reward": 0.5, "loss": -0.125, "grad_norm": -math.inf})
    rows = [strict(line) for line in run.metrics.read_text().splitlines()]
    assert [row["loss"] for row in rows] == [None, -0.125]
    assert [row["grad_norm"] for row in rows] == [None, None]
    events = EventAccumulator(str(run.tensorboard)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("grpo/reward")] == [(1, 0.25), (2, 0.5)]
    assert [(event.step, event.value) for event in events.Scalars("grpo/loss")] == [(2, -0.125)]
    assert "grpo/grad_norm" not in events.Tags()["scalars"]


def test_a_metric_with_a_name_of_the_log_itself_is_refused_with_stage_and_step(tmp_path):
    message = "stage 'grpo' at step 7 are named step, time_s"
    with MetricsLog(RunDirectory.create(tmp_path)) as log, pytest.raises(MetricError, match=message):
        log.write("grpo", 7, {"step": 1.0, "time_s": 2.0})
    assert read_metrics(RunDirectory(tmp_path)) == []


def test_a_killed_run_keeps_every_line_that_was_written(tmp_path):
    script = (
        "import os, signal, sys\n"
        "from rl_observe import MetricsLog, RunDirectory\n"
        "log = MetricsLog(RunDirectory.create(sys.argv[1]))\n"
        "for step in range(1, 8):\n"
        "    log.write('grpo', step, {'reward': step / 8})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    died = subprocess.run([sys.executable, "-c", script, str(tmp_path / "run")], check=False, timeout=240)
    assert died.returncode == -9
    assert [row["step"] for row in read_metrics(RunDirectory.open(tmp_path / "run"))] == [1, 2, 3, 4, 5, 6, 7]


def test_a_torn_last_line_costs_itself_alone_and_not_the_next(tmp_path):
    run = RunDirectory.create(tmp_path)
    run.metrics.write_text('{"stage": "sft", "step": 1, "loss": 2.0}\n{"stage": "sft", "st')
    rows, unreadable = read_json_lines(run.metrics)
    assert (len(rows), unreadable) == (1, 1)
    with JsonLinesWriter(run.metrics) as writer:
        writer.append({"stage": "sft", "step": 3})
    rows, unreadable = read_json_lines(run.metrics)
    assert [row["step"] for row in rows] == [1, 3]
    assert unreadable == 1


def test_lines_that_are_no_objects_and_bytes_that_are_no_text_are_counted(tmp_path):
    (tmp_path / "lines").write_bytes(b'[1]\n{"a": 1}\n\xff\xfe\n\n"text"\n')
    assert read_json_lines(tmp_path / "lines") == ([{"a": 1}], 3)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None)
@given(
    st.lists(
        st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.floats() | st.text(), max_size=4)
    )
)
def test_whatever_is_written_is_read_again_in_its_order(tmp_path, rows):
    path = tmp_path / "lines"
    path.unlink(missing_ok=True)
    with JsonLinesWriter(path) as writer:
        for row in rows:
            writer.append(row)
    expected = [
        {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()}
        for row in rows
    ]
    assert read_json_lines(path)[0] == expected


def test_samples_of_before_and_after_are_appended_to_one_file(tmp_path):
    run = RunDirectory.create(tmp_path)
    sample = {"when": "before", "stage": "grpo", "prompt": "21", "expected": None, "response": "1\n2", "reward": 1.0}
    with closing(RunLog(run, LoggerConfig(tensorboard_enabled=False))) as log:
        log.write_samples([{**sample, "truncated": False}])
        log.write_samples([{**sample, "when": "after", "reward": math.nan, "truncated": True}])
    before, after = (strict(line) for line in run.samples.read_text().splitlines())
    assert before == {**sample, "truncated": False}
    assert (after["when"], after["reward"], after["truncated"]) == ("after", None, True)


def test_reading_a_run_that_logged_nothing_yet_gives_nothing(tmp_path):
    assert read_metrics(RunDirectory.create(tmp_path)) == []


def test_a_log_that_cannot_be_opened_says_which_and_why(tmp_path):
    run = RunDirectory.create(tmp_path)
    run.metrics.mkdir()
    with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl cannot be opened for writing"):
        MetricsLog(run)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/dev/full is a Linux device")
def test_a_full_disk_is_said_in_words():
    message = "/dev/full cannot be written: no space is left on the device"
    with JsonLinesWriter(Path("/dev/full")) as writer, pytest.raises(RunDirectoryError, match=message):
        writer.append({"step": 1})
