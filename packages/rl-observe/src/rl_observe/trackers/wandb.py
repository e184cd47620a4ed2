"""Weights & Biases, through its client.

Console output, command line, host name, code and package list, which the client collects by default and which may hold
secrets, are not sent.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rl_observe.run_directory import RunDirectory
from rl_observe.trackers.base import Status, TrackerError, flat, import_client

if TYPE_CHECKING:
    from rl_observe.config import WandbConfig

# How long the end of a run waits for what is left to be sent.
_FINISH_TIMEOUT_S = 60.0
_INIT_TIMEOUT_S = 60.0


class WandbTracker:
    """A `Tracker`. Each stage has its own axis of steps, `<stage>/step`."""

    name = "wandb"

    def __init__(self, config: WandbConfig) -> None:
        self._config = config
        self._run: Any = None
        self._stages: set[str] = set()

    def start(self, recipe: Mapping[str, object], run: RunDirectory, *, known_as: str | None) -> str:
        """Start a run, or continue the one with the id `known_as`; see `Tracker`."""
        wandb = import_client("wandb")
        run_id = known_as or secrets.token_hex(4)
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
                init_timeout=_INIT_TIMEOUT_S,
                finish_timeout=_FINISH_TIMEOUT_S,
                x_disable_meta=True,
                x_disable_machine_info=True,
                x_disable_stats=True,
                x_save_requirements=False,
            ),
        )
        return run_id

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Send one step; see `Tracker`."""
        axis = f"{stage}/step"
        if stage not in self._stages:
            # The client's own step may only increase, and the steps of each stage start at 0.
            self._run.define_metric(axis, hidden=True)
            self._run.define_metric(f"{stage}/*", step_metric=axis)
            self._stages.add(stage)
        self._run.log({axis: step, **{f"{stage}/{name}": value for name, value in values.items()}})

    def finish(self, summary: Mapping[str, object], *, status: Status) -> None:
        """Send the summary and wait at most a minute until all is sent; see `Tracker`."""
        self._run.summary.update({name: value for name, value in flat(summary) if value is not None})
        self._run.finish(exit_code=0 if status == "finished" else 1)


def require_key() -> None:
    """Refuse online mode without a key; on a terminal the client would prompt for one and wait.

    Raises:
        TrackerError: no key is configured.
    """
    if not os.environ.get("WANDB_API_KEY") and not import_client("wandb").login(prompt=False):
        raise TrackerError(
            "logger.wandb.mode=online needs a key of Weights & Biases, and none is configured; run `wandb login`, set "
            "WANDB_API_KEY, or set logger.wandb.mode=offline"
        )
