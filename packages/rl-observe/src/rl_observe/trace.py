"""`trace.json`: the spans and events of a run in the Trace Event Format, for ui.perfetto.dev.

Format: "Trace Event Format", Google, `X` complete events, `i` instant events, `C` counters, `M` metadata; times are in
microseconds. It does not know what the spans mean.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rl_observe.json_lines import JsonValue, finite_number
from rl_observe.log_files import TRAINER, read_events, read_metrics, read_spans
from rl_observe.run_directory import RunDirectory, RunDirectoryError, describe

__all__ = ["trace_events", "write_trace"]

Row = dict[str, JsonValue]
_PID = 1
_COUNTED = ("reward", "tokens_per_s", "memory_rss_bytes", "memory_gpu_bytes", "buffer_groups", "staleness")


def write_trace(run: RunDirectory) -> Path:
    """Write `trace.json` from the other files of the run, and return its path.

    Raises:
        RunDirectoryError: it cannot be written.
    """
    events = trace_events(read_spans(run), metrics=read_metrics(run), conditions=read_events(run), title=run.path.name)
    content = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, ensure_ascii=False, allow_nan=False)
    unfinished = run.trace.with_suffix(".json.unfinished")
    try:
        unfinished.write_text(content, encoding="utf-8")
        unfinished.replace(run.trace)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise RunDirectoryError(f"{run.trace} cannot be written: {describe(error)}") from error
    return run.trace


def trace_events(
    spans: Sequence[Row], *, metrics: Sequence[Row] = (), conditions: Sequence[Row] = (), title: str = "run"
) -> list[dict[str, Any]]:
    """The events of a trace: one process, a thread a lane, the trainer's on top.

    Args:
        spans: rows of `spans.jsonl`; one that is not whole is left out.
        metrics: rows of `metrics.jsonl`, of which a few become counters.
        conditions: rows of `events.jsonl`.
        title: what the process is called.
    """
    whole = [span for span in spans if _is_whole(span)]
    named = {str(span["lane"]): None for span in whole}
    lanes = {lane: number for number, lane in enumerate(sorted(named, key=lambda lane: (lane != TRAINER, lane)), 1)}
    return [
        _metadata("process_name", {"name": title}),
        *(_metadata("thread_name", {"name": lane}, tid=tid) for lane, tid in lanes.items()),
        *(_metadata("thread_sort_index", {"sort_index": tid}, tid=tid) for tid in lanes.values()),
        *(_complete(span, tid=lanes[str(span["lane"])]) for span in sorted(whole, key=_order)),
        *(counter for row in metrics for counter in _counters(row)),
        *_instants(conditions, metrics),
    ]


def _is_whole(span: Row) -> bool:
    start, end = finite_number(span.get("start_s")), finite_number(span.get("end_s"))
    texts = isinstance(span.get("name"), str) and isinstance(span.get("lane"), str)
    return texts and start is not None and end is not None and end >= start


def _order(span: Row) -> tuple[float, float]:
    # The longer of two that begin together holds the other, and viewers expect it first.
    start, end = finite_number(span["start_s"]) or 0.0, finite_number(span["end_s"]) or 0.0
    return start, -end


def _metadata(name: str, args: dict[str, object], *, tid: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": _PID, "tid": tid, "ts": 0, "args": args}


def _complete(span: Row, *, tid: int) -> dict[str, Any]:
    start, end = finite_number(span["start_s"]) or 0.0, finite_number(span["end_s"]) or 0.0
    args = {name: span[name] for name in ("stage", "step", "laid") if span.get(name) not in (None, False)}
    return {
        "ph": "X",
        "name": span["name"],
        "cat": span.get("stage") or "run",
        "pid": _PID,
        "tid": tid,
        "ts": round(1e6 * start, 3),
        "dur": round(1e6 * (end - start), 3),
        "args": args,
    }


def _counters(row: Row) -> Iterator[dict[str, Any]]:
    time_s = finite_number(row.get("time_s"))
    for name in _COUNTED:
        value = finite_number(row.get(name))
        if time_s is not None and value is not None:
            yield {"ph": "C", "name": name, "pid": _PID, "tid": 0, "ts": round(1e6 * time_s, 3), "args": {name: value}}


def _instants(conditions: Sequence[Row], metrics: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Conditions know their step and the time of day: they lie where their step was logged, or at the start."""
    logged = {(row.get("stage"), row.get("step")): finite_number(row.get("time_s")) for row in metrics}
    for condition in conditions:
        at = logged.get((condition.get("stage"), condition.get("step"))) or 0.0
        told = {name: condition.get(name) for name in ("message", "reaction", "step")}
        yield {
            "ph": "i",
            "name": str(condition.get("name") or "event"),
            "cat": "event",
            "pid": _PID,
            "tid": 0,
            "ts": round(1e6 * at, 3),
            "s": "g",
            "args": {name: value for name, value in told.items() if value is not None},
        }
