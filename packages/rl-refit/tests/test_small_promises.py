"""Promises that one line of code keeps each: what would go unnoticed if that line were gone."""

import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from rl_refit import CoverageError, ModuleSink, ModuleSource, Refit, RefitError
from rl_refit.digest import digest_regions
from rl_refit.errors import AbortedError, DeadlineError, DigestError, PeerError
from rl_refit.layout import Region
from rl_refit.module_tensors import Binding
from rl_refit.stores import BoundedStore, Line
from rl_refit.transaction.liveness import Peers
from rl_refit.transports.base import Watch
from rl_refit.transports.stream import SlotStream

sys.path.insert(0, str(Path(__file__).parent / "programs"))
from transaction_world import HANG_S, World, all_well, controls, rendezvous, same_weights, together


def square(value):
    model = nn.Linear(4, 4, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def holder(**tensors):
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return module


def test_a_parameter_that_is_replaced_by_one_that_cannot_be_written_is_refused_at_the_next_refit():
    policy, engine = square(1.0), square(2.0)
    refit = Refit(ModuleSource(policy), ModuleSink(engine))
    refit(version=1)
    engine.weight = nn.Parameter(torch.zeros(4, 1).expand(4, 4))
    with pytest.raises(RefitError, match="'weight' is expanded"):
        refit(version=2)


def test_swap_reaches_a_parameter_that_replaced_another_on_the_same_memory():
    policy, engine = square(1.0), square(2.0)
    refit = Refit(ModuleSource(policy), ModuleSink(engine, mode="swap"))
    for version in (1, 2, 3):
        engine.weight = nn.Parameter(engine.weight.data)
        with torch.no_grad():
            policy.weight.add_(1)
        refit(version=version)
        assert torch.equal(engine.weight, policy.weight)


def test_a_region_of_which_the_sink_has_a_part_only_has_no_digest():
    engine = holder(packed=torch.zeros(2))
    boxes = [Region("w", (0,), (1,)), Region("w", (3,), (1,))]
    sink = ModuleSink(
        engine,
        bindings=lambda module: [
            Binding(box, (4,), module.packed[place : place + 1]) for place, box in enumerate(boxes)
        ],
    )
    with pytest.raises(RefitError, match="is not staged"):
        sink.digest([Region("w", (0,), (4,))])


@pytest.mark.parametrize("mode", ["staged", "swap"])
def test_the_bank_follows_the_dtype_of_the_module(mode):
    engine = square(2.0)
    sink = ModuleSink(engine, mode=mode)
    for version, dtype in enumerate((torch.float32, torch.float64, torch.bfloat16)):
        policy = square(3.0).to(dtype)
        engine.to(dtype)
        source = ModuleSource(policy)
        sink.prepare(source.manifest())
        for region, tensor in source.shards(["weight"]):
            sink.stage(region, tensor)
        assert sink.digest() == source_digest(source)
        sink.commit(version)
        assert engine.weight.dtype == dtype


def source_digest(source):
    boxes = dict(source.shards(["weight"]))
    return digest_regions(boxes, boxes.__getitem__)


def test_what_is_tied_to_a_constant_tensor_is_constant():
    engine = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False))
    engine[1].weight = engine[0].weight
    sink = ModuleSink(engine, constant=("0.weight",))
    assert {meta.feeding for meta in sink.manifest().tensors} == {"constant"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_one_shared_element_is_an_overlap(dtype):
    base = torch.zeros(5, dtype=dtype)
    sink = ModuleSink(holder(one=base[:3], other=base[2:]))
    with pytest.raises(RefitError, match="'one' and 'other' overlap in memory without being tied"):
        sink.prepare(sink.manifest())


def test_the_digest_of_a_box_depends_on_where_it_lies():
    first, second = (Region("w", (offset,), (2,)) for offset in (0, 2))
    assert digest_regions([first], lambda _: torch.ones(2)) != digest_regions([second], lambda _: torch.ones(2))


def test_a_transport_hears_that_a_refit_is_over_whether_it_succeeded_or_not(tmp_path):
    with World(HashStore(), tmp_path) as world:
        heard = []
        all_well(together(*world.calls(1)))
        for refit in (*world.trainers, *world.receivers):
            finish = refit._transport.finish
            refit._transport.finish = lambda refit=refit, finish=finish: (heard.append(refit), finish())
        results = together(*world.calls(1))  # not newer
        assert all(isinstance(result, RefitError) for result in results)
        assert len(heard) == 2
        all_well(together(*world.calls(2)))
        assert len(heard) == 4


def test_every_party_says_that_it_knows_how_a_refit_ended(tmp_path):
    with World(HashStore(), tmp_path, sinks=2) as world:
        all_well(together(*world.calls(1)))
        control = world.trainers[0]._control
        parties = control.rendezvous.parties
        over = {party: control.store.read(f"over/{party}") for party in parties}
        assert over == dict.fromkeys(parties, control.refit)


def test_parties_of_other_settings_are_named_with_both_values(tmp_path):
    store, transport = HashStore(), SlotStream
    refits = [
        Refit(
            ModuleSource(square(1.0)) if rank == "source_rank" else None,
            ModuleSink(square(2.0)) if rank == "sink_rank" else None,
            transport(directory=str(tmp_path)),
            rendezvous=rendezvous(store, **{rank: 0}),
            bucket_bytes=bucket_bytes,
        )
        for rank, bucket_bytes in (("source_rank", 1024), ("sink_rank", 2048))
    ]
    for error in together(lambda: refits[0](version=1), lambda: refits[1].receive(timeout_s=HANG_S)):
        assert isinstance(error, RefitError)
        assert "sink 0 has other settings than source 0: bucket_bytes 2048, not 1024" in str(error)
    together(*(refit.close for refit in refits))


def test_a_commit_that_was_decided_in_the_last_moment_holds_for_who_gave_up_waiting(tmp_path):
    with World(HashStore(), tmp_path) as world:
        all_well(together(*world.calls(1)))
        world.train()
        control = world.receivers[0]._control
        decision = control.decision

        def too_late(watch):
            decision(watch)
            raise DeadlineError("no decision in time")

        control.decision = too_late
        all_well(together(*world.calls(2)))
        assert same_weights(world.policy, world.engines[0])


def test_what_a_party_said_before_it_left_is_heard():
    store = HashStore()
    with controls([store, store], sources=1, sinks=1) as (leader, other):

        def speak_and_leave():
            leader.store.write("last words", 7)
            raise PeerError("source 0 has left")

        assert other._wait("last words", Watch(deadline_s=HANG_S, look_around=speak_and_leave), peer="source 0") == 7


def test_a_party_is_silent_after_just_liveness_s_without_a_count(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("rl_refit.transaction.liveness.monotonic", lambda: clock[0])
    store = HashStore()
    store.set("alive/sink 0", "1")
    bounded = BoundedStore(store, Line(HANG_S, PeerError))
    process = {"host": "elsewhere", "pid": 1, "started": "1"}
    peers = Peers(bounded, {"sink 0": process}, listen_to=["sink 0"], liveness_s=10.0)
    for clock[0] in (100.0, 103.0, 106.0, 109.0):
        peers.check()
    clock[0] = 112.0
    with pytest.raises(PeerError, match=r"sink 0 \(process 1 on elsewhere\) has shown no sign of life for 12\.0 s"):
        peers.check()
    bounded.close()


def test_each_phase_has_its_deadline_from_its_own_beginning(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("rl_refit.transports.base.monotonic", lambda: clock[0])
    watch = Watch(deadline_s=10.0)
    with watch.phase("prepare"):
        clock[0] = 8.0
        watch.check()
    with watch.phase("transfer"):
        clock[0] = 17.5
        watch.check()
        assert watch.remaining_s == 0.5
        clock[0] = 18.5
        with pytest.raises(DeadlineError, match=r"phase transfer: 10\.500 s so far"):
            watch.check()


def test_tensors_that_stay_are_not_copied_before_the_commit():
    sink = ModuleSink(square(2.0))
    Refit(ModuleSource(square(1.0)), sink)(version=1)
    assert sink._bank == {}


def test_a_transfer_in_process_ends_at_the_piece_that_took_too_long(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("rl_refit.transports.base.monotonic", lambda: clock[0])
    sink, staged = ModuleSink(nn.Linear(4, 4)), []

    def slow(region, tensor, *, stays=False):
        staged.append(region)
        clock[0] += 0.3

    sink.stage = slow
    with pytest.raises(DeadlineError, match="phase transfer, bucket 0, tensor 'weight'"):
        Refit(ModuleSource(nn.Linear(4, 4)), sink, deadline_s=0.2)(version=1)
    assert len(staged) == 1


def test_every_difference_of_a_tensor_is_listed():
    with pytest.raises(CoverageError) as caught:
        Refit(ModuleSource(nn.Linear(4, 4).double()), ModuleSink(nn.Linear(4, 5)))(version=1)
    lines = [line for line in caught.value.mismatched if line.startswith("weight: ")]
    assert [line.split()[1] for line in lines] == ["shape", "dtype"]


def test_both_places_of_one_box_are_confirmed():
    engine, policy = holder(kv=torch.zeros(4, 3)), holder(k=torch.ones(2, 3))
    sink = ModuleSink(
        engine,
        bindings=lambda module: [
            Binding(Region("k", (0, 0), (2, 3)), (2, 3), half) for half in (module.kv[:2], module.kv[2:])
        ],
        on_commit=lambda _: engine.kv[3].zero_(),
    )
    with pytest.raises(DigestError, match="lies in several places, which differ"):
        Refit(ModuleSource(policy), sink)(version=1)
    assert sink.poisoned


def test_who_was_busy_while_the_leader_went_on_hears_at_once(tmp_path):
    with World(HashStore(), tmp_path) as world:
        (leader,), (busy,) = world.trainers, world.receivers
        all_well(together(*world.calls(1)))
        stage, is_busy, went_on = world.sinks[0].stage, threading.Event(), threading.Event()

        def wait_and_stage(*arguments, **more):
            is_busy.set()
            went_on.wait(HANG_S)
            stage(*arguments, **more)

        def give_up():
            if is_busy.is_set():
                raise RefitError("the leader does not wait for who is busy")

        def go_on():
            leader.look_around = give_up
            for version in (2, 3, 4, 5):
                with pytest.raises(RefitError, match="does not wait"):
                    leader(version=version)
            del leader.look_around
            went_on.set()

        world.sinks[0].stage = wait_and_stage
        _, error = together(go_on, busy.receive)
        assert isinstance(error, AbortedError)
        assert "up while this party was busy or stopped" in str(error)
        with pytest.raises(RefitError, match="does not wait"):
            busy.receive(timeout_s=HANG_S)  # of the last one that it missed
        all_well(together(*world.calls(6)))
