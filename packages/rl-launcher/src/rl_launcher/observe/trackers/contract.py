"""What a tracker is: somewhere outside of the run directory that is shown the figures of a run.

It knows no client. Whoever implements it may block and may raise: `delivery` calls it from a thread of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Literal, Protocol

from rl_launcher.observe.run_directory import RunDirectory

__all__ = ["Status", "Tracker", "TrackerError", "flat", "import_client", "require_client"]

Status = Literal["finished", "failed", "interrupted"]
"""How a run ended."""


class TrackerError(ValueError):
    """A tracker that a recipe enables and that cannot be used."""


class Tracker(Protocol):
    """One service that is shown a run."""

    @property
    def name(self) -> str:
        """What recipes and summaries call it: `wandb`."""

    def start(self, recipe: Mapping[str, object], run: RunDirectory, *, known_as: str | None) -> str:
        """Begin, and return the name under which the service will know this run when it is resumed.

        Args:
            recipe: resolved, plain, and without credentials.
            run: the run's directory.
            known_as: what an earlier `start` of the same run returned; None for a new run.
        """

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Show what one step logged; every value is finite."""

    def finish(self, summary: Mapping[str, object], *, status: Status) -> None:
        """Show how the run ended, and let go of it once all is sent."""


def require_client(name: str) -> None:
    """Refuse a tracker whose package is not installed, without importing it.

    Raises:
        TrackerError: naming the extra that brings it.
    """
    if importlib.util.find_spec(name) is None:
        raise TrackerError(
            f"logger.{name}_enabled=true needs the package {name}, which is not installed; "
            f"pip install 'rl-launcher[{name}]', or set logger.{name}_enabled=false"
        )


def import_client(name: str) -> ModuleType:
    """The client's own module.

    Raises:
        TrackerError: it is not installed, or is broken.
    """
    require_client(name)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise TrackerError(f"logger.{name}_enabled=true, and the package {name} cannot be imported: {error}") from error


def flat(data: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """The leaves of nested plain data by dotted key; a list is one leaf."""
    for name, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
