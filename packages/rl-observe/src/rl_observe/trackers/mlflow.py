"""MLflow, through its client object: no global run, no global address, no artifacts.

The client reads the server's credentials from its own environment variables.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rl_observe.run_directory import RunDirectory
from rl_observe.trackers.base import Status, flat, import_client

if TYPE_CHECKING:
    from rl_observe.config import MlflowConfig

# Limits of the REST API.
_PARAMS_PER_CALL = 100
_METRICS_PER_CALL = 1000
_MAX_PARAM_LENGTH = 6000
_MAX_TAG_LENGTH = 5000
_STATUS = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}


class MlflowTracker:
    """A `Tracker`. The recipe becomes parameters, the summary becomes tags, and metrics are named `stage/name`."""

    name = "mlflow"

    def __init__(self, config: MlflowConfig) -> None:
        self._config = config
        self._client: Any = None
        self._entities: Any = None
        self._run_id = ""

    def start(self, recipe: Mapping[str, object], run: RunDirectory, *, known_as: str | None) -> str:
        """Start a run, or continue the one with the id `known_as`; see `Tracker`."""
        mlflow = import_client("mlflow")
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
        params = [self._entities.Param(_name(key), _text(value, _MAX_PARAM_LENGTH)) for key, value in flat(recipe)]
        for start in range(0, len(params), _PARAMS_PER_CALL):
            self._client.log_batch(self._run_id, params=params[start : start + _PARAMS_PER_CALL])
        return self._run_id

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Send one step; see `Tracker`."""
        moment_ms = time.time_ns() // 1_000_000
        metrics = [
            self._entities.Metric(_name(f"{stage}/{name}"), float(value), moment_ms, step)
            for name, value in values.items()
        ]
        for start in range(0, len(metrics), _METRICS_PER_CALL):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _METRICS_PER_CALL])

    def finish(self, summary: Mapping[str, object], *, status: Status) -> None:
        """Send the summary; see `Tracker`."""
        tags: Sequence[object] = [
            self._entities.RunTag(_name(f"summary.{key}"), _text(value, _MAX_TAG_LENGTH))
            for key, value in flat(summary)
        ]
        for start in range(0, len(tags), _PARAMS_PER_CALL):
            self._client.log_batch(self._run_id, tags=tags[start : start + _PARAMS_PER_CALL])
        self._client.set_terminated(self._run_id, status=_STATUS[status])


def _name(name: str) -> str:
    """Replace the characters that MLflow does not accept in names."""
    return re.sub(r"[^\w\-. :/]", "_", name)


def _text(value: object, size: int) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= size else text[: size - 1] + "…"
