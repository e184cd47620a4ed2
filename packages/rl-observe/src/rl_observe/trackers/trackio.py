"""Trackio, through its client, on this machine. Open the dashboard with `trackio show`."""

from __future__ import annotations

import contextlib
import contextvars
import io
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rl_observe.run_directory import RunDirectory
from rl_observe.trackers.base import Status, flat, import_client

if TYPE_CHECKING:
    from rl_observe.config import TrackioConfig


class TrackioTracker:
    """A `Tracker`. Metrics are named `stage/name`."""

    name = "trackio"

    def __init__(self, config: TrackioConfig) -> None:
        self._config = config
        self._run: Any = None

    def start(self, recipe: Mapping[str, object], run: RunDirectory, *, known_as: str | None) -> str:
        """Start a run, or continue the one with the name `known_as`; see `Tracker`."""
        trackio = import_client("trackio")
        # Trackio identifies runs by name, and two run directories may have the same name.
        name = known_as or self._config.name or f"{run.path.name}-{secrets.token_hex(2)}"
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
        """Send one step; see `Tracker`."""
        self._run.log({f"{stage}/{name}": value for name, value in values.items()}, step=step)

    def finish(self, summary: Mapping[str, object], *, status: Status) -> None:
        """Send the numbers of the summary and wait until all is written; see `Tracker`."""
        numbers = {
            f"summary/{name}": value
            for name, value in flat(summary)
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        with contextlib.redirect_stdout(io.StringIO()):  # and a farewell
            if numbers:
                self._run.log(numbers)
            self._run.finish()
