"""`rl-observe`: exit codes 0, 1 and 2, and one line of JSON at the end."""

import json
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from rl_observe import LoggerConfig, RunDirectory, RunLog, StepRollouts
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
    found = json.loads(lines[-1])
    assert (found["written"], found["runs"]) == (str(tmp_path / "both.html"), [str(run) for run in runs])
    assert (found["recorded_steps"], [each["name"] for each in found["figures"]]) == ([], ["groups_with_signal"])
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


@pytest.fixture
def recorded(tmp_path):
    """Two steps; in the second the engine's log-probabilities are those of another temperature."""
    rng = np.random.default_rng(0)
    with RunLog(tmp_path / "recorded", QUIET) as log:
        log.recorded_steps.decode = lambda ids: f"\x1b[31m<{ids[0]}>"  # a terminal must not act on it
        for step in (1, 2):
            tokens = rng.integers(3, 50, (8, 16))
            tokens[:, :4] = np.repeat(rng.integers(3, 50, (2, 4)), 4, axis=0)
            response = np.broadcast_to(np.arange(16) >= 4, tokens.shape)
            logp = np.where(response, np.log(rng.random(tokens.shape)), 0.0)
            rollouts = StepRollouts(
                tokens=tokens,
                lengths=np.full(8, 16),
                response=response,
                logp_old=logp * (0.7 if step == 2 else 1.0),
                logp=logp,
                rewards=np.arange(8) / 8,
                groups=np.arange(8) // 4,
                responses=[f"response {row}" for row in range(8)],
                prompts=[f"[red]prompt[/] {row // 4}" for row in range(8)],
            )
            log.recorded_steps.record("grpo", step, rollouts)
            log.step("grpo", step, reward=0.5)
    return tmp_path / "recorded"


def test_show_lists_steps_then_rollouts_then_tokens(recorded):
    code, lines = call("show", recorded, "--json")
    assert (code, json.loads(lines[-1])) == (0, {"stage": "grpo", "steps": [1, 2]})
    code, lines = call("show", recorded, "--step", 2, "--worst", "reward", "--limit", 3, "--json")
    found = json.loads(lines[-1])
    assert code == 0
    assert [row["row"] for row in found["rollouts"]] == [0, 1, 2]
    code, lines = call("show", recorded, "--step", 2, "--best", "reward", "--json")
    assert json.loads(lines[-1])["rollouts"][0]["row"] == 7
    code, lines = call("show", recorded, "--step", 2, "--row", 5, "--json")
    assert len(json.loads(lines[-1])["tokens"]) == 16
    shown = "\n".join(lines[:-1])
    assert "[red]prompt[/] 1" in shown  # texts are no markup
    assert "\x1b[31m" not in shown
    assert "\ufffd[31m<" in shown


def test_diagnose_names_the_fault_and_ends_with_1(recorded):
    code, lines = call("diagnose", recorded, "--json")
    found = json.loads(lines[-1])
    assert (code, found["holds"]) == (1, False)
    assert (found["findings"][0]["cause"], found["findings"][0]["step"]) == ("temperature", 2)
    (recorded / "steps" / "grpo-00000002.zip").unlink()
    code, lines = call("diagnose", recorded)
    assert (code, lines[0]) == (0, "nothing found")


def test_what_a_recorded_step_shows_becomes_an_event_once(recorded):
    events = [json.loads(line) for line in (recorded / "events.jsonl").read_text().splitlines()]
    assert [event["name"] for event in events] == ["temperature"]
    assert "step 2 of grpo" in events[0]["message"]


def test_two_runs_are_compared_by_their_recorded_steps_too(recorded, tmp_path):
    with RunLog(tmp_path / "other", QUIET) as log:
        rollouts = RunDirectory(recorded).steps[1]
        given = {name: rollouts.padded(name) for name in ("logp_old", "logp")}
        given["logp_old"][3, 7] = -9.0
        log.recorded_steps.record(
            "grpo",
            1,
            StepRollouts(
                tokens=rollouts.padded("tokens"),
                lengths=rollouts.columns["lengths"],
                response=rollouts.response,
                rewards=rollouts.columns["rewards"],
                groups=rollouts.columns["groups"],
                **given,
            ),
        )
        log.step("grpo", 1, reward=0.5)
    code, lines = call("compare", recorded, tmp_path / "other", "--out", tmp_path / "page.html", "--json")
    found = json.loads(lines[-1])
    assert code == 0
    first = found["first_difference"]
    assert (first["step"], first["stage"], first["row"], first["token"]) == (1, "logp_old", 3, 7)
    assert lines[0].startswith("first difference: step 1, logp_old, row 3, token 7")


def test_replay_says_what_it_needs(recorded, monkeypatch):
    # Whether a trainer is installed beside rl-observe depends on the environment that tests it.
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())
    code, lines = call("replay", recorded, 1, "--json")
    stages = {each["stage"]: each["outcome"] for each in json.loads(lines[-1])["stages"]}
    assert code == 0
    assert {*stages.values()} == {"not replayed"}
    code, lines = call("replay", recorded, 9)
    assert code == 2
    assert "step 9 of grpo is not recorded" in lines[-1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--worst", "reward"], "give --step too"),
        (["--step", "1", "--worst", "reward", "--best", "loss"], "two orders"),
        (["--step", "1", "--worst", "beauty"], "choose reward, advantage"),
        (["--step", "1", "--row", "99"], "rows 0 to 7"),
        (["--step", "7"], "recorded are 1, 2"),
        (["--stage", "sft"], "no recorded steps of the stage sft"),
    ],
)
def test_what_cannot_be_shown_is_refused_with_2(recorded, arguments, said):
    code, lines = call("show", recorded, *arguments)
    assert code == 2
    assert said in " ".join(lines)
