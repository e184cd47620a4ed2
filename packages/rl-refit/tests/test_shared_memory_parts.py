"""What the transports of one host are made of, in this process: segments, meeting, and what CUDA IPC refuses."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from rl_refit import DeadlineError, Layout, Manifest, RefitError, TensorMeta, plan_refit
from rl_refit.schedule import make_schedule
from rl_refit.transports.base import Channel, Transport, Watch
from rl_refit.transports.cuda_ipc import CudaIpc, _from_plain, _to_plain
from rl_refit.transports.segment import Segment
from rl_refit.transports.shared_memory import SharedMemory, SharedMemoryRing


def channel(*, source_rank=None, sink_rank=None, store=None, slots=2, elements=100):
    held = Manifest((TensorMeta(name="w", shape=(elements,), dtype="float32", layout=Layout.whole()),))
    return Channel(
        schedule=make_schedule(plan_refit(held, held), routing="unicast", bucket_bytes=512),
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
        transport = SharedMemoryRing(directory=str(directory))
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


@pytest.mark.parametrize("transport", [SharedMemory(), SharedMemoryRing(), CudaIpc()])
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


@pytest.mark.parametrize("here", ["source", "sink"])
def test_another_host_is_refused_on_both_sides(here):
    store = HashStore()
    store.set(f"host of {'sink' if here == 'source' else 'source'} 0", json.dumps({"boot": "b0", "name": "elsewhere"}))
    with pytest.raises(RefitError, match="0 runs on another host, 'elsewhere', than this process"):
        SharedMemoryRing().open(channel(**{f"{here}_rank": 0}, store=store), Watch(deadline_s=60.0))


def test_a_peer_that_never_comes_ends_at_the_deadline(tmp_path):
    for side in ("source", "sink"):
        transport = SharedMemoryRing(directory=str(tmp_path))
        with pytest.raises(DeadlineError, match=r"waiting for (source|sink) 0"):
            transport.open(channel(**{f"{side}_rank": 0}, store=HashStore()), Watch(deadline_s=0.1))
    assert list(tmp_path.iterdir()) == []


def test_sides_that_see_different_directories_are_told(tmp_path):
    store = HashStore()
    store.set("host of source 0", json.dumps({"boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip()}))
    store.set("address of source 0", json.dumps({"directory": str(tmp_path / "elsewhere")}))
    with pytest.raises(RefitError, match=r"says that it listens in .*elsewhere, which is not so here.*--ipc=host"):
        SharedMemoryRing().open(channel(sink_rank=0, store=store), Watch(deadline_s=60.0))


def test_a_directory_of_a_long_name_serves_too(tmp_path):
    directory = tmp_path / ("d" * 120)
    directory.mkdir()
    store = HashStore()
    raised = open_both(
        (directory, channel(source_rank=0, store=store), 60), (directory, channel(sink_rank=0, store=store), 60)
    )
    assert raised == [None, None]


def test_different_numbers_of_slots_are_refused(tmp_path):
    store = HashStore()
    _, error = open_both(
        (tmp_path, channel(source_rank=0, store=store, elements=1000), 60),
        (tmp_path, channel(sink_rank=0, store=store, elements=1000, slots=3), 60),
    )
    assert "the source's memory has 1,024 bytes, and here the schedule needs 1,536" in str(error)


def test_a_transfer_needs_an_open_transport():
    with pytest.raises(RefitError, match="open it before a transfer"):
        SharedMemoryRing().transfer(None, None, Watch(deadline_s=1))


def test_processes_need_a_store_to_meet():
    with pytest.raises(RefitError, match="meet through a store"):
        SharedMemory().open(channel(source_rank=0), Watch(deadline_s=1))


def test_cuda_ipc_refuses_tensors_of_the_cpu_by_name_of_the_device():
    with pytest.raises(RefitError, match="this process's tensors are on 'cpu'; SharedMemory and SharedMemoryRing"):
        CudaIpc().open(channel(source_rank=0, sink_rank=0), Watch(deadline_s=1))


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_cuda_ipc_refuses_expandable_segments(monkeypatch, variable):
    monkeypatch.setenv(variable, "garbage_collection_threshold:0.8, expandable_segments:True")
    on_gpu = channel(source_rank=0, sink_rank=0)
    object.__setattr__(on_gpu, "device", torch.device("cuda:0"))
    with pytest.raises(RefitError, match=f"{variable}=.*leave expandable_segments out"):
        CudaIpc().open(on_gpu, Watch(deadline_s=1))


def test_a_handle_survives_json():
    handle = (0, b"\x00\xff" * 32, 2**40, 512, b"counter", 7, b"", False)
    assert tuple(_from_plain(json.loads(json.dumps(_to_plain(handle))))) == handle
