"""The one door of a run's logs: all files, no secrets, and a refusal before anything is trained."""

import json
import math
import os
import shutil
import types
from contextlib import closing

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl_observe import (
    RunDirectory,
    RunLog,
    TrackerError,
    collect_versions,
    memory_metrics,
    read_metrics,
    redact,
    write_origins,
    write_report,
)
from rl_observe.config import LoggerConfig, MlflowConfig, ProfilerConfig

QUIET = LoggerConfig(tensorboard_enabled=False)


def test_a_step_is_logged_with_the_memory_in_use(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    with closing(RunLog(run, QUIET)) as log:
        logged = log.step("grpo", 1, {"reward": 0.5, "loss": math.nan})
    assert log.finish({}, status="finished") == {}
    (row,) = read_metrics(run)
    assert row["reward"] == logged["reward"] == 0.5
    assert row["memory_rss_bytes"] == logged["memory_rss_bytes"] > 1e6
    assert not run.tensorboard.exists()
    assert not run.trace.exists()
    assert not run.trackers.exists()


def test_trace_profile_and_tensorboard_are_written_where_they_are_asked_for(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    config = LoggerConfig(trace=True, profiler=ProfilerConfig(first_step=1, num_steps=1))
    with closing(RunLog(run, config)) as log:
        log.profiler.reached("grpo", 0)
        log.step("grpo", 1, {"reward": 0.5})
        log.spans.step("grpo", 1, start_s=0.0, end_s=1.0, phases={"phase_s/train": 1.0})
    log.finish({}, status="interrupted")
    assert len(list(run.profile.iterdir())) == 1
    assert run.tensorboard.is_dir()
    assert [event["name"] for event in json.loads(run.trace.read_text())["traceEvents"] if event["ph"] == "X"] == [
        "step", "train",
    ]  # fmt: skip


def test_the_memory_is_that_of_this_process():
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert 1e6 < memory_metrics()["memory_rss_bytes"] <= 1.1 * most


def test_a_tracker_that_cannot_be_started_is_refused_without_its_credentials(tmp_path, monkeypatch):
    class Client:
        def __init__(self, tracking_uri):
            raise ConnectionError(f"cannot reach {tracking_uri}")

    module = types.SimpleNamespace(MlflowClient=Client, entities=None)
    monkeypatch.setattr("rl_observe.trackers._import_client", lambda name: module)
    uri = "https://me:hunter22@host/x"
    config = LoggerConfig(tensorboard_enabled=False, mlflow_enabled=True, mlflow=MlflowConfig(tracking_uri=uri))
    recipe = {"logger": {"mlflow": {"tracking_uri": uri}}}
    with pytest.raises(TrackerError, match="mlflow could not be started: ConnectionError: cannot reach") as refusal:
        RunLog(RunDirectory.create(tmp_path / "run"), config, recipe=recipe, warn=print)
    assert "hunter22" not in str(refusal.value)
    assert refusal.value.__suppress_context__


secret = st.text(st.sampled_from("abcXYZ019-_.~!*"), min_size=8, max_size=24).filter(lambda text: len(set(text)) > 4)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20, deadline=None)
@given(variable=secret, user=secret, key=secret, name=st.sampled_from(["HF_TOKEN", "MY_API_KEY", "DB_PASSWORD"]))
def test_no_secret_of_a_recipe_is_in_any_file_of_its_run(tmp_path, variable, user, key, name):
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    run = RunDirectory.create(tmp_path / "run")
    recipe = {
        "cluster": {"env_vars": {name: variable, "NCCL_DEBUG": "INFO"}},
        "logger": {"mlflow": {"tracking_uri": f"https://somebody:{user}@host.example/x"}},
        "judge": {"api_key": key},
    }
    run.recipe.write_text(json.dumps(redact(recipe)))
    write_origins(run, {f"cluster.env_vars.{name}": f'override "cluster.env_vars.{name}={variable}"'}, recipe=recipe)
    run.versions.write_text(json.dumps(collect_versions()))
    with closing(RunLog(run, LoggerConfig(tensorboard_enabled=False, trace=True), recipe=recipe)) as log:
        log.step("grpo", 1, {"reward": 0.5})
        log.step("grpo", 2, {"reward": 0.75})
        log.events.write("engine_died", 1, f"{name}={variable} at https://somebody:{user}@host", reaction=f"told {key}")
        summary = {"note": f"sent {key} to https://somebody:{user}@host.example/x", "env": variable}
        run.summary.write_text(json.dumps(log.secrets.scrub(summary)))
    log.finish(summary, status="failed")
    write_report(run)
    files = {path.name: path.read_text() for path in run.path.rglob("*") if path.is_file()}
    assert {"recipe.yaml", "recipe_origins.json", "events.jsonl", "summary.json", "report.html", "trace.json"} <= set(
        files
    )
    for file, content in files.items():
        assert not [word for word in (variable, user, key) if word in content], file
    assert "INFO" in files["recipe.yaml"]


def test_the_process_environment_is_in_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "a-key-of-somebody")
    run = RunDirectory.create(tmp_path / "run")
    run.versions.write_text(json.dumps(collect_versions()))
    with closing(RunLog(run, QUIET)) as log:
        log.step("grpo", 1, {"reward": 0.5})
    log.finish({}, status="finished")
    write_report(run)
    for path in run.path.rglob("*"):
        if path.is_file():
            assert "a-key-of-somebody" not in path.read_text()
    assert os.environ["WANDB_API_KEY"] == "a-key-of-somebody"
