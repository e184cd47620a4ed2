"""`trace.json`: spans, events and a few metrics of a run in the Trace Event Format, for ui.perfetto.dev.

Format: "Trace Event Format", Google: `X` complete events, `i` instant events, `C` counters, `M` metadata; times are in
microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_observe.glossary import finite_number
from rl_observe.log_files import TRAINER, JsonValue, Row, read_events, read_metrics, read_spans
from rl_observe.run_directory import RunDirectory, write_text

_COUNTERS = ("reward", "tokens_per_s", "memory_rss_bytes", "memory_gpu_bytes", "buffer_groups", "staleness")


def write_trace(run: RunDirectory) -> Path:
    """Write `trace.json` from the other files of the run, and return its path.

    Raises:
        RunDirectoryError: it cannot be written.
    """
    events = trace_events(read_spans(run), metrics=read_metrics(run), conditions=read_events(run), title=run.path.name)
    content = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, ensure_ascii=False, allow_nan=False)
    return write_text(run.trace, content)


def trace_events(
    spans: Sequence[Row], *, metrics: Sequence[Row] = (), conditions: Sequence[Row] = (), title: str = "run"
) -> list[dict[str, Any]]:
    """Build the events of a trace: one process with one thread per lane, the trainer's first.

    Args:
        spans: rows of `spans.jsonl`; incomplete rows are skipped.
        metrics: rows of `metrics.jsonl`, a few of which become counters.
        conditions: rows of `events.jsonl`.
        title: the name of the process.
    """
    timed: list[tuple[float, float, Row]] = []
    for span in spans:
        start, end = finite_number(span.get("start_s")), finite_number(span.get("end_s"))
        texts = isinstance(span.get("name"), str) and isinstance(span.get("lane"), str)
        if texts and start is not None and end is not None and end >= start:
            timed.append((start, end, span))
    # Of two spans that start together the longer one contains the other, and viewers expect it first.
    timed.sort(key=lambda each: (each[0], -each[1]))
    lanes = sorted({str(span["lane"]) for _, _, span in timed}, key=lambda lane: (lane != TRAINER, lane))
    thread_of = {lane: number for number, lane in enumerate(lanes, 1)}

    events = [_event("M", "process_name", args={"name": title})]
    events += [_event("M", "thread_name", tid=tid, args={"name": lane}) for lane, tid in thread_of.items()]
    events += [_event("M", "thread_sort_index", tid=tid, args={"sort_index": tid}) for tid in thread_of.values()]
    for start, end, span in timed:
        args = {name: span[name] for name in ("stage", "step", "laid") if span.get(name) not in (None, False)}
        tid, category = thread_of[str(span["lane"])], span.get("stage") or "run"
        duration = round(1e6 * (end - start), 3)
        events.append(_event("X", str(span["name"]), at_s=start, tid=tid, args=args, cat=category, dur=duration))
    logged_s: dict[tuple[JsonValue, JsonValue], float] = {}
    for row in metrics:
        if (time_s := finite_number(row.get("time_s"))) is None:
            continue
        logged_s[row.get("stage"), row.get("step")] = time_s
        for name in _COUNTERS:
            if (value := finite_number(row.get(name))) is not None:
                events.append(_event("C", name, at_s=time_s, args={name: value}))
    for condition in conditions:
        # A condition has the time of day and a step; it is placed where its step was logged, or at the start.
        at_s = logged_s.get((condition.get("stage"), condition.get("step")), 0.0)
        args = {name: condition[name] for name in ("message", "reaction", "step") if condition.get(name) is not None}
        name = str(condition.get("name") or "event")
        events.append(_event("i", name, at_s=at_s, args=args, cat="event", s="g"))
    return events


def _event(
    kind: str, name: str, *, args: dict[str, Any], at_s: float = 0.0, tid: int = 0, **fields: object
) -> dict[str, Any]:
    return {"ph": kind, "name": name, "pid": 1, "tid": tid, "ts": round(1e6 * at_s, 3), "args": args, **fields}
