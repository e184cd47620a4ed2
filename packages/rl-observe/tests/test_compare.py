"""Two runs that are equal are told so; of two that are not, the first place and the figures that differ are named."""

import dataclasses
import math

import numpy as np
import pytest

from rl_observe import LoggerConfig, RunDirectory, RunLog, StepRollouts
from rl_observe.compare import compare_records, compare_steps
from rl_observe.recorded_steps import RecordedStep

QUIET = LoggerConfig(tensorboard_enabled=False)


def rollouts(**changes):
    rng = np.random.default_rng(3)
    response = np.broadcast_to(np.arange(8) >= 2, (4, 8))
    given = {
        "tokens": rng.integers(3, 50, (4, 8)),
        "lengths": np.full(4, 8),
        "response": response,
        "logp_old": np.where(response, -rng.random((4, 8)), 0.0),
        "rewards": np.arange(4.0),
        "groups": np.arange(4) // 2,
    }
    for name, (place, value) in changes.items():
        given[name] = given[name].copy()
        given[name][place] = value
    return StepRollouts(**given)


def test_equal_steps_have_no_difference():
    assert compare_steps(RecordedStep.of("grpo", 1, rollouts()), RecordedStep.of("grpo", 1, rollouts())) is None


@pytest.mark.parametrize(
    ("changes", "stage", "row", "token"),
    [
        ({"tokens": ((2, 5), 1), "logp_old": ((0, 3), -9.0)}, "tokens", 2, 5),
        ({"logp_old": ((1, 4), -9.0), "rewards": (3, 7.0)}, "logp_old", 1, 4),
        ({"logp_old": ((1, 4), math.nan)}, "logp_old", 1, 4),
        ({"rewards": (3, 7.0)}, "rewards", 3, None),
    ],
)
def test_the_first_column_row_and_token_are_named(changes, stage, row, token):
    found = compare_steps(RecordedStep.of("grpo", 1, rollouts()), RecordedStep.of("grpo", 1, rollouts(**changes)))
    assert (found.stage, found.row, found.token) == (stage, row, token)


def test_another_number_of_rollouts_is_named():
    one = RecordedStep.of("grpo", 1, rollouts())
    fewer = {
        name: np.asarray(getattr(rollouts(), name))[:3]
        for name in ("tokens", "lengths", "response", "rewards", "groups")
    }
    two = RecordedStep.of("grpo", 1, StepRollouts(**fewer))
    assert (compare_steps(one, two).stage, compare_steps(one, two).two) == ("rollouts", 3.0)


def log_run(path, *, change_at=None):
    with RunLog(path, QUIET) as log:
        for step in range(1, 5):
            changed = change_at is not None and step >= change_at
            given = rollouts(**({"rewards": (2, 9.0)} if changed else {}))
            log.recorded_steps.record("grpo", step, given)
            log.step("grpo", step, {"reward": 1.0 + changed * (0.5 + step / 100), "loss": 0.25})
    return RunDirectory.open(path)


def test_two_runs_that_part_are_compared_by_step_and_by_figure(tmp_path):
    one, same, other = log_run(tmp_path / "a"), log_run(tmp_path / "b"), log_run(tmp_path / "c", change_at=3)
    assert compare_records(one, same).equal
    found = compare_records(one, other)
    assert (found.first.step, found.first.stage, found.first.row) == (3, "rewards", 2)
    (figure,) = found.figures
    assert (figure.name, figure.since) == ("reward", 3)
    assert figure.mean == pytest.approx(0.535)
    assert figure.is_clear
    assert found.plain()["equal"] is False
    assert dataclasses.asdict(found.first)["two"] == 9.0


def test_the_earlier_of_two_stages_is_compared_first(tmp_path):
    runs = []
    for name, loss in (("a", 0.25), ("b", 0.5)):
        with RunLog(tmp_path / name, QUIET) as log:
            for stage in ("sft", "grpo"):
                changed = {} if name == "a" else {"logp_old": ((1, 4), -9.0)}
                log.recorded_steps.record(stage, 1, rollouts(**changed))
                log.step(stage, 1, {"loss": loss})
        runs.append(RunDirectory.open(tmp_path / name))
    found = compare_records(*runs)
    assert (found.first.run_stage, found.first.step, found.first.stage) == ("sft", 1, "logp_old")
    assert str(found.first).startswith("sft step 1, logp_old, row 1, token 4")
    assert [(each.run_stage, each.name) for each in found.figures] == [("sft", "loss"), ("grpo", "loss")]
    assert compare_records(*runs, stage="grpo").first.run_stage is None
