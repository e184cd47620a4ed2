"""What was predicted of a run stands in the report beside what was measured, whoever trains."""

import json
import sys
from pathlib import Path

import pytest

from rl_observe import Prediction, RunDirectory, RunLog, write_prediction, write_report
from rl_observe.config import LoggerConfig
from rl_observe.report.record import read_record
from rl_observe.report.sections import predicted

sys.path.insert(0, str(Path(__file__).parent))
from test_report import Elements

GIB = 2**30


def logged_run(path, prediction):
    with RunLog(path, LoggerConfig(tensorboard_enabled=False)) as log:
        write_prediction(log.run, prediction)
        log.step("training", 0, {"held_out_loss": 2.0, "mfu": 0.9})
        for step, (mfu, peak) in enumerate([(0.1, 3 * GIB), (0.3, 5 * GIB), (0.2, 4 * GIB)], start=1):
            log.step("training", step, {"mfu": mfu, "memory_trainer_peak_bytes": peak})
        log.step("other", 1, {"mfu": 0.7})
    return log.run


def test_a_loop_of_ones_own_predicts_any_metric_that_it_logs(tmp_path):
    run = logged_run(
        tmp_path / "run",
        Prediction(
            figures={"mfu": 0.4, "memory_trainer_peak_bytes": 4 * GIB, "own_figure": 3.0},
            unknown={"phase_s/refit": "there is no engine"},
            stage="training",
            device="2 x NVIDIA H200",
            assumed=["rows of 256 tokens"],
        ),
    )
    mfu, peak, own = predicted(read_record(run))["rows"]
    assert (mfu["name"], mfu["measured"], mfu["ratio"]) == ("MFU", 0.2, 0.5), "a median of the stage, without step 0"
    assert (peak["measured"], peak["ratio"]) == (5 * GIB, 1.25), "of a peak the most"
    assert (own["name"], own["measured"], own["ratio"]) == ("own_figure", None, None)
    words = Elements(run.report.read_text()).text
    for expected in (
        "Predicted and measured",
        "of a step of training, on 2 x NVIDIA H200",
        "40.0 %",
        "20.0 %",
        "0.50",
        "1.25",
        "the run does not log it",
        "phase, refit (there is no engine)",
        "Assumed: rows of 256 tokens.",
    ):
        assert expected in words, expected


def test_without_a_prediction_the_report_says_nothing_of_it(tmp_path):
    run = logged_run(tmp_path / "run", Prediction(figures={"mfu": 0.4}))
    run.prediction.unlink()
    words = Elements(write_report(run).read_text()).text
    assert "Predicted and measured" not in words
    assert "What this report lacks" not in words


def test_a_prediction_that_failed_is_named(tmp_path):
    run = logged_run(tmp_path / "run", Prediction(unknown={"prediction": "the model cannot be built"}))
    assert "Not predicted: prediction (the model cannot be built)." in Elements(run.report.read_text()).text


@pytest.mark.parametrize(
    "text", ["[]", '{"figures": [1]}', '{"figures": {"mfu": "fast", "loss": null}, "unknown": {"x": 3}}', '{"fig']
)
def test_whatever_the_file_holds_the_report_is_written(tmp_path, text):
    run = logged_run(tmp_path / "run", Prediction())
    run.prediction.write_text(text)
    write_report(run)


def test_a_figure_that_is_no_number_is_refused_and_the_earlier_file_stays(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    write_prediction(run, Prediction(figures={"mfu": 0.4}))
    with pytest.raises(ValueError, match="Out of range float"):
        write_prediction(run, Prediction(figures={"mfu": float("nan")}))
    assert json.loads(run.prediction.read_text())["figures"] == {"mfu": 0.4}
