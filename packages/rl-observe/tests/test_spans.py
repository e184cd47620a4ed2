"""Spans, events and refits: what is written is read again, from any thread, and makes a valid trace."""

import json
import math
import threading
from types import SimpleNamespace

import pytest

from rl_observe import (
    EventLog,
    MetricsLog,
    RefitLog,
    RunDirectory,
    Secrets,
    SpanLog,
    read_events,
    read_refits,
    read_spans,
    write_trace,
)
from rl_observe.trace import trace_events


@pytest.fixture
def run(tmp_path):
    return RunDirectory.create(tmp_path / "run")


@pytest.fixture
def spans(run):
    with SpanLog(run, elapsed_s=100.0) as log:
        yield log


def test_a_span_knows_its_lane_by_its_thread_and_its_time_by_the_runs_clock(run, spans):
    log = spans
    with log.span("generate", stage="grpo", step=3):
        pass
    work = log.timed("score", lambda x: x + 1)
    results = []
    thread = threading.Thread(target=lambda: results.append(work(1)), name="collector-0")
    thread.start()
    thread.join()
    first, second = read_spans(run)
    assert (first["name"], first["lane"], first["stage"], first["step"]) == ("generate", "trainer", "grpo", 3)
    assert (second["name"], second["lane"], results) == ("score", "collector-0", [2])
    assert 100.0 <= first["start_s"] <= first["end_s"] <= second["start_s"] <= second["end_s"]


def test_a_span_is_written_also_if_its_block_raises(run, spans):
    with pytest.raises(KeyError), spans.span("generate"):
        raise KeyError
    assert [span["name"] for span in read_spans(run)] == ["generate"]


def test_phases_are_laid_end_to_end_and_say_so_where_nothing_was_measured(run, spans):
    phases = {"phase_s/train": 2.0, "phase_s/generate": 1.0, "phase_s/other": 0.5, "reward": 1.0}
    spans.step("grpo", 1, start_s=10.0, end_s=13.5, phases=phases)
    spans.write("refit", lane="trainer", start_s=14.0, end_s=14.5)
    spans.step("grpo", 2, start_s=13.5, end_s=15.0, phases=phases)
    rows = [(span["name"], span["start_s"], span["end_s"], span["laid"]) for span in read_spans(run)]
    assert rows == [
        ("step", 10.0, 13.5, False),
        ("generate", 10.0, 11.0, True),
        ("train", 11.0, 13.0, True),
        ("refit", 14.0, 14.5, False),
        ("step", 13.5, 15.0, False),
    ]


def test_a_span_that_ends_before_it_starts_is_refused(spans):
    with pytest.raises(ValueError, match=r"'x' in lane 'a' ends at 1\.0 s, before it starts at 2\.0 s"):
        spans.write("x", lane="a", start_s=2.0, end_s=1.0)


def test_the_clock_of_a_run_continues_where_earlier_processes_ended(run, monkeypatch):
    passed = [0.0]
    monkeypatch.setattr("rl_observe.log_files.time", SimpleNamespace(monotonic=lambda: 50.0 + passed[0]))
    with SpanLog(run, elapsed_s=100.0) as log:
        passed[0] = 3.5
        assert log.now() == 103.5


def test_events_are_appended_without_the_secrets_of_the_recipe(run):
    assert read_events(run) == []
    log = EventLog(run, secrets=Secrets.of({"env_vars": {"HF_TOKEN": "hunter22"}}))
    log.write("engine_died", 14, "cannot log in with hunter22", reaction="restarted", stage="grpo")
    log.write("disk_full", None, "12 MB free", reaction="stopped")
    first, second = read_events(run)
    assert {name: first[name] for name in ("stage", "step", "name", "message", "reaction")} == {
        "stage": "grpo",
        "step": 14,
        "name": "engine_died",
        "message": "cannot log in with <redacted>",
        "reaction": "restarted",
    }
    assert (second["step"], second["reaction"]) == (None, "stopped")


def refit(version, digest="9f2a", verified="every byte"):
    return SimpleNamespace(
        version=version,
        bytes=1000,
        tensors=3,
        seconds={"transfer": 0.2, "verify": 0.1},
        verified=verified,
        digest=digest,
    )


def test_refits_are_appended_as_they_were_reported(run):
    with RefitLog(run) as log:
        assert not run.refits.exists()
        log.write(refit(1), stage="grpo", step=1)
        assert len(read_refits(run)) == 1
        log.write(refit(2, digest=None, verified="nothing"))
    first, second = read_refits(run)
    assert (first["version"], first["seconds"], first["digest"]) == (1, {"transfer": 0.2, "verify": 0.1}, "9f2a")
    assert (second["version"], second["verified"], second["digest"]) == (2, "nothing", None)


def check_trace(events):
    """The rules of the Trace Event Format for the phases that are used here."""
    pids = {event["pid"] for event in events}
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    for event in events:
        assert {"ph", "name", "pid", "tid", "ts"} <= set(event)
        assert event["ph"] in {"X", "M", "C", "i"}
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert math.isfinite(event["ts"])
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert (event["pid"], event["tid"]) in named
        if event["ph"] == "M":
            assert event["name"] in {"process_name", "thread_name", "thread_sort_index"}
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
    assert len(pids) == 1


def test_the_trace_is_valid_has_a_thread_a_lane_and_nests(run, spans):
    spans.step("grpo", 1, start_s=0.5, end_s=2.0, phases={"phase_s/generate": 1.0, "phase_s/train": 0.4})
    spans.write("generate", lane="collector-1", start_s=0.25, end_s=1.25)
    EventLog(run).write("engine_died", 1, "gone", reaction="restarted", stage="grpo")
    with MetricsLog(run, tensorboard=False) as log:
        log.write("grpo", 1, {"reward": 0.5, "loss": math.nan})
    path = write_trace(run)
    content = json.loads(path.read_text(), parse_constant=pytest.fail)
    events = content["traceEvents"]
    check_trace(events)
    threads = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    assert list(threads) == ["trainer", "collector-1"]
    whole = [event for event in events if event["ph"] == "X" and event["tid"] == threads["trainer"]]
    assert [event["name"] for event in whole] == ["step", "generate", "train"]
    assert [(event["ts"], event["dur"]) for event in whole] == [(5e5, 1.5e6), (5e5, 1e6), (1.5e6, 4e5)]
    assert next(event for event in events if event["ph"] == "i")["args"]["reaction"] == "restarted"
    assert [event["args"] for event in events if event["ph"] == "C" and event["name"] == "reward"] == [{"reward": 0.5}]
    assert path.name == "trace.json"
    assert not list(run.path.glob("*.unfinished"))


def test_rows_that_are_not_whole_make_no_event():
    broken = [{}, {"name": "x"}, {"name": "x", "lane": "a", "start_s": 2, "end_s": 1}, {"name": 1, "lane": "a"}]
    assert [event["ph"] for event in trace_events(broken)] == ["M"]


def test_a_trace_of_a_run_without_spans_is_a_trace(run):
    check_trace(json.loads(write_trace(run).read_text())["traceEvents"])
