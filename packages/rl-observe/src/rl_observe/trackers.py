"""Trackers: Weights & Biases, MLflow and trackio, each an extra that is imported only if the config enables it.

A tracker may block and may raise: `Delivery` calls it from its own thread. What could not be sent is kept in order,
and sent again with the next step and at the end of the run. The first failure is reported; all failures are counted.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import importlib.util
import io
import json
import math
import os
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from secrets import token_hex
from types import ModuleType
from typing import Any, Literal, Protocol

from rl_observe.config import LoggerConfig, MlflowConfig, TrackioConfig, WandbConfig
from rl_observe.log_files import flat
from rl_observe.redaction import Secrets
from rl_observe.run_directory import RunDirectory

Status = Literal["finished", "failed", "interrupted"]
"""How a run ended."""

# A service that takes longer to respond is down, and the user is waiting for the run to start.
_START_TIMEOUT_S = 60.0
# A service may be down for an hour; the pause between attempts doubles from the first to the longest.
_FIRST_PAUSE_S = 5.0
_LONGEST_PAUSE_S = 300.0
# At the end of the run. This bridges a dropped connection; after a longer outage the summary counts what is lost.
_LAST_ATTEMPTS = 3
_LAST_PAUSE_S = 2.0
# Limits of MLflow's REST API.
_PARAMS_PER_CALL = 100
_METRICS_PER_CALL = 1000
_MAX_PARAM_LENGTH = 6000
_MAX_TAG_LENGTH = 5000
_MLFLOW_STATUS = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}


class TrackerError(ValueError):
    """An enabled tracker cannot be used."""


class Tracker(Protocol):
    """One experiment tracking service."""

    @property
    def name(self) -> str:
        """Its name in configs and summaries, such as `wandb`."""

    def start(self, recipe: Mapping[str, object], run: RunDirectory, *, known_as: str | None) -> str:
        """Start or continue a run, and return its id at the service.

        Args:
            recipe: resolved plain settings, without credentials.
            run: the run's directory.
            known_as: the id that an earlier `start` of the same run returned; None for a new run.
        """

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Send the metrics of one step; every value is finite."""

    def finish(self, summary: Mapping[str, object], *, status: Status) -> None:
        """Send the summary and end the run once everything is sent."""


def enabled_trackers(config: LoggerConfig) -> list[Tracker]:
    """Return the enabled trackers, not started yet."""
    trackers: list[Tracker] = [_Wandb(config.wandb), _Mlflow(config.mlflow), _Trackio(config.trackio)]
    return [tracker for tracker in trackers if getattr(config, f"{tracker.name}_enabled")]


def check_trackers(config: LoggerConfig) -> None:
    """Refuse trackers that cannot work, without contacting any service; call it before a model is loaded.

    Raises:
        TrackerError: a package or a key is missing.
    """
    for tracker in enabled_trackers(config):
        _require_client(tracker.name)
    # Without a key the client would prompt for one on a terminal, and wait.
    needs_key = config.wandb_enabled and config.wandb.mode == "online" and not os.environ.get("WANDB_API_KEY")
    if needs_key and not _import_client("wandb").login(prompt=False):
        raise TrackerError(
            "logger.wandb.mode=online needs a key of Weights & Biases, and none is configured; run `wandb login`, set "
            "WANDB_API_KEY, or set logger.wandb.mode=offline"
        )


def start_tracker(
    tracker: Tracker,
    recipe: Mapping[str, object],
    run: RunDirectory,
    *,
    known_as: str | None,
    secrets: Secrets,
    timeout_s: float = _START_TIMEOUT_S,
) -> str:
    """Call `tracker.start` with a timeout, and return the id of the run.

    Raises:
        TrackerError: it raised, or did not respond in time. No message contains `secrets`.
    """
    answers: queue.SimpleQueue[str | Exception] = queue.SimpleQueue()

    def start() -> None:
        try:
            answers.put(tracker.start(recipe, run, known_as=known_as))
        except Exception as error:  # noqa: BLE001 - clients raise anything; it is raised again below
            answers.put(error)

    # A daemon thread, so that a service that never responds does not keep Python from exiting.
    threading.Thread(target=start, name=f"start-{tracker.name}", daemon=True).start()
    try:
        answer = answers.get(timeout=timeout_s)
    except queue.Empty:
        answer = TimeoutError(f"no response within {timeout_s:g} s")
    if isinstance(answer, str):
        return answer
    if isinstance(answer, TrackerError):
        raise answer
    reason = secrets.scrub(f"{type(answer).__name__}: {answer}".splitlines()[0])
    raise TrackerError(
        f"{tracker.name} could not be started: {reason}; nothing has been trained. Fix it, or set "
        f"logger.{tracker.name}_enabled=false"
    ) from None  # the chained error could show credentials


