"""What the transports of one host are made of, in this process: segments, meeting, and what CUDA IPC refuses."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import asdict

import pytest
import torch
from torch.distributed import HashStore

from rl_refit import DeadlineError, Layout, Manifest, RefitError, TensorMeta, plan_refit
from rl_refit.schedule import make_schedule
from rl_refit.transports.base import Channel, Transport, Watch
from rl_refit.transports.memory import Ring, Segment, _from_plain, _to_plain
from rl_refit.transports.peers import _this_process
from rl_refit.transports.stream import SlotStream


def channel(*, source_rank=None, sink_rank=None, store=None, slots=2, elements=100):
    held = Manifest((TensorMeta(name="w", shape=(elements,), dtype="float32", layout=Layout.whole()),))
    return Channel(
        schedule=make_schedule(plan_refit(held, held), bucket_bytes=512),
        source_rank=source_rank,
        sink_rank=sink_rank,
        slots=slots,
        device=torch.device("cpu"),
        store=store,
    )


def open_both(source, sink):
    """Open a ring at both sides, each a (directory, channel, deadline); return what each raised."""
    raised = [None, None]

    def open_one(number, directory, its_channel, deadline_s):
        transport = SlotStream(directory=str(directory))
        try:
            transport.open(its_channel, Watch(deadline_s=deadline_s))
        except RefitError as error:
            raised[number] = error
        transport.close()

    threads = [threading.Thread(target=open_one, args=(number, *side)) for number, side in enumerate((source, sink))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


@pytest.mark.parametrize("transport", [SlotStream(), SlotStream(arena=True)])
def test_each_is_a_transport(transport):
    assert isinstance(transport, Transport)
    assert transport.extra_bytes == 0
    transport.close()
    transport.close()


def test_a_segment_is_the_same_memory_wherever_it_is_mapped(tmp_path):
    one, descriptor = Segment.create(str(tmp_path), 10_000)
    two = Segment(descriptor, 10_000)
    os.close(descriptor)
    one.bytes[7_000] = 3
    assert two.bytes[7_000] == 3
    assert two.bytes.sum() == 3
    assert list(tmp_path.iterdir()) == []


def test_a_segment_too_large_for_its_file_system_is_refused_with_the_numbers():
    state = os.statvfs("/dev/shm")
    nbytes = (state.f_blocks + 1) * state.f_frsize
    total = f"{state.f_blocks * state.f_frsize:,}"
    expected = rf"{nbytes:,} bytes does not fit into /dev/shm, which has [\d,]+ bytes available of {total};"
    with pytest.raises(RefitError, match=expected):
        Segment.create("/dev/shm", nbytes)


def test_a_peer_that_never_comes_ends_at_the_deadline(tmp_path):
    for side in ("source", "sink"):
        transport = SlotStream(directory=str(tmp_path))
        with pytest.raises(DeadlineError, match=r"waiting for (source|sink) 0"):
            transport.open(channel(**{f"{side}_rank": 0}, store=HashStore()), Watch(deadline_s=0.1))
    assert list(tmp_path.iterdir()) == []


def test_sides_that_see_different_directories_are_told(tmp_path):
    store = HashStore()
    processes = [asdict(_this_process((party,), torch.device("cpu"))) for party in ("source 0", "sink 0")]
    store.set("processes", json.dumps({"maps": True, "processes": processes}))
    store.set("address of source 0", json.dumps({"directory": str(tmp_path / "elsewhere")}))
    with pytest.raises(RefitError, match=r"says that it listens in .*elsewhere, which is not so here.*--ipc=host"):
        SlotStream().open(channel(sink_rank=0, store=store), Watch(deadline_s=60.0))


def test_a_directory_of_a_long_name_serves_too(tmp_path):
    directory = tmp_path / ("d" * 120)
    directory.mkdir()
    store = HashStore()
    raised = open_both(
        (directory, channel(source_rank=0, store=store), 60), (directory, channel(sink_rank=0, store=store), 60)
    )
    assert raised == [None, None]


def test_a_transfer_needs_an_open_transport():
    with pytest.raises(RefitError, match="open it before a transfer"):
        SlotStream().transfer(None, None, Watch(deadline_s=1))


def test_processes_need_a_store_to_meet():
    with pytest.raises(RefitError, match="give Refit a rendezvous"):
        SlotStream().open(channel(source_rank=0), Watch(deadline_s=1))


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_cuda_ipc_refuses_expandable_segments(monkeypatch, variable):
    monkeypatch.setenv(variable, "garbage_collection_threshold:0.8, expandable_segments:True")
    with pytest.raises(RefitError, match=f"{variable}=.*leave expandable_segments out"):
        Ring.create([512], on_gpu=True, device=torch.device("cuda:0"), num_readers=1, directory="/dev/shm")


def test_a_handle_survives_json():
    handle = (0, b"\x00\xff" * 32, 2**40, 512, b"counter", 7, b"", False)
    assert tuple(_from_plain(json.loads(json.dumps(_to_plain(handle))))) == handle
