"""How new weights reached the engine: totals over the run, and the seconds that each refit took."""

from __future__ import annotations

import statistics
from typing import Any

from rl_observe.json_lines import finite_number
from rl_observe.number_format import format_bytes, format_duration
from rl_observe.report.curves import Chart, Curve
from rl_observe.report.record import Row, RunRecord, number, section, text

__all__ = ["refits"]


def refits(record: RunRecord) -> dict[str, Any] | None:
    """For the template: `lead`, `facts`, `chart` and the `latest` eight refits. None for a run without an engine.

    The latest are pairs of a logged row, with `seconds` summed up, and whether it was verified.
    """
    summary, rows = section(record.summary, "refit"), record.refits
    logged = [row for row in record.rows if number(row, "refit_bytes") is not None]
    if not summary and not logged and not rows:
        return None
    unverified = sum(not _is_verified(row) for row in rows)
    lead = "Every refit is a transaction: new weights are staged beside the old ones"
    if ("digest" in summary and text(summary, "digest") is None) or (rows and unverified == len(rows)):
        lead += " and are used once all have arrived. Digests were not compared in this run."
    else:
        lead += ", compared with the trainer’s by digest, and only then used."
        lead += f" In {unverified} of {len(rows)} they were not compared." if unverified else ""

    def known(name: str, logged_name: str = "") -> float | None:
        """The figure of the summary, otherwise of the last logged step or refit."""
        found = (number(summary, name), *(number(row, logged_name or name) for row in logged[-1:]))
        return next((value for value in (*found, *(number(row, name) for row in rows[-1:])) if value is not None), None)

    timed = sorted({at: _seconds(row) for row in rows if (at := number(row, "version")) is not None}.items())
    seconds = [value for row in logged if (value := number(row, "refit_s")) is not None]
    seconds = seconds or [value for row in rows if (value := _seconds(row)) is not None]
    size, digest = known("bytes", "refit_bytes"), text(summary, "digest")
    counts = {"refits": known("count") or float(len(rows) or len(logged)) or None, "last version": known("version")}
    facts = {
        name: f"{value:.0f}" for name, value in (counts | {"tensors": known("tensors")}).items() if value is not None
    }
    facts |= {"verified": f"{len(rows) - unverified} of {len(rows)}"} if rows else {}
    facts |= {} if size is None else {"bytes each time": format_bytes(size)}
    facts |= {"median time": format_duration(statistics.median(seconds))} if seconds else {}
    digest = digest or (text(rows[-1], "digest") if rows else None)
    facts |= {"digest of the last": digest} if digest else {}

    chart = None
    if sum(value is not None for _, value in timed) >= 3:
        curve = Curve("refit time", "main", [(float(version), value) for version, value in timed])
        note = "Over the version of the weights, verification included."
        chart = Chart("Seconds of each refit", note, "seconds", [curve], group="refits")
    latest = [({**row, "seconds": _seconds(row)}, _is_verified(row)) for row in rows[-8:]]
    return {"lead": lead, "facts": facts, "chart": chart, "latest": latest}


def _is_verified(refit: Row) -> bool:
    return text(refit, "digest") is not None and text(refit, "verified") != "nothing"


def _seconds(refit: Row) -> float | None:
    known = [value for phase in section(refit, "seconds").values() if (value := finite_number(phase)) is not None]
    return sum(known) if known else None