class Delivery:
    """Deliver metrics to a started tracker, from a thread of its own.

    Args:
        tracker: already started.
        warn: called once, with the first failure; may be called from another thread.
        secrets: removed from every message.
        first_pause_s: seconds between a first failure and the next attempt; doubles with each further failure.
        last_pause_s: seconds between the last attempts, when the run has ended.
    """

    def __init__(
        self,
        tracker: Tracker,
        *,
        warn: Callable[[str], None],
        secrets: Secrets | None = None,
        first_pause_s: float = _FIRST_PAUSE_S,
        last_pause_s: float = _LAST_PAUSE_S,
    ) -> None:
        self._tracker, self._warn, self._secrets = tracker, warn, secrets or Secrets()
        self._first_pause_s, self._last_pause_s = first_pause_s, last_pause_s
        self._rows: deque[tuple[str, int, dict[str, float]]] = deque()
        self._changed = threading.Condition()
        self._ending: tuple[Mapping[str, object], Status] | None = None
        self._finished = False
        self._sent = self._failures = 0
        self._last_error: str | None = None
        self._thread = threading.Thread(target=self._work, name=f"tracker-{tracker.name}", daemon=True)
        self._thread.start()

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Queue the finite metrics of one step; returns at once."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        with self._changed:
            self._rows.append((stage, step, finite))
            self._changed.notify()

    def finish(self, summary: Mapping[str, object], *, status: Status, timeout_s: float) -> dict[str, object]:
        """Send what is left and the summary, wait at most `timeout_s`, and return the outcome.

        Returns:
            `sent` and `lost` steps, `failures`, `finished` (whether the tracker knows that the run has ended), and
            `last_error` if there was one.
        """
        with self._changed:
            self._ending = (summary, status)
            self._changed.notify()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._failed(TimeoutError(f"not everything was sent within {timeout_s:g} s at the end"))
        with self._changed:
            counts = {"sent": self._sent, "lost": len(self._rows), "failures": self._failures}
            error = {} if self._last_error is None else {"last_error": self._last_error}
            return {**counts, "finished": self._finished, **error}

    def _work(self) -> None:
        pause_s, not_before_s = self._first_pause_s, 0.0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._rows) or self._ending is not None)
                if self._ending is None and (left_s := not_before_s - time.monotonic()) > 0:
                    self._changed.wait_for(lambda: self._ending is not None, left_s)
                ending = self._ending
            if ending is not None:
                break
            if self._send_all():
                pause_s = self._first_pause_s
            else:
                not_before_s = time.monotonic() + pause_s
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

        summary, status = ending
        for attempts_left in reversed(range(_LAST_ATTEMPTS)):
            if self._send_all():
                break
            if attempts_left:
                time.sleep(self._last_pause_s)
        try:
            self._tracker.finish(summary, status=status)
        except Exception as error:  # noqa: BLE001 - clients raise anything, and none of it may end a run
            self._failed(error)
        else:
            self._finished = True

    def _send_all(self) -> bool:
        while self._rows:
            stage, step, values = self._rows[0]
            try:
                self._tracker.log(stage, step, values)
            except Exception as error:  # noqa: BLE001 - clients raise anything, and none of it may end a run
                self._failed(error)
                return False
            with self._changed:
                self._rows.popleft()
                self._sent += 1
        return True

    def _failed(self, error: Exception) -> None:
        text = self._secrets.scrub(f"{type(error).__name__}: {error}".strip().splitlines()[0][:300])
        with self._changed:
            self._failures += 1
            is_first = self._failures == 1
            self._last_error = text
        if is_first:
            self._warn(
                f"{self._tracker.name} could not be reached ({text}); the run continues, metrics.jsonl is complete, "
                f"and missing steps are sent when the service responds again"
            )


class _Wandb:
    """Weights & Biases. Each stage has its own axis of steps, `<stage>/step`.

    Console output, command line, host name, code and package list, which the client collects by default and which may
    hold secrets, are not sent.
    """

    name = "wandb"

    def __init__(self, config: WandbConfig) -> None:
        self._config = config
        self._run: Any = None
        self._stages: set[str] = set()

    def start(self, recipe: Mapping[str, object], run: RunDirectory, *, known_as: str | None) -> str:
        wandb = _import_client("wandb")
        run_id = known_as or token_hex(4)
        is_online = self._config.mode == "online"
        self._run = wandb.init(
            project=self._config.project,
            name=self._config.name or run.path.name,
            entity=self._config.entity,
            mode=self._config.mode,
            dir=str(run.path),
            id=run_id,
            # Offline, the client cannot resume; `wandb sync` joins runs with the same id.
            resume="allow" if is_online else None,
            config=dict(recipe),
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                save_code=False,
                host="",
                init_timeout=60.0,
                finish_timeout=60.0,
                x_disable_meta=True,
                x_disable_machine_info=True,
                x_disable_stats=True,
                x_save_requirements=False,
            ),
        )
        return run_id

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        axis = f"{stage}/step"
        if stage not in self._stages:
            # The client's own step may only increase, and the steps of each stage start at 0.
            self._run.define_metric(axis, hidden=True)
            self._run.define_metric(f"{stage}/*", step_metric=axis)
            self._stages.add(stage)
        self._run.log({axis: step, **{f"{stage}/{name}": value for name, value in values.items()}})

    def finish(self, summary: Mapping[str, object], *, status: Status) -> None:
        self._run.summary.update({name: value for name, value in flat(summary) if value is not None})
        self._run.finish(exit_code=0 if status == "finished" else 1)


