"""Transports over torch.distributed, with real processes over gloo: everything arrives, and nothing more."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

from rl_refit.buckets import Piece
from rl_refit.errors import DeadlineError, RefitError
from rl_refit.layout import Region
from rl_refit.schedule import Stream
from rl_refit.transports.base import Channel, Transport, Watch
from rl_refit.transports.broadcast import Broadcast
from rl_refit.transports.groups import Address, backend_for
from rl_refit.transports.point_to_point import PointToPoint
from rl_refit.transports.seating import Seating, hop_of, take_seats
from rl_refit.transports.wire import check_header, slots_of, write_header

TRANSPORTS = ("point_to_point", "broadcast")
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
    worlds = world.run("shapes", processes=processes, seeds=[100 * processes, 100 * processes + 7])
    assert sum(worlds) >= 14


def test_a_group_of_the_users_own_serves_as_well(world):
    assert sum(world.run("shapes", processes=3, seeds=[40, 52], one_group=True)) >= 24


@pytest.mark.gpu
@pytest.mark.skipif(
    torch.cuda.device_count() < NCCL_PROCESSES, reason="NCCL wants a GPU for each process, and this takes two"
)
def test_every_byte_arrives_once_over_nccl(world):
    assert sum(world.run("shapes", processes=NCCL_PROCESSES, seeds=[0, 20], device="cuda")) >= 40


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
        worlds=TRANSPORTS,
        model=model,
        sources=sources,
        sinks=sinks,
        colocated=colocated,
    )
    digests = {name: {process[name][0] for process in found} for name in TRANSPORTS}
    assert digests["point_to_point"] == digests["broadcast"]
    assert len(digests["broadcast"]) == 1
    assert None not in digests["broadcast"]
    assert {process["point_to_point"][1] for process in found} == {"point-to-point over gloo"}


def test_replicas_on_one_host_are_fed_once_and_relay_to_one_another(world):
    found = world.run(
        "modules", processes=4, worlds=["point_to_point"], model="llama", sources=["whole", 2], sinks=["whole", 2]
    )
    relayed = [process["point_to_point"][2] for process in found]
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
    return Stream(number=0, source_rank=0, sink_ranks=sink_ranks, buckets=((Piece(Region("t", (0,), (4,)), 0, 16),),))


def seated(own, **processes):
    return Seating(processes={name.replace("_", " "): number for name, number in processes.items()}, own=own)


def test_the_first_sink_relays_to_the_others():
    apart = {"source_0": 0, "sink_0": 1, "sink_1": 2, "sink_2": 3}
    hops = [hop_of(stream(1, 0, 2), seated(own, **apart)) for own in range(5)]
    assert [hop.targets for hop in hops[:4]] == [((2, "sink 1"),), (), ((1, "sink 0"), (3, "sink 2")), ()]
    assert [hop.origin for hop in hops[:4]] == [None, (2, "sink 1"), (0, "source 0"), (2, "sink 1")]
    assert [hop.delivers_here for hop in hops[:4]] == [False, True, True, True]
    assert hops[4] is None


def test_a_source_that_is_the_first_sink_sends_to_the_others_itself():
    hop = hop_of(stream(0, 1, 2), seated(0, source_0=0, sink_0=0, sink_1=1, sink_2=2))
    assert (hop.origin, hop.targets, hop.delivers_here) == (None, ((1, "sink 1"), (2, "sink 2")), True)
    hop = hop_of(stream(0, 1, 2), seated(2, source_0=0, sink_0=0, sink_1=1, sink_2=2))
    assert (hop.origin, hop.targets, hop.delivers_here) == ((0, "source 0"), (), True)


def test_nothing_is_handed_back_to_where_it_came_from():
    places = {"source_0": 0, "sink_0": 1, "sink_1": 0}
    source, first = (hop_of(stream(0, 1), seated(own, **places)) for own in range(2))
    assert (source.targets, source.delivers_here) == (((1, "sink 0"),), True)
    assert first.targets == ()


def test_a_header_names_what_was_expected_and_what_came():
    (slot,) = slots_of(100, 1, torch.device("cpu"))
    write_header(slot, (3, 1, 7, 100))
    check_header(slot, (3, 1, 7, 100), "source 1")
    with pytest.raises(
        RefitError, match="expected refit 3, stream 1, bucket 6, bytes 90 from source 1, got refit 3"
    ) as e:
        check_header(slot, (3, 1, 6, 90), "source 1")
    assert (e.value.peer, e.value.bucket, e.value.phase) == ("source 1", 6, "transfer")
    slot.zero_()
    with pytest.raises(RefitError, match="got no header at all"):
        check_header(slot, (3, 1, 6, 90), "source 1")


def test_slots_hold_a_header_and_a_bucket_and_none_are_made_for_nothing():
    assert [slot.nbytes for slot in slots_of(513, 3, torch.device("cpu"))] == [512 + 1024] * 3
    assert slots_of(0, 2, torch.device("cpu")) == ()
    assert slots_of(8, 0, torch.device("cpu")) == ()


@pytest.mark.parametrize("kind", [Broadcast, PointToPoint])
def test_both_are_transports_that_refuse_a_transfer_when_closed(kind):
    transport = kind()
    assert isinstance(transport, Transport)
    assert transport.extra_bytes == 0
    transport.close()
    transport.finish()
    with pytest.raises(RefitError, match="closed; open it before a transfer"):
        transport.transfer(None, None, Watch(deadline_s=1))
    with pytest.raises(ValueError, match="a host or an interface, not both"):
        kind(host="localhost", interface="lo")


def test_devices_without_a_backend_are_refused():
    assert [backend_for(torch.device(name)) for name in ("cpu", "cuda:1")] == ["gloo", "nccl"]
    with pytest.raises(RefitError, match=r"cpu and cuda; got device='mps'"):
        backend_for(torch.device("mps"))
    assert Address().host is None


def test_a_peer_that_does_not_come_ends_the_wait_at_the_deadline_by_name():
    channel = Channel(
        schedule=SimpleNamespace(streams=(stream(0),)),
        source_rank=0,
        sink_rank=None,
        slots=2,
        device=torch.device("cpu"),
        store=HashStore(),
    )
    with pytest.raises(DeadlineError, match="waiting for sink 0"):
        PointToPoint().open(channel, Watch(deadline_s=0.1))


def test_other_processes_without_a_store_are_refused():
    schedule = SimpleNamespace(streams=(stream(0),))
    channel = Channel(schedule=schedule, source_rank=0, sink_rank=None, slots=2, device=torch.device("cpu"), store=None)
    with pytest.raises(RefitError, match="the streams join source 0, sink 0, and this process is source 0 alone"):
        take_seats(channel, Watch(deadline_s=1))
