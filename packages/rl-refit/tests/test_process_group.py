"""Transports over torch.distributed, with real processes over gloo: everything arrives, and nothing more."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

from rl_refit.buckets import Piece
from rl_refit.errors import DeadlineError, PeerError, RefitError
from rl_refit.layout import Region
from rl_refit.schedule import Stream
from rl_refit.transports import messages
from rl_refit.transports.base import Channel, Numbers, Transport, Watch
from rl_refit.transports.messages import check_header, write_header
from rl_refit.transports.peers import Peers, Process, hops_of, join
from rl_refit.transports.stream import SlotStream

WAYS = ("messages", "hosts", "ring")
TRANSPORTS = ("messages", "hosts")
NCCL_PROCESSES = 2


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    path = Path(__file__).parent / "programs" / "pg_world.py"
    spec = importlib.util.spec_from_file_location("pg_world", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    running = module.World(tmp_path_factory.mktemp("world"))
    yield running
    running.close()


# -- Any number of ranks, any layout ----------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 5])
def test_every_byte_arrives_once_in_any_world_and_nobody_waits_in_a_circle(world, processes):
    # Each seed: up to `processes` source and sink ranks, some in one process, random layouts, nodes, buckets and slots.
    worlds = world.run("shapes", processes=processes, seeds=[100 * processes, 100 * processes + 6])
    assert sum(worlds) >= 6 * len(WAYS)


@pytest.mark.gpu
@pytest.mark.skipif(
    torch.cuda.device_count() < NCCL_PROCESSES, reason="NCCL wants a GPU for each process, and this takes two"
)
def test_every_byte_arrives_once_over_nccl(world):
    assert sum(world.run("shapes", processes=NCCL_PROCESSES, seeds=[0, 20], device="cuda", ways=["messages"])) >= 20


# -- Real modules, through Refit --------------------------------------------------------------------

CASES = [
    ("llama", ("fsdp", 2), ("whole", 1), False),
    ("qwen3_moe", ("whole", 1), ("tp", 2), False),
    ("qwen3_moe", ("fsdp", 2), ("tp", 4), False),
    ("llama", ("fsdp_tp", 4), ("tp", 2), False),
    ("qwen3_moe", ("fsdp_tp", 4), ("whole", 1), False),
    ("llama", ("fsdp", 3), ("whole", 2), False),
    ("qwen3_moe", ("fsdp", 2), ("tp", 2), True),
]


@pytest.mark.parametrize(("model", "sources", "sinks", "colocated"), CASES, ids=str)
def test_an_engine_gets_the_bits_of_a_sharded_policy_and_each_rank_only_its_own(
    world, model, sources, sinks, colocated
):
    processes = sinks[1] if colocated else sources[1] + sinks[1]
    found = world.run(
        "modules",
        processes=processes,
        worlds=WAYS,
        model=model,
        sources=sources,
        sinks=sinks,
        colocated=colocated,
    )
    assert len({process[way][0] for process in found for way in WAYS} - {None}) == 1
    assert {process["messages"][1] for process in found} == {"gloo"}
    assert {process["ring"][1] for process in found} == {"shared memory"}
    assert {process["hosts"][1] for process in found} <= {
        "gloo",
        "shared memory",
        "shared memory and gloo",
        "gloo and shared memory",
        "in process",
    }


def test_replicas_on_one_host_are_fed_once_and_relay_to_one_another(world):
    found = world.run(
        "modules", processes=4, worlds=["messages"], model="llama", sources=["whole", 2], sinks=["whole", 2]
    )
    relayed = [process["messages"][2] for process in found]
    assert relayed[0] == relayed[1] == 0  # the sources
    assert relayed[2] > 0
    assert relayed[3] > 0


# -- Nothing grows ----------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_transfers_leave_no_memory_descriptors_or_threads_behind(world, transport):
    for early, late in world.run("many", processes=2, transport=transport, transfers=300):
        assert late["descriptors"] <= early["descriptors"]
        assert late["threads"] <= early["threads"]
        # One bucket of 64 KiB lost in each of the 200 transfers between would be 12.5 MiB; allocators of
        # threads that start late keep some of their own.
        assert late["resident"] < early["resident"] + 2**23


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_opening_and_closing_leaves_no_descriptors_or_threads_behind(world, transport):
    for early, late in world.run("often", processes=2, transport=transport, times=12):
        assert late["descriptors"] <= early["descriptors"]
        assert late["threads"] <= early["threads"]


# -- Without processes ------------------------------------------------------------------------------


def stream(*sink_ranks):
    made = Stream(number=0, source_rank=0, sink_ranks=sink_ranks, plan=None, bucket_bytes=None)
    vars(made)["buckets"] = ((Piece(Region("t", (0,), (4,)), 0, 16),),)  # as a plan would give them
    return made


def peers(*places, maps=True, device="cpu"):
    """Processes, each given as its host and its parties."""
    processes = tuple(
        Process(parties=parties, host=host, device=device, gpu=f"{n}", visible=("0", "1", "2", "3"))
        for n, (host, *parties) in enumerate((host, *parties) for host, *parties in places)
        for parties in [tuple(parties)]
    )
    return Peers(processes=processes, own=0, maps=maps, on_gpus=device == "cuda")


APART = [("a", "source 0"), ("b", "sink 0"), ("b", "sink 1"), ("b", "sink 2")]


def test_of_a_host_that_shares_no_memory_with_the_source_one_receives_and_the_others_map_its_slots():
    hops = hops_of(stream(1, 0, 2), peers(*APART))
    assert hops[0].receivers == ((2, "sink 1"),)
    assert (hops[2].origin, hops[2].is_mapped) == ((0, "source 0"), False)
    assert hops[2].readers == ((1, "sink 0"), (3, "sink 2"))
    assert [(hops[n].origin, hops[n].is_mapped) for n in (1, 3)] == [((2, "sink 1"), True)] * 2


def test_where_no_memory_is_shared_the_first_sends_to_the_others():
    hops = hops_of(stream(1, 0, 2), peers(*APART, maps=False))
    assert (hops[2].receivers, hops[2].readers) == (((1, "sink 0"), (3, "sink 2")), ())
    assert not hops[1].is_mapped


def test_whoever_is_on_the_host_of_the_source_reads_its_slots():
    hops = hops_of(stream(0, 1, 2), peers(("a", "source 0", "sink 0"), ("a", "sink 1"), ("b", "sink 2")))
    assert hops[0].delivers_here
    assert (hops[0].readers, hops[0].receivers) == (((1, "sink 1"),), ((2, "sink 2"),))


@pytest.mark.parametrize(
    ("hosts", "device", "medium"),
    [("aa", "cpu", "shared memory"), ("ab", "cpu", "gloo"), ("aa", "cuda", "CUDA IPC"), ("ab", "cuda", "NCCL")],
)
def test_each_pair_has_the_medium_of_its_hosts_and_devices(hosts, device, medium):
    assert peers((hosts[0], "source 0"), (hosts[1], "sink 0"), device=device).medium(0, 1) == medium


def test_a_header_names_what_was_expected_and_what_came():
    slot = torch.zeros(1024, dtype=torch.uint8)
    write_header(slot, Numbers(3, 1, 7, 100))
    check_header(slot, Numbers(3, 1, 7, 100), "source 1")
    with pytest.raises(
        RefitError, match="expected refit 3, stream 1, bucket 6, bytes 90 from source 1, got refit 3"
    ) as e:
        check_header(slot, Numbers(3, 1, 6, 90), "source 1")
    assert (e.value.peer, e.value.bucket, e.value.phase) == ("source 1", 6, "transfer")
    slot.zero_()
    with pytest.raises(RefitError, match="got no header at all"):
        check_header(slot, Numbers(3, 1, 6, 90), "source 1")


def test_a_closed_transport_refuses_a_transfer():
    transport = SlotStream()
    assert isinstance(transport, Transport)
    assert transport.extra_bytes == 0
    transport.close()
    transport.finish()
    with pytest.raises(RefitError, match="closed; open it before a transfer"):
        transport.transfer(None, None, Watch(deadline_s=1))


def alone(*, device="cpu", store=None):
    schedule = SimpleNamespace(streams=(stream(0),))
    return Channel(schedule=schedule, source_rank=0, sink_rank=None, slots=2, device=torch.device(device), store=store)


def test_devices_without_a_medium_are_refused():
    with pytest.raises(RefitError, match=r"cpu and cuda; got device='mps'"):
        join(alone(device="mps"), Watch(deadline_s=1), maps=True)


def test_a_peer_that_does_not_come_ends_the_wait_at_the_deadline_by_name():
    with pytest.raises(DeadlineError, match="waiting for sink 0"):
        SlotStream().open(alone(store=HashStore()), Watch(deadline_s=0.1))


def test_other_processes_without_a_store_are_refused():
    with pytest.raises(RefitError, match="the streams join source 0, sink 0, and this process is source 0 alone"):
        join(alone(), Watch(deadline_s=1), maps=True)


def test_a_thread_that_fails_to_connect_says_why_at_once(monkeypatch):
    def make(*place, **where):
        raise ImportError("this release of torch has no such backend")

    monkeypatch.setattr(messages, "_gloo", make)
    ends = {"host": None, "news": None}
    with pytest.raises(PeerError, match="ImportError: this release of torch has no such backend"):
        messages.connect([(0, 1)], peers(*APART), alone(store=HashStore()), watch=Watch(deadline_s=60), **ends)
