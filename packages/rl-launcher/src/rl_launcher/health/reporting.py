"""Where a happening is told: the live view, `events.jsonl`, and through that the summary and the report."""

from collections import Counter
from typing import Protocol

from rl_launcher.observe import RunDirectory, RunDirectoryError, read_events

__all__ = ["Events", "Reporter", "View", "count_events"]


class Events(Protocol):
    """What writes an event down; `rl_launcher.observe.EventLog` does."""

    def write(self, name: str, step: int | None, message: str, *, reaction: str, stage: str | None = None) -> None:
        """Append one event."""


class View(Protocol):
    """What shows an event."""

    def event(self, name: str, step: int | None, message: str) -> None:
        """Show it."""


class Reporter:
    """Tells of happenings. A disk that refuses an event does not end a run that goes on: the view has shown it."""

    def __init__(self, events: Events, view: View) -> None:
        self._events, self._view = events, view
        self.unwritten: list[str] = []
        """Events that the disk refused."""

    def report(
        self, name: str, message: str, *, reaction: str, stage: str | None = None, step: int | None = None
    ) -> None:
        """Show and write down one event."""
        self._view.event(name, step, f"{message}; {reaction}")
        try:
            self._events.write(name, step, message, reaction=reaction, stage=stage)
        except RunDirectoryError as error:
            self.unwritten.append(str(error))


def count_events(run: RunDirectory) -> dict[str, int]:
    """How often each condition occurred, over all processes of a run; empty where nothing happened."""
    return dict(Counter(str(event["name"]) for event in read_events(run)))
