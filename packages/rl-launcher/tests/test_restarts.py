"""Claims about restarts that go wrong: what came first is told first, and what there is stays and is described."""

import itertools
import json
import signal
import sys
import time
from dataclasses import replace

import pytest

from rl_algorithms.environments import RewardFunctionEnvironment
from rl_launcher.build.build import build
from rl_launcher.checkpoints.save import CheckpointManager
from rl_launcher.errors import RestartableError, RunStoppedError
from rl_launcher.ray.engine_pool import EngineDiedError
from rl_launcher.recipe_files import load_recipe
from rl_launcher.run import resume, run
from rl_launcher.run.record import Recorder
from rl_launcher.schema import ClusterConfig, Recipe
from rl_observe import RunDirectory, read_events


@pytest.fixture
def start(recipe, monkeypatch):
    """Carries out a run that may restart once: its parts are of this process, and `before` hears of every build."""

    def carry_out(*overrides, before=lambda _: None):
        numbers = itertools.count(1)

        def here(asked, **named):
            before(next(numbers))
            return build(replace(asked, cluster=ClusterConfig()), **named)

        monkeypatch.setattr(sys.modules["rl_launcher.run.run"], "build", here)
        asked = ["sft=null", "cluster={runtime: ray, max_restarts: 1}", *overrides]
        return run(load_recipe(recipe, schema=Recipe, overrides=asked))

    return carry_out


@pytest.fixture
def dies_at(monkeypatch):
    """Loses a rank before a given record of a step, once, or another process right after it."""

    def die(number, *, first=lambda: None, of=RestartableError):
        numbers, record = itertools.count(1), Recorder.step

        def step(recorder, *arguments, **named):
            now = next(numbers) == number
            if now and of.weights_lost:
                first()
                raise of("rank 1 died")
            record(recorder, *arguments, **named)
            if now:
                raise of("engine 0 died")

        monkeypatch.setattr(Recorder, "step", step)

    return die


def summary_of(tmp_path):
    return json.loads((tmp_path / "run" / "summary.json").read_text())


@pytest.mark.parametrize("error", [ValueError("no node is left"), KeyboardInterrupt()])
def test_a_run_that_could_not_start_again_is_there_to_be_resumed(start, dies_at, tmp_path, error):
    def before(number):
        if number == 2:
            raise error

    dies_at(1)
    message = r"stopped: rank 1 died; (?s:.*)\nContinue with: rl-launcher resume "
    with pytest.raises(RunStoppedError, match=message) as stopped:
        start(before=before)
    interrupted = isinstance(error, KeyboardInterrupt)
    assert stopped.value.exit_code == (130 if interrupted else 1)
    assert interrupted or "it could not restart: no node is left" in str(stopped.value)
    summary = summary_of(tmp_path)
    assert summary["ended_by"] == ("interrupted" if interrupted else "failed")
    assert summary["conditions"] == {"trainer_died": 1, summary["ended_by"]: 1}
    assert (tmp_path / "run" / "report.html").is_file()
    assert resume(tmp_path / "run")["steps"] == 8


def test_a_signal_during_the_save_before_a_restart_ends_the_run_after_it(start, dies_at, tmp_path, monkeypatch, newest):
    save, builds = CheckpointManager.save, []

    def signalled(keeper):
        signal.raise_signal(signal.SIGTERM)
        return save(keeper)

    monkeypatch.setattr(CheckpointManager, "save", signalled)
    dies_at(2, of=EngineDiedError)
    with pytest.raises(RunStoppedError, match="engine 0 died; interrupted before it had restarted") as stopped:
        start(before=builds.append)
    assert builds == [1]
    assert stopped.value.exit_code == 130
    assert json.loads((newest(tmp_path / "run") / "progress.json").read_text())["step"] == 4
    assert summary_of(tmp_path)["conditions"] == {"engine_died": 1, "interrupted": 1}
    monkeypatch.setattr(CheckpointManager, "save", save)
    assert resume(tmp_path / "run")["steps"] == 8


def test_a_signal_while_the_lost_processes_are_ended_starts_none_anew(start, dies_at, tmp_path, monkeypatch):
    builds = []

    def signalled(_close):
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(RewardFunctionEnvironment, "close", signalled, raising=False)
    dies_at(3)
    with pytest.raises(RunStoppedError, match="rank 1 died; interrupted before it had restarted") as stopped:
        start("checkpointing.save_period=2", before=builds.append)
    assert builds == [1]
    assert stopped.value.exit_code == 130


def test_a_restart_goes_on_with_the_code_that_was_loaded_and_tells_of_no_change(start, dies_at, tmp_path):
    reward = tmp_path / "reward.py"
    dies_at(3, first=lambda: reward.write_text("another"))
    start("checkpointing.save_period=2")
    (told,) = [event for event in read_events(RunDirectory.open(tmp_path / "run")) if event["name"] == "restarted"]
    assert "reward.py" not in told["message"]


def test_what_hinders_a_restart_does_not_hide_what_happened_first(start, dies_at, tmp_path):
    def damage():
        for file in (tmp_path / "run" / "checkpoints").glob("step_*/progress.json"):
            file.write_text("{}")

    dies_at(3, first=damage)
    with pytest.raises(
        RunStoppedError, match=r"(?s)stopped: rank 1 died.*\nIt could not restart by itself: .*: truncated"
    ):
        start("checkpointing.save_period=2")
    summary = summary_of(tmp_path)
    assert summary["ended_by"] == "trainer_died"
    assert summary["conditions"] == {"trainer_died": 1}
    assert (tmp_path / "run" / "report.html").is_file()


def test_a_run_does_not_start_again_on_other_data(start, dies_at, tmp_path):
    def before(number):
        rows = tmp_path / "rows.jsonl"
        if number == 2:
            rows.write_text(rows.read_text().replace('"answer": "3"', '"answer": "4"'))

    dies_at(3)
    with pytest.raises(RunStoppedError, match="it could not restart: the data have changed"):
        start("checkpointing.save_period=2", before=before)


def test_seconds_are_counted_once_over_restarts(start, dies_at, monkeypatch):
    clock = itertools.count(0.0, 0.5)
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    counted, count_time = [], CheckpointManager.count_time

    def count(keeper):
        counted.append((count_time(keeper), next(clock)))
        return counted[-1][0]

    monkeypatch.setattr(CheckpointManager, "count_time", count)
    dies_at(3)
    summary = start("checkpointing.save_period=2")
    assert summary["restarts"] == 1
    # The clock moves only when it is read: what is counted can be no more than what it says.
    assert all(seconds <= now for seconds, now in counted)
    assert sorted(counted) == counted
