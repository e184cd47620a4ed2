"""Transports of one host between real processes: arrival, memory, faults, and what is left behind."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

BUCKET_BYTES = 2048
SLOTS = 2
TRANSPORTS = ("ring", "arena")


@pytest.fixture(scope="module")
def program():
    """The process whose children the parties are."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "programs" / "shm_parties.py")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        yield process
        process.stdin.close()


@pytest.fixture
def directory():
    path = tempfile.mkdtemp(dir="/dev/shm")
    yield path
    shutil.rmtree(path)


@pytest.fixture
def run(program, directory, tmp_path):
    """Run parties of one refit: their results, None for one that was killed."""
    stores = map(str, itertools.count())

    def run_parties(transport, parties, *, sources=1, sinks=1, **options):
        common = {
            "transport": transport,
            "sources": sources,
            "sinks": sinks,
            "directory": directory,
            "store": str(tmp_path / f"store{next(stores)}"),
            "bucket_bytes": BUCKET_BYTES,
            "slots": SLOTS,
            **options,
        }
        print(json.dumps([common | party for party in parties]), file=program.stdin, flush=True)
        return json.loads(program.stdout.readline())

    return run_parties


def separate(sources, sinks):
    return [{"source_rank": i} for i in range(sources)] + [{"sink_rank": j} for j in range(sinks)]


SOURCE, SINK = separate(1, 1)


def source_with(fault, **where):
    return [SOURCE | {"fault": {"kind": fault, **where}}, SINK]


def sink_with(fault, **where):
    return [SOURCE, SINK | {"fault": {"kind": fault, **where}}]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("sources", "sinks"), [(1, 1), (2, 1), (1, 2), (2, 2), (3, 2)])
