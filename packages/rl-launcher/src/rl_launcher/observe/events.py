"""Conditions that occurred in a run, by name, and what was done about each.

{"time": "2026-11-22T09:30:00+00:00", "stage": "grpo", "step": 14,
 "name": "engine_died", "message": "engine 1 ...", "reaction": "restarted"}        (on one line)

It does not know which conditions there are.
"""

from __future__ import annotations

from datetime import UTC, datetime

from rl_launcher.observe.json_lines import JsonLinesWriter, JsonValue, read_json_lines
from rl_launcher.observe.redaction import Secrets
from rl_launcher.observe.run_directory import RunDirectory

__all__ = ["EventLog", "read_events"]


class EventLog:
    """Write events, from any thread. The file is made with the first one: most runs have none.

    Args:
        run: whose events they are.
        secrets: what their messages must not hold.
    """

    def __init__(self, run: RunDirectory, *, secrets: Secrets | None = None) -> None:
        self._run, self._secrets = run, secrets or Secrets()
        self.count = 0
        """Events that this process has written."""

    def write(self, name: str, step: int | None, message: str, *, reaction: str, stage: str | None = None) -> None:
        """Append one event.

        Args:
            name: of the condition, as `engine_died`.
            step: the stage's optimizer step in which it came up, if it belongs to one.
            message: what happened, with its numbers.
            reaction: what was done about it.
            stage: the stage of `step`.

        Raises:
            RunDirectoryError: the disk refused it.
        """
        moment = datetime.now(UTC).isoformat(timespec="milliseconds")
        row = {"name": name, "message": message, "reaction": reaction}
        with JsonLinesWriter(self._run.events) as lines:
            lines.append({"time": moment, "stage": stage, "step": step, **self._secrets.scrub(row)})
        self.count += 1


def read_events(run: RunDirectory) -> list[dict[str, JsonValue]]:
    """The events of a run in the order in which they were written; [] where nothing happened."""
    return read_json_lines(run.events).rows if run.events.exists() else []
