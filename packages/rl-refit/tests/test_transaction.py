"""A refit over parties: waiting, leaving, versions, and being both sides at once. Parties are threads here."""

import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from rl_refit import (
    Binding,
    DeadlineError,
    ModuleSink,
    ModuleSource,
    PoisonedError,
    Refit,
    RefitError,
    Region,
    StateDictSource,
)
from rl_refit.errors import AbortedError, PeerError
from rl_refit.transports.stream import SlotStream

sys.path.insert(0, str(Path(__file__).parent / "programs"))
from transaction_world import HANG_S, World, all_well, model, rendezvous, same_weights, together


@pytest.mark.parametrize(("sources", "sinks"), [(1, 1), (2, 1), (1, 2), (2, 3)])
def test_every_sink_gets_every_version_and_all_report_one_digest(tmp_path, sources, sinks):
    with World(HashStore(), tmp_path, sources=sources, sinks=sinks) as world:
        for version in (3, 4, 10):
            world.train()
            reports = all_well(together(*world.calls(version)))
            assert all(same_weights(world.policy, engine) for engine in world.engines)
            assert {report.version for report in reports} == {sink.version for sink in world.sinks} == {version}
            assert len({report.digest for report in reports}) == 1


def test_a_receive_without_a_trainer_ends_and_leaves_the_sink_as_it_was(tmp_path):
    engine = model(5)
    sink = ModuleSink(engine)
    met = rendezvous(HashStore(), sink_rank=0)
    refit = Refit(sink=sink, transport=SlotStream(directory=str(tmp_path)), rendezvous=met)
    for _ in range(2):
        with pytest.raises(DeadlineError, match=r"no refit began within timeout_s=0\.2") as caught:
            refit.receive(timeout_s=0.2)
        assert (caught.value.phase, caught.value.peer) == ("prepare", "source 0")
    assert same_weights(engine, model(5))
    assert sink.version is None
    assert not sink.poisoned
    refit.close()


def test_a_receive_that_waited_in_vain_takes_part_in_the_refit_that_comes_later(tmp_path):
    with World(HashStore(), tmp_path) as world:
        for version in (1, 2):
            for _ in range(2):
                with pytest.raises(DeadlineError):
                    world.receivers[0].receive(timeout_s=0.1)
            all_well(together(*world.calls(version)))
            assert same_weights(world.policy, world.engines[0])


def test_an_engine_may_wait_for_its_trainer_longer_than_a_phase_may_take(tmp_path):
    with World(HashStore(), tmp_path) as world:
        trainer, receiver = world.calls(1)

        def late():
            with world.impatient(*world.receivers, deadline_s=0.1):
                time.sleep(0.5)
            return trainer()

        all_well(together(late, receiver))
        assert same_weights(world.policy, world.engines[0])


def test_a_trainer_gives_up_on_an_engine_that_is_not_there_and_both_go_on_later(tmp_path):
    with World(HashStore(), tmp_path) as world:
        all_well(together(*world.calls(1)))
        with pytest.raises(DeadlineError, match="waiting for sink 0") as caught:
            world.wait_in_vain(2, waiting_for="sink 0")
        assert any("and was alive a moment ago: is it in receive()?" in note for note in caught.value.__notes__)
        with pytest.raises(DeadlineError, match="source 0 gave up in phase prepare, waiting for sink 0"):
            world.receivers[0].receive(timeout_s=HANG_S)  # hears what it missed
        all_well(together(*world.calls(2)))
        assert world.sinks[0].version == 2


def test_an_engine_that_missed_many_refits_goes_on_with_the_latest(tmp_path):
    with World(HashStore(), tmp_path) as world:
        all_well(together(*world.calls(1)))
        for version in range(2, 5):
            with pytest.raises(DeadlineError):
                world.wait_in_vain(version, waiting_for="sink 0")
        with pytest.raises(DeadlineError, match="source 0 gave up in phase prepare, waiting for sink 0"):
            world.receivers[0].receive(timeout_s=HANG_S)
        assert world.receivers[0]._control.refit == world.trainers[0]._control.refit


def test_ranks_of_a_trainer_that_give_different_versions_all_hear_of_it(tmp_path):
    with World(HashStore(), tmp_path, sources=2) as world:
        all_well(together(*world.calls(1)))
        first, second, receiver = world.calls(2)
        del second
        results = together(first, lambda: world.trainers[1](version=3), receiver)
        assert all("source 1 is called with version 3, and source 0 with 2" in str(result) for result in results)
        assert world.sinks[0].version == 1
        all_well(together(*world.calls(3)))