def test_every_bit_arrives_in_every_refit(run, transport, sources, sinks):
    results = run(transport, separate(sources, sinks), sources=sources, sinks=sinks, refits=3)
    assert [result.get("message") for result in results] == [None] * (sources + sinks)
    assert results[0]["buckets"] > 10 if transport == "ring" else results[0]["buckets"] <= sources * sinks


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_process_may_be_on_both_sides(run, transport):
    both = [{"source_rank": 0, "sink_rank": 0}, {"source_rank": 1, "sink_rank": 1}]
    results = run(transport, both, sources=2, sinks=2, refits=3)
    assert [result.get("message") for result in results] == [None, None]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_whole_refit_goes_through_it(run, transport):
    source, *sinks = run(transport, separate(1, 2), sinks=2, public=True)
    assert {result["digest"] for result in (source, *sinks)} == {source["digest"]}
    assert source["verified"] == "every byte"
    if transport == "arena":
        assert source["extra_bytes"] < 4 * 512  # its parameters live there


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_ring_costs_its_slots_and_nothing_else(run, slots):
    source, sink = run("ring", separate(1, 1), slots=slots)
    assert source["slot_bytes"] <= BUCKET_BYTES
    assert source["extra_bytes"] == slots * (512 + -(-source["slot_bytes"] // 512) * 512)  # with their headers
    assert sink["extra_bytes"] == 0  # the very same memory
    for party in (source, sink):
        assert source["extra_bytes"] <= party["mapped"] < source["extra_bytes"] + 4096  # whole pages


def test_an_arena_costs_one_copy_of_what_is_sent(run):
    source, sink = run("arena", separate(1, 1))
    assert source["extra_bytes"] == 512 + -(-source["slot_bytes"] // 512) * 512  # with its header
    assert sink["extra_bytes"] == 0
    assert sink["mapped"] == source["mapped"]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_no_file_has_a_name_once_all_are_connected(run, transport):
    assert [result["after_open"] for result in run(transport, separate(2, 1), sources=2)] == [[], [], []]


@pytest.mark.slow
def test_thousands_of_refits_cost_no_more_than_one(run):
    for transport in TRANSPORTS:
        for result in run(transport, separate(1, 1), refits=3000):
            half, end = result["usage"]
            assert end["resident"] - half["resident"] < 2**21  # 2 KiB lost in each of 1,500 refits would be 3 MiB
            assert end["fds"] == half["fds"]
            assert end["files"] == half["files"] == []


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("parties", "survivor", "dead"), [(source_with, 1, "source 0"), (sink_with, 0, "sink 0")])
def test_a_dead_peer_is_named_at_every_bucket_and_leaves_nothing_behind(
    run, directory, transport, parties, survivor, dead
):
    buckets = run(transport, separate(1, 1))[0]["buckets"]
    for bucket in range(buckets):
        results = run(transport, parties("kill", bucket=bucket), barrier=False)
        assert results[1 - survivor] is None
        assert (results[survivor]["error"], results[survivor]["peer"]) == ("PeerError", dead), (bucket, results)
        assert results[survivor]["phase"] == "transfer"
        assert list(Path(directory).iterdir()) == []


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("parties", "survivor", "silent"), [(source_with, 1, "source 0"), (sink_with, 0, "sink 0")])
def test_a_stopped_peer_ends_at_the_deadline(run, transport, parties, survivor, silent):
    results = run(transport, parties("stop", bucket=0), barrier=False, deadline_s=0.4)
    assert (results[survivor]["error"], results[survivor]["peer"]) == ("DeadlineError", silent)
    assert f"waiting for {silent}" in results[survivor]["message"]


def test_a_dead_peer_is_seen_though_a_process_that_it_forked_lives_on(run, tmp_path):
    child = tmp_path / "child"
    specs = source_with("die with a child", bucket=2)
    results = run("ring", specs, barrier=False, child=str(child))
    os.kill(int(child.read_text()), signal.SIGKILL)  # it was alive until now
    assert (results[1]["error"], results[1]["peer"]) == ("PeerError", "source 0")


@pytest.mark.parametrize(
    ("fault", "expected", "got"),
    [
        ("drop", "bucket 3", "bucket 4"),
        ("duplicate", "bucket 4", "bucket 3"),
        ("reorder", "bucket 3", "bucket 4"),
    ],
)
def test_a_bucket_that_is_not_next_is_refused_by_name(run, fault, expected, got):
    results = run("ring", source_with(fault, bucket=3), barrier=False)
    assert results[1]["error"] == "RefitError"
    wanted, came = results[1]["message"].split("and got")
    assert expected in wanted
    assert got in came
    assert results[1]["peer"] == "source 0"
    assert results[0]["error"] == "PeerError"  # the sink's process has ended


def test_what_is_no_token_is_refused(run):
    results = run("ring", source_with("garbage", bucket=3), barrier=False)
    assert "got (5 bytes: b'hello')" in results[1]["message"]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("parties", [source_with, sink_with])
@pytest.mark.parametrize("bucket", [0, 3])
def test_a_refit_succeeds_after_one_that_was_given_up(run, transport, parties, bucket):
    specs = parties("give up", bucket=min(bucket, 0) if transport == "arena" else bucket)
    results = run(transport, specs, refits=3, disturbed=1, deadline_s=0.3)
    assert [result.get("message") for result in results] == [None, None]


@pytest.fixture
def small_file_system(directory):
    path = Path(directory) / "small"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "none", path], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("only root may mount a file system")
    yield str(path)
    subprocess.run(["umount", path], check=True)


def test_a_full_file_system_is_an_error_and_no_bus_error(run, small_file_system):
    parties = [SOURCE, SINK | {"open_deadline_s": 0.5}]  # it waits in vain
    source, _ = run("arena", parties, directory=small_file_system)
    assert source["error"] == "RefitError"
    assert re.search(r"of 2\d,\d{3} bytes does not fit .* has 8,192 bytes available of 8,192", source["message"])
    assert "--shm-size" in source["message"]
    assert list(Path(small_file_system).iterdir()) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA IPC shares memory of GPUs")
@pytest.mark.parametrize(("sources", "sinks"), [(1, 1), (2, 1), (1, 2)])
def test_every_bit_arrives_between_gpus(run, sources, sinks):
    results = run("ring", separate(sources, sinks), sources=sources, sinks=sinks, refits=3, device="cuda")
    assert [result.get("message") for result in results] == [None] * (sources + sinks)
