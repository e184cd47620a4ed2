"""Every refit of a run: how much, how long, whether verified, and the digest. It does not know how weights travel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from rl_launcher.observe.json_lines import JsonLinesWriter, JsonValue, read_json_lines
from rl_launcher.observe.run_directory import RunDirectory

__all__ = ["RefitFigures", "RefitLog", "read_refits"]


class RefitFigures(Protocol):
    """What is kept of a refit; `rl_refit.RefitReport` matches."""

    @property
    def version(self) -> int:
        """Optimizer steps that the weights have seen."""

    @property
    def bytes(self) -> int:
        """Bytes that arrived."""

    @property
    def tensors(self) -> int:
        """Tensors fed."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds by phase."""

    @property
    def verified(self) -> str:
        """What was digested on both sides; "nothing" where nothing was."""

    @property
    def digest(self) -> str | None:
        """Of all that was digested, in hex."""


class RefitLog:
    """Write the refits of a run, one line each."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run

    def write(self, report: RefitFigures, *, stage: str | None = None, step: int | None = None) -> None:
        """Append one refit that was committed.

        Raises:
            RunDirectoryError: the disk refused it.
        """
        row = {
            "stage": stage,
            "step": step,
            "version": report.version,
            "bytes": report.bytes,
            "tensors": report.tensors,
            "seconds": {phase: round(seconds, 6) for phase, seconds in report.seconds.items()},
            "verified": report.verified,
            "digest": report.digest,
        }
        with JsonLinesWriter(self._run.refits) as lines:
            lines.append(row)


def read_refits(run: RunDirectory) -> list[dict[str, JsonValue]]:
    """The refits of a run in their order; [] where none was logged."""
    return read_json_lines(run.refits).rows if run.refits.exists() else []
