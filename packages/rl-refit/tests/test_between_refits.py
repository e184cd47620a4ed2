"""What a module may do between two refits, what a sink remembers, and what two parties may not share."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import HashStore
from torch.multiprocessing.reductions import StorageWeakRef

from rl_refit import CoverageError, ModuleSink, ModuleSource, Refit, RefitError
from rl_refit.errors import PeerError
from rl_refit.layout import Region
from rl_refit.module_tensors import Binding
from rl_refit.transaction.control import Control

sys.path.insert(0, str(Path(__file__).parent / "programs"))
from transaction_world import World, all_well, rendezvous, same_weights, together, watch


def square(value):
    model = nn.Linear(4, 4, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def holder(**tensors):
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return module


@pytest.mark.parametrize("side", ["source", "sink"])
def test_a_weight_that_was_transposed_in_its_own_memory_arrives_as_the_module_sees_it(side):
    policy, engine = square(1.0), square(2.0)
    refit = Refit(ModuleSource(policy), ModuleSink(engine))
    refit(version=1)
    weight = (policy if side == "source" else engine).weight
    weight.data = weight.data.t()  # same address, shape and dtype
    with torch.no_grad():
        policy.weight.copy_(torch.arange(16.0).view(4, 4))
    refit(version=2)
    assert torch.equal(engine.weight, policy.weight)


@pytest.mark.parametrize("mode", ["staged", "swap"])
def test_weights_that_a_module_gave_up_are_freed(mode):
    policy, engine = square(1.0), square(2.0)
    refit = Refit(ModuleSource(policy), ModuleSink(engine, mode=mode))
    refit(version=1)
    moved = [policy] if mode == "swap" else [policy, engine]  # a swap owns two banks
    old = [StorageWeakRef(model.weight.data.untyped_storage()) for model in moved]
    for model in moved:
        model.weight.data = model.weight.data.clone()
    assert all(storage.expired() for storage in old)


def test_memory_that_is_no_parameter_and_no_buffer_cannot_be_bound():
    engine = holder(norm=torch.ones(3))
    engine.packed = torch.zeros(4, 4)
    sink = ModuleSink(engine, bindings=lambda module: [Binding(Region("w", (0, 0), (4, 4)), (4, 4), module.packed)])
    with pytest.raises(RefitError, match="bound to a copy, or to memory of no parameter and no buffer"):
        sink.manifest()


def test_a_refit_under_inference_mode_does_not_spoil_the_next():
    for mode in ("staged", "swap"):
        policy, engine = square(1.0), square(2.0)
        source = ModuleSource(policy)

        class Passing:
            """A source whose tensors do not stay."""

            device, manifest, shards = source.device, staticmethod(source.manifest), staticmethod(source.shards)

        refit = Refit(Passing(), ModuleSink(engine, mode=mode))
        with torch.inference_mode():
            refit(version=1)
        refit(version=2)
        assert torch.equal(engine.weight, policy.weight)
        assert not engine.weight.is_inference()


@pytest.mark.parametrize("mode", ["staged", "swap"])
def test_a_trainer_and_an_engine_that_share_memory_are_refused_with_nothing_touched(mode):
    policy = holder(a=torch.zeros(3), b=torch.ones(3))
    engine = holder(a=policy.b, b=policy.a)
    sink = ModuleSink(engine, mode=mode)
    with pytest.raises(RefitError, match="lie in the sink's own memory"):
        Refit(ModuleSource(policy), sink)(version=1)
    assert policy.a.tolist() == [0.0] * 3
    assert policy.b.tolist() == [1.0] * 3
    assert not sink.poisoned


def test_elements_of_another_dtype_in_a_bound_storage_are_counted():
    pool = torch.zeros(64, dtype=torch.uint8)
    engine = holder(b=pool[:32].view(torch.bfloat16), a=pool[32:].view(torch.float32))
    sink = ModuleSink(engine, bindings=lambda module: [Binding(Region("w", (0,), (16,)), (16,), module.b)])
    with pytest.raises(CoverageError, match="a: 8 of 8 elements"):
        sink.manifest()


def test_plain_tensors_that_overlap_are_refused_beside_bound_ones_too():
    weight = torch.zeros(4, 4)
    engine = holder(q=torch.zeros(3), one=weight, other=weight.t())
    sink = ModuleSink(engine, bindings=lambda module: [Binding(Region("w", (0,), (3,)), (3,), module.q)])
    with pytest.raises(RefitError, match="overlap in memory without being tied"):
        sink.prepare(sink.manifest())


def test_models_without_tensors_are_refitted_with_nothing():
    assert Refit(ModuleSource(nn.Identity()), ModuleSink(nn.Identity()))(version=1).bytes == 0


def test_a_sink_that_is_poisoned_before_its_commit_keeps_the_version_it_has():
    policy, engine = square(1.0), square(2.0)
    sink = ModuleSink(engine)
    refit = Refit(ModuleSource(policy), sink)
    refit(version=10)
    refit(version=20)
    sink.prepare(ModuleSource(policy).manifest())
    sink.poison("in doubt about version 30")
    sink.abort()
    assert sink.version == 20
    with pytest.raises(RefitError, match="version 15 is not newer than the sink's 20"):
        refit(version=15)


def test_a_replica_that_has_committed_what_others_have_not_takes_the_same_version_again(tmp_path):
    with World(HashStore(), tmp_path, sinks=2) as world:
        all_well(together(*world.calls(1)))
        world.train()
        commit = world.sinks[1].commit
        world.sinks[1].commit = lambda version: (_ for _ in ()).throw(OSError("no power"))
        together(*world.calls(2))
        assert [sink.version for sink in world.sinks] == [2, 1]
        assert [sink.poisoned for sink in world.sinks] == [False, True]
        world.sinks[1].commit = commit
        all_well(together(*world.calls(2)))
        assert all(same_weights(world.policy, engine) for engine in world.engines)
        assert all(isinstance(result, RefitError) for result in together(*world.calls(2)))


def test_who_is_interrupted_while_it_tells_the_others_closes_its_transaction(tmp_path):
    with World(HashStore(), tmp_path) as world:
        all_well(together(*world.calls(1)))
        stage, decide = world.sinks[0].stage, world.receivers[0]._control.decide

        def interrupt(*_, **__):
            raise KeyboardInterrupt

        world.sinks[0].stage = world.receivers[0]._control.decide = interrupt
        with world.impatient(*world.trainers, deadline_s=1.0):  # nobody tells them
            together(*world.calls(2))
        world.sinks[0].stage, world.receivers[0]._control.decide = stage, decide
        all_well(together(*world.calls(2)))


def test_a_second_refit_of_one_name_in_one_process_is_refused_before_it_reads_the_keys_of_the_first(tmp_path):
    store = HashStore()
    with World(store, tmp_path) as first, World(store, tmp_path) as second:
        all_well(together(*first.calls(1)))
        for error in together(*second.calls(1)):
            assert isinstance(error, PeerError)
            assert "under the name 'test' before; give every party its own rank" in str(error)


def test_of_two_processes_with_one_rank_only_one_takes_part():
    store = HashStore()
    made = [Control(rendezvous(store, source_rank=0)) for _ in range(2)]
    results = together(*(lambda control=control: control.meet(watch(control, deadline_s=0.5)) for control in made))
    assert sum("has been source 0 under the name" in str(result) for result in results) == 1
    together(*(control.close for control in made))


def test_a_store_that_is_lost_after_the_commit_does_not_make_the_refit_fail(tmp_path):
    with World(HashStore(), tmp_path) as world:
        all_well(together(*world.calls(1)))

        def lost():
            world.trainers[0]._control.under_way = False
            raise PeerError("the store is out of reach")

        world.trainers[0]._control.over = lost
        all_well(together(*world.calls(2)))
