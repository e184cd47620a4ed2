"""Trackio, by its client, on this machine. It starts no dashboard; `trackio show` does."""

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

__all__ = ["TrackioTracker"]


class TrackioTracker:
    """A `Tracker`. Figures are named `stage/name`."""

    name = "trackio"

    def __init__(self, config: TrackioConfig) -> None:
        self._config = config
        self._run: Any = None

    def start(self, recipe: Mapping[str, object], run: RunDirectory, *, known_as: str | None) -> str:
        """Begin or continue the run that is `known_as`, its name there; see `Tracker`."""
        trackio = import_client("trackio")
        # Runs are found again by their names, and two run directories may well be called the same.
        name = known_as or self._config.name or f"{run.path.name}-{secrets.token_hex(2)}"
        with contextlib.redirect_stdout(io.StringIO()):  # it greets
            # In a context of its own: what the client takes for the current run it finishes again when Python ends.
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
        """Hand over one step; see `Tracker`."""
        self._run.log({f"{stage}/{name}": value for name, value in values.items()}, step=step)

    def finish(self, summary: Mapping[str, object], *, status: Status) -> None:
        """Hand over the summary's numbers and wait until all is written; see `Tracker`."""
        numbers = {
            f"summary/{name}": value
            for name, value in flat(summary)
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        with contextlib.redirect_stdout(io.StringIO()):  # it takes its leave
            if numbers:
                self._run.log(numbers)
            self._run.finish()
