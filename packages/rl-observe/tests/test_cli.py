"""`rl-observe`: exit codes 0, 1 and 2, and one line of JSON at the end."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from rl_observe import LoggerConfig, RunLog
from rl_observe.cli import app
from rl_observe.health import CONDITIONS

QUIET = LoggerConfig(tensorboard_enabled=False)


def call(*arguments):
    answer = CliRunner().invoke(app, [str(each) for each in arguments])
    assert answer.exception is None or isinstance(answer.exception, SystemExit), answer.exception
    return answer.exit_code, answer.output.splitlines()


@pytest.fixture
def runs(tmp_path):
    for name, share in (("good", 0.5), ("stuck", 0.0)):
        with RunLog(tmp_path / name, QUIET, recipe={"lr": share}) as log:
            for _ in range(12):
                log.step("grpo", None, {"reward": 0.5, "groups_with_signal": share})
    return tmp_path / "good", tmp_path / "stuck"


def test_report_writes_the_page_again_and_json_holds_the_summary(runs):
    page = runs[0] / "report.html"
    page.unlink()
    code, lines = call("report", runs[0], "--json")
    assert (code, lines[0]) == (0, str(page))
    assert json.loads(lines[-1])["summary"]["steps"] == 12
    assert page.exists()


def test_compare_writes_one_page(runs, tmp_path):
    code, lines = call("compare", *runs, "--out", tmp_path / "both.html", "--json")
    assert code == 0
    assert json.loads(lines[-1]) == {"written": str(tmp_path / "both.html"), "runs": [str(run) for run in runs]}
    assert (tmp_path / "both.html").exists()


def test_check_ends_with_1_where_a_condition_is_found_and_0_where_none_is(runs):
    code, lines = call("check", runs[0], "--json")
    assert (code, json.loads(lines[-1])["holds"]) == (0, True)
    code, lines = call("check", runs[1], "--json")
    figures = json.loads(lines[-1])
    assert (code, figures["found"]) == (1, [{"stage": "grpo", "step": 10, "name": "no_signal"}])
    assert figures["recorded"] == figures["found"]


def test_trace_writes_the_spans(runs):
    code, lines = call("trace", runs[0])
    assert (code, lines) == (0, [str(runs[0] / "trace.json")])


def test_conditions_are_listed_with_their_causes():
    code, lines = call("conditions", "--json")
    assert code == 0
    assert list(json.loads(lines[-1])) == [each.name for each in CONDITIONS]


@pytest.mark.parametrize("command", ["report", "trace", "check"])
def test_what_is_no_run_is_refused_with_2(command, tmp_path):
    code, lines = call(command, tmp_path / "nowhere")
    assert code == 2
    assert lines[0].startswith("rl-observe: run_dir=")
    assert "does not exist" in lines[0]


def test_a_run_is_not_compared_with_itself(runs):
    code, lines = call("compare", runs[0], runs[0])
    assert code == 2
    assert "rl-observe: " in lines[0]


def test_a_command_that_does_not_exist_is_misuse():
    answer = subprocess.run(
        [sys.executable, "-m", "rl_observe", "raport"], capture_output=True, text=True, check=False, timeout=240
    )
    assert answer.returncode == 2
