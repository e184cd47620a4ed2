"""How new weights reached the engine: totals over the run, and the seconds that each refit took."""

from __future__ import annotations

import statistics
from typing import Any

from rl_observe.glossary import finite_number
from rl_observe.report.curves import Chart, Curve
from rl_observe.report.record import Row, RunRecord, number, section, text

__all__ = ["refits"]


def refits(record: RunRecord) -> dict[str, Any] | None:
    """The refits for the template; None for a run without an engine.

    Figures come from the summary, otherwise from the last refit or the last logged step. `latest` are the last eight
    refits, each with its `seconds` summed up, and whether it was verified.
    """
    summary, rows = section(record.summary, "refit"), record.refits
    logged = [row for row in record.rows if number(row, "refit_bytes") is not None]
    if not summary and not logged and not rows:
        return None
    last, last_logged = rows[-1] if rows else {}, logged[-1] if logged else {}

    def known(name: str, logged_name: str) -> float | None:
        found = (number(summary, name), number(last, name), number(last_logged, logged_name))
        return next((value for value in found if value is not None), None)

    seconds = [value for row in logged if (value := number(row, "refit_s")) is not None]
    seconds = seconds or [value for row in rows if (value := _seconds(row)) is not None]
    timed = sorted({float(at): _seconds(row) for row in rows if (at := number(row, "version")) is not None}.items())
    note, curve = "Over the version of the weights, verification included.", Curve("refit time", "main", timed)
    chart = Chart("Seconds of each refit", note, "seconds", [curve], group="refits")
    num_verified = sum(map(_is_verified, rows))
    return {
        "count": number(summary, "count") or len(rows) or len(logged),
        "version": known("version", "version"),
        "tensors": known("tensors", "refit_tensors"),
        "bytes": known("bytes", "refit_bytes"),
        "median_s": statistics.median(seconds) if seconds else None,
        "digest": text(summary, "digest") or text(last, "digest"),
        "num_verified": num_verified,
        "is_unverified": ("digest" in summary and not text(summary, "digest")) or (bool(rows) and not num_verified),
        "chart": chart if sum(value is not None for _, value in timed) >= 3 else None,
        "latest": [({**row, "seconds": _seconds(row)}, _is_verified(row)) for row in rows[-8:]],
    }


def _is_verified(refit: Row) -> bool:
    return text(refit, "digest") is not None and text(refit, "verified") != "nothing"


def _seconds(refit: Row) -> float | None:
    known = [value for phase in section(refit, "seconds").values() if (value := finite_number(phase)) is not None]
    return sum(known) if known else None