def test_two_refits_of_different_names_use_one_store_at_the_same_time(tmp_path):
    store = HashStore()
    with World(store, tmp_path, name="actor") as actor, World(store, tmp_path, name="critic", sinks=2) as critic:
        critic.train()
        for version in (1, 2, 3):
            actor.train()
            all_well(together(*actor.calls(version), *critic.calls(7 * version)))
            assert (actor.sinks[0].version, critic.sinks[1].version) == (version, 7 * version)
        assert same_weights(actor.policy, actor.engines[0])
        assert same_weights(critic.policy, critic.engines[1])
        assert not same_weights(actor.policy, critic.policy)


def test_who_waits_for_a_party_that_closes_is_told(tmp_path):
    with World(HashStore(), tmp_path, liveness_s=24.0) as world:  # it looks four times in that
        all_well(together(*world.calls(1)))
        waiting = threading.Event()

        def leave():
            waiting.wait(HANG_S)
            world.trainers[0].close()

        def wait():
            waiting.set()
            return world.receivers[0].receive()

        _, error = together(leave, wait)
        assert isinstance(error, PeerError)
        assert "source 0 has left: it closed its Refit" in str(error)
        assert world.sinks[0].version == 1


def test_a_closed_refit_says_so(tmp_path):
    with World(HashStore(), tmp_path) as world:
        all_well(together(*world.calls(1)))
        world.close()
        for call in world.calls(2, timeout_s=None):
            with pytest.raises(RefitError, match="this Refit is closed; make a new one"):
                call()


def test_parties_that_could_not_open_their_transport_agree_anew(tmp_path):
    missing = tmp_path / "later"
    with World(HashStore(), missing) as world:
        results = together(*world.calls(1))
        assert all(isinstance(result, (OSError, RefitError)) for result in results)
        missing.mkdir()
        all_well(together(*world.calls(1)))
        assert same_weights(world.policy, world.engines[0])


@pytest.mark.parametrize("transport", [{}, {"arena": True}, {"share_memory": False}])
def test_processes_that_are_both_sides_refit_each_other(tmp_path, transport):
    policy, engines = model(1), [model(2), model(3)]
    store, directory = HashStore(), {"directory": str(tmp_path)}
    refits = [
        Refit(
            ModuleSource(policy),
            ModuleSink(engine),
            SlotStream(**transport, **directory),
            rendezvous=rendezvous(store, sources=2, sinks=2, source_rank=rank, sink_rank=rank),
            bucket_bytes=1024,
            verify="full",
        )
        for rank, engine in enumerate(engines)
    ]
    for version in (1, 2):
        with torch.no_grad():
            policy[0].weight.add_(version)
        reports = all_well(together(*(partial(refit, version=version) for refit in refits)))
        assert all(same_weights(policy, engine) for engine in engines)
        assert reports[0].digest == reports[1].digest
    together(*(refit.close for refit in refits))


@pytest.mark.parametrize("transport", [{}, {"arena": True}, {"share_memory": False}])
def test_a_process_that_is_both_sides_refits_itself(tmp_path, transport):
    policy, engine = model(1), model(2)
    directory = {"directory": str(tmp_path)}
    met = rendezvous(HashStore(), source_rank=0, sink_rank=0)
    refit = Refit(
        ModuleSource(policy), ModuleSink(engine), SlotStream(**transport, **directory), rendezvous=met, verify="full"
    )
    assert refit(version=4).version == 4
    assert same_weights(policy, engine)
    refit.close()


def test_what_one_party_raises_comes_through_there_and_is_quoted_elsewhere(tmp_path):
    with World(HashStore(), tmp_path, sinks=2) as world:
        all_well(together(*world.calls(1)))
        world.train()
        stage = world.sinks[1].stage

        def refuse(region, tensor, *, stays=False):
            if region.name == "1.weight":
                raise ZeroDivisionError("the engine is not in the mood")
            stage(region, tensor, stays=stays)

        world.sinks[1].stage = refuse
        trainer, first, second = together(*world.calls(2))
        assert type(second) is ZeroDivisionError
        assert "aborted in phase transfer" in second.__notes__[0]
        for error in (trainer, first):
            assert type(error) is AbortedError
            assert "sink 1 gave up in phase transfer" in str(error)
            assert "ZeroDivisionError: the engine is not in the mood" in str(error)
        assert not any(same_weights(world.policy, engine) for engine in world.engines)
        world.sinks[1].stage = stage
        all_well(together(*world.calls(2)))
        assert all(same_weights(world.policy, engine) for engine in world.engines)


