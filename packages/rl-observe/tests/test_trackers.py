"""Trackers: each by its own real client, offline; and a service that fails costs neither the run nor its figures."""

import importlib.util
import json
import math
import os
import sqlite3
import subprocess
import sys
import textwrap
import threading

import pytest

from rl_observe import RunDirectory, Secrets, TrackerError, check_trackers
from rl_observe.config import LoggerConfig, MlflowConfig, TrackioConfig, WandbConfig
from rl_observe.trackers import Delivery, start_tracker

KEY = "0123456789abcdef0123456789abcdef01234567"
PROGRAM = """
    import contextlib, functools, json, sys
    from rl_observe import RunDirectory, RunLog, run_log
    from rl_observe.config import LoggerConfig, MlflowConfig, TrackioConfig, WandbConfig

    # What a service may take is for people who wait; a client on a busy machine makes its database for longer.
    run_log.start_tracker = functools.partial(run_log.start_tracker, timeout_s=200.0)
    run_log._FINISH_TIMEOUT_S = 200.0

    if __name__ == "__main__":
        folder, which = sys.argv[1:]
        config = LoggerConfig(
            tensorboard_enabled=False,
            wandb=WandbConfig(project="project-of-mine", mode="offline"),
            mlflow=MlflowConfig(experiment_name="project-of-mine"),
            trackio=TrackioConfig(project="project-of-mine"),
            **{which + "_enabled": True},
        )
        recipe = {
            "seed": 3,
            "grpo": {"optimizer": {"lr": 0.25}},
            "cluster": {"env_vars": {"HF_TOKEN": "a-secret-of-mine", "NCCL_DEBUG": "INFO"}},
        }
        for first in (1, 4):
            # As a run that is interrupted after its third step, and resumed.
            run = RunDirectory.create(folder) if first == 1 else RunDirectory.open(folder)
            warnings = []
            with contextlib.closing(RunLog(run, config, recipe=recipe, warn=warnings.append)) as log:
                for step in range(first, first + 3):
                    log.step("grpo", step, {"reward": step / 8, "loss": float("nan"), "pass@1": 0.5})
                log.step("sft", 1, {"loss": 2.5})
            outcome = log.finish({"wall_s": 1.5, "note": "a-secret-of-mine", "refit": {"count": 3}}, status="finished")
            print(json.dumps({"warnings": warnings, "known": json.loads(run.trackers.read_text()), **outcome}))
"""