class _Mlflow:
    """MLflow, through its client object: no global run, no global address, no artifacts.

    The recipe becomes parameters, the summary becomes tags, and metrics are named `stage/name`. The client reads the
    server's credentials from its own environment variables.
    """

    name = "mlflow"

    def __init__(self, config: MlflowConfig) -> None:
        self._config = config
        self._client: Any = None
        self._entities: Any = None
        self._run_id = ""

    def start(self, recipe: Mapping[str, object], run: RunDirectory, *, known_as: str | None) -> str:
        mlflow = _import_client("mlflow")
        self._entities = mlflow.entities
        address = (
            self._config.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.path}/mlflow.db"
        )
        self._client = mlflow.MlflowClient(tracking_uri=address)
        if known_as is not None:
            self._run_id = known_as
            self._client.update_run(known_as, status="RUNNING")
            return known_as
        name = self._config.experiment_name
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None:
            experiment_id = experiment.experiment_id
        else:
            # Artifacts of a local store would otherwise go to the folder where the command was typed.
            is_local = address.startswith("sqlite:")
            artifacts = (run.path / "mlflow-artifacts").as_uri() if is_local else None
            experiment_id = str(self._client.create_experiment(name, artifact_location=artifacts))
        created = self._client.create_run(experiment_id, run_name=self._config.run_name or run.path.name)
        self._run_id = str(created.info.run_id)
        params = [
            self._entities.Param(_mlflow_name(key), _mlflow_text(value, _MAX_PARAM_LENGTH))
            for key, value in flat(recipe)
        ]
        self._send("params", params, _PARAMS_PER_CALL)
        return self._run_id

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        moment_ms = time.time_ns() // 1_000_000
        metrics = [
            self._entities.Metric(_mlflow_name(f"{stage}/{name}"), float(value), moment_ms, step)
            for name, value in values.items()
        ]
        self._send("metrics", metrics, _METRICS_PER_CALL)

    def finish(self, summary: Mapping[str, object], *, status: Status) -> None:
        tags = [
            self._entities.RunTag(_mlflow_name(f"summary.{key}"), _mlflow_text(value, _MAX_TAG_LENGTH))
            for key, value in flat(summary)
        ]
        self._send("tags", tags, _PARAMS_PER_CALL)
        self._client.set_terminated(self._run_id, status=_MLFLOW_STATUS[status])

    def _send(self, kind: str, items: Sequence[object], size: int) -> None:
        for start in range(0, len(items), size):
            self._client.log_batch(self._run_id, **{kind: items[start : start + size]})


def _mlflow_name(name: str) -> str:
    """Replace the characters that MLflow does not accept in names."""
    return re.sub(r"[^\w\-. :/]", "_", name)


def _mlflow_text(value: object, size: int) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= size else text[: size - 1] + "…"


class _Trackio:
    """Trackio, on this machine. Metrics are named `stage/name`. Open the dashboard with `trackio show`."""

    name = "trackio"

    def __init__(self, config: TrackioConfig) -> None:
        self._config = config
        self._run: Any = None

    def start(self, recipe: Mapping[str, object], run: RunDirectory, *, known_as: str | None) -> str:
        trackio = _import_client("trackio")
        # Trackio identifies runs by name, and two run directories may have the same name.
        name = known_as or self._config.name or f"{run.path.name}-{token_hex(2)}"
        with contextlib.redirect_stdout(io.StringIO()):  # the client prints a greeting
            # In a context of its own, or the client would finish its current run a second time when Python exits.
            self._run = contextvars.Context().run(
                trackio.init,
                project=self._config.project,
                name=name,
                config={key.replace("/", "."): value for key, value in flat(recipe)},
                resume="allow" if known_as else "never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        return str(self._run.name)

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        self._run.log({f"{stage}/{name}": value for name, value in values.items()}, step=step)

    def finish(self, summary: Mapping[str, object], *, status: Status) -> None:
        numbers = {
            f"summary/{name}": value
            for name, value in flat(summary)
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        with contextlib.redirect_stdout(io.StringIO()):  # and a farewell
            if numbers:
                self._run.log(numbers)
            self._run.finish()


def _require_client(name: str) -> None:
    """Refuse a tracker whose package is not installed, without importing it."""
    if importlib.util.find_spec(name) is None:
        raise TrackerError(
            f"logger.{name}_enabled=true needs the package {name}, which is not installed; "
            f"pip install 'rl-observe[{name}]', or set logger.{name}_enabled=false"
        )


def _import_client(name: str) -> ModuleType:
    _require_client(name)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise TrackerError(f"logger.{name}_enabled=true, and the package {name} cannot be imported: {error}") from error