def test_a_rank_whose_commit_fails_is_poisoned_where_others_have_committed(tmp_path):
    with World(HashStore(), tmp_path, sinks=2) as world:
        all_well(together(*world.calls(1)))
        commit = world.sinks[1].commit
        world.sinks[1].commit = lambda version: (_ for _ in ()).throw(OSError("no power"))
        trainer, first, second = together(*world.calls(2))
        assert type(second) is OSError
        for error in (trainer, first):
            assert type(error) is RefitError
            assert "sink 1: OSError: no power" in str(error)
            assert (error.phase, error.peer) == ("commit", "sink 1")
        assert world.sinks[0].version == 2
        assert world.sinks[1].poisoned
        world.sinks[1].commit = commit
        all_well(together(*world.calls(3)))
        assert not world.sinks[1].poisoned


def test_ranks_that_share_a_model_are_all_poisoned_by_one_that_fails_and_can_be_refitted_to_the_same_version(tmp_path):
    """Two ranks with half of the rows each: what the first has committed is of no use without the second."""

    def rows(rank):
        return lambda module: [Binding(Region("w", (4 * rank, 0), (4, 3)), (8, 3), module.rows)]

    policy, halves = {"w": torch.randn(8, 3)}, [nn.Module() for _ in range(2)]
    for half in halves:
        half.rows = nn.Parameter(torch.zeros(4, 3))
    sinks = [ModuleSink(half, bindings=rows(rank)) for rank, half in enumerate(halves)]
    store = HashStore()

    def party(source=None, sink=None, **rank):
        transport = SlotStream(directory=str(tmp_path))
        return Refit(source, sink, transport, rendezvous=rendezvous(store, sinks=2, **rank))

    trainer = party(StateDictSource(policy), source_rank=0)
    receivers = [party(sink=sink, sink_rank=rank) for rank, sink in enumerate(sinks)]
    commit = sinks[1].commit
    sinks[1].commit = lambda version: (_ for _ in ()).throw(OSError("no power"))
    calls = [lambda: trainer(version=3), *(lambda refit=refit: refit.receive(timeout_s=HANG_S) for refit in receivers)]
    try:
        results = together(*calls)
        assert all(isinstance(error, (RefitError, OSError)) for error in results)
        for sink in sinks:
            with pytest.raises(PoisonedError):
                sink.check()
        sinks[1].commit = commit
        all_well(together(*calls))
        assert [sink.version for sink in sinks] == [3, 3]
        assert torch.equal(torch.cat([half.rows for half in halves]), policy["w"])
    finally:
        together(*(refit.close for refit in (trainer, *receivers)))


@pytest.mark.parametrize("verify", ["off", "full"])
def test_a_commit_that_the_trainer_did_not_wait_for_is_not_trusted_unless_every_byte_was_read_back(tmp_path, verify):
    policy, engine = model(1), model(2)
    sink, store = ModuleSink(engine), HashStore()
    commit, given_up = sink.commit, threading.Event()

    def late(version):
        watches[-1].deadline_s = 0.0  # the trainer's, which waits for this
        given_up.wait(HANG_S)
        commit(version)

    sink.commit = late
    shared = {"bucket_bytes": 1024, "verify": verify}
    trainer = Refit(
        ModuleSource(policy),
        transport=SlotStream(directory=str(tmp_path), hold=policy),
        rendezvous=rendezvous(store, source_rank=0),
        **shared,
    )
    watches, make_watch = [], trainer._watch
    trainer._watch = lambda: (watches.append(make_watch()), watches[-1])[1]
    receiver = Refit(
        sink=sink,
        transport=SlotStream(directory=str(tmp_path), arena=True),
        rendezvous=rendezvous(store, sink_rank=0),
        **shared,
    )

    def train_on():
        with pytest.raises(DeadlineError, match="phase commit, waiting for sink 0"):
            trainer(version=1)
        with torch.no_grad():
            policy[1].weight.add_(1)  # in the memory that the sink is about to copy
        given_up.set()

    _, error = together(train_on, receiver.receive)
    assert isinstance(error, RefitError)
    assert sink.poisoned
    trainer.close()
    receiver.close()