def carry_out(folder, which):
    """Log a run and its continuation; return its directory and the name that the tracker knows it by."""
    if importlib.util.find_spec(which) is None:
        pytest.skip(f"{which} is not installed; the extra rl-observe[{which}] brings it")
    program = folder / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    environment = {**os.environ, "WANDB_API_KEY": KEY, "TRACKIO_DIR": str(folder / "trackio"), "HOME": str(folder)}
    environment.pop("MLFLOW_TRACKING_URI", None)
    answer = subprocess.run(
        [sys.executable, str(program), str(folder / "run"), which],
        capture_output=True,
        text=True,
        timeout=900,
        cwd=folder,
        env=environment,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    first, second = (json.loads(line) for line in answer.stdout.splitlines())
    assert first == second
    assert first["warnings"] == []
    assert first["trackers"] == {which: {"sent": 4, "lost": 0, "failures": 0, "finished": True}}
    return folder / "run", first["known"][which]


def assert_nowhere(folder, *words):
    for path in folder.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            for word in words:
                assert word.encode() not in content, f"{word} is in {path}"


def test_mlflow_has_the_figures_the_recipe_and_the_end_and_goes_on_in_the_same_run(tmp_path):
    run, run_id = carry_out(tmp_path, "mlflow")
    with sqlite3.connect(run / "mlflow.db") as store:
        runs = store.execute("select run_uuid, name, status from runs").fetchall()
        metrics = store.execute("select key, step, value from metrics order by key, step").fetchall()
        params = dict(store.execute("select key, value from params").fetchall())
        tags = dict(store.execute("select key, value from tags").fetchall())
    assert runs == [(run_id, "run", "FINISHED")]
    assert [(step, value) for key, step, value in metrics if key == "grpo/reward"] == [(n, n / 8) for n in range(1, 7)]
    assert {key for key, _, _ in metrics} == {
        "grpo/reward", "grpo/pass_1", "grpo/memory_rss_bytes", "sft/loss", "sft/memory_rss_bytes",
    }  # fmt: skip
    assert params == {
        "seed": "3",
        "grpo.optimizer.lr": "0.25",
        "cluster.env_vars.HF_TOKEN": "<redacted>",
        "cluster.env_vars.NCCL_DEBUG": "INFO",
    }
    assert tags["summary.refit.count"] == "3"
    assert not (tmp_path / "mlruns").exists()
    assert_nowhere(run, "a-secret-of-mine", KEY)


def test_wandb_offline_has_the_figures_under_their_stages_and_nothing_that_nobody_asked_for(tmp_path):
    run, run_id = carry_out(tmp_path, "wandb")
    # The client names a directory by the second, and appends a number where that name is taken.
    records = [path.read_bytes() for path in run.glob(f"wandb/offline-run-*-{run_id}*/run-{run_id}.wandb")]
    assert len(records) == 2
    for record in records:
        for words in (b"grpo/reward", b"grpo/step", b"sft/loss", b"project-of-mine", b"0.25", b"<redacted>"):
            assert words in record
    assert not list(run.glob("wandb/*/files/requirements.txt"))
    assert_nowhere(run, "a-secret-of-mine", KEY, "program.py")


def test_trackio_has_the_figures_and_goes_on_in_the_same_run(tmp_path):
    run, known = carry_out(tmp_path, "trackio")
    (store,) = (tmp_path / "trackio").glob("project-of-mine*.db")
    with sqlite3.connect(store) as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    rewards = [(step, json.loads(values)["grpo/reward"]) for _, step, values in rows if b"grpo/reward" in values]
    assert {name for name, _, _ in rows} == {known}
    assert rewards == [(step, step / 8) for step in range(1, 7)]
    assert_nowhere(tmp_path / "trackio", "a-secret-of-mine")
    assert_nowhere(run, "a-secret-of-mine")


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_tracker_whose_package_is_missing_is_refused_naming_the_extra(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(TrackerError, match=rf"logger\.{name}_enabled=true needs .* pip install 'rl-observe\[{name}\]'"):
        check_trackers(LoggerConfig(**{f"{name}_enabled": True}))


def test_without_trackers_no_client_is_imported():
    program = (
        "import sys\n"
        "from rl_observe import RunLog, check_trackers\n"
        "assert not {'wandb', 'mlflow', 'trackio', 'torch', 'ray'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=240)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: WandbConfig(project=" "), "project=' ' must not be empty"),
        (lambda: MlflowConfig(experiment_name=""), "experiment_name='' must not be empty"),
        (lambda: TrackioConfig(project=""), "project='' must not be empty"),
        (lambda: LoggerConfig(num_samples_with_tokens=-1), "num_samples_with_tokens=-1 must be >= 0"),
    ],
)
def test_nonsense_is_refused_by_name(config, message):
    with pytest.raises(ValueError, match=message):
        config()


class Service:
    """A tracker whose network is what a test says."""

    name = "service"

    def __init__(self, failures=0, *, holds=None):
        self.failures, self.rows, self.ended, self.holds = failures, [], None, holds

    def start(self, recipe, run, *, known_as):
        if self.holds is not None:
            self.holds.wait(60)
        return "id"

    def log(self, stage, step, values):
        if self.holds is not None:
            self.holds.wait(60)
        if self.failures:
            self.failures -= 1
            raise ConnectionError("no route to https://user:hunter22@host")
        self.rows.append((stage, step, values))

    def finish(self, summary, *, status):
        if self.failures:
            raise ConnectionError("still none")
        self.ended = (summary, status)


def test_a_service_that_does_not_greet_is_refused_by_name(tmp_path):
    holds = threading.Event()
    refusal = (
        r"service could not be started: TimeoutError: no response within 0\.05 s; .* logger\.service_enabled=false"
    )
    with pytest.raises(TrackerError, match=refusal):
        start_tracker(
            Service(holds=holds), {}, RunDirectory(tmp_path), known_as=None, secrets=Secrets(), timeout_s=0.05
        )
    holds.set()


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_online_without_a_key_is_refused_and_never_asks_for_one(tmp_path):
    program = "from rl_observe import LoggerConfig as C, check_trackers; check_trackers(C(wandb_enabled=True))"
    environment = {**os.environ, "HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc")}
    environment.pop("WANDB_API_KEY", None)
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert answer.returncode == 1
    assert "logger.wandb.mode=online needs a key of Weights & Biases, and none is configured" in answer.stderr


def deliver(service, *, steps=5, pause_s=0.0, timeout_s=120.0):
    warnings = []
    delivery = Delivery(service, warn=warnings.append, first_pause_s=pause_s, last_pause_s=0.0)
    for step in range(1, steps + 1):
        delivery.log("grpo", step, {"reward": step / 8, "loss": math.nan})
    return delivery.finish({"wall_s": 1.0}, status="finished", timeout_s=timeout_s), warnings


def test_what_could_not_be_sent_is_sent_later_in_its_order_and_told_once():
    service = Service(failures=1)
    outcome, warnings = deliver(service, pause_s=3600.0)
    assert service.rows == [("grpo", step, {"reward": step / 8}) for step in range(1, 6)]
    assert service.ended == ({"wall_s": 1.0}, "finished")
    assert (outcome["sent"], outcome["lost"], outcome["failures"], outcome["finished"]) == (5, 0, 1, True)
    assert len(warnings) == 1
    assert "service could not be reached (ConnectionError: no route to https://<redacted>@host)" in warnings[0]


def test_a_service_that_stays_away_is_told_once_and_counted_and_its_losses_said():
    outcome, warnings = deliver(Service(failures=1_000_000))
    assert (outcome["sent"], outcome["lost"], outcome["finished"]) == (0, 5, False)
    assert outcome["failures"] >= 2
    assert outcome["last_error"] == "ConnectionError: still none"
    assert len(warnings) == 1


def test_a_service_that_never_answers_does_not_hold_up_the_end():
    holds = threading.Event()
    outcome, warnings = deliver(Service(holds=holds), timeout_s=0.05)
    assert (outcome["sent"], outcome["lost"], outcome["finished"]) == (0, 5, False)
    assert outcome["last_error"].startswith("TimeoutError: not everything was sent within 0.05 s")
    assert len(warnings) == 1
    holds.set()
