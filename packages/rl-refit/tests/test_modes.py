"""When a module gets its new weights, and what is left of the old ones, in each mode of its sink."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rl_refit import DigestError, ModuleSink, ModuleSource, PoisonedError, Refit, RefitError


def linear(value, *, size=2):
    model = nn.Linear(3, size)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def values(model):
    return {value for tensor in model.parameters() for value in tensor.flatten().tolist()}


def stage(sink, source_model, *, names=("weight", "bias")):
    source = ModuleSource(source_model)
    sink.prepare(source.manifest())
    for region, tensor in source.shards(names):
        sink.stage(region, tensor)


@pytest.mark.parametrize("mode", ["staged", "swap"])
def test_a_committed_refit_serves_the_new_weights_and_the_next_does_too(mode):
    engine = linear(1.0)
    sink = ModuleSink(engine, mode=mode)
    for version, value in [(1, 2.0), (2, 3.0), (5, 4.0)]:
        Refit(ModuleSource(linear(value)), sink)(version=version)
        assert values(engine) == {value}
        assert sink.version == version
        sink.check()


@pytest.mark.parametrize("mode", ["staged", "swap"])
def test_a_refit_that_is_given_up_leaves_the_old_weights(mode):
    engine = linear(1.0)
    sink = ModuleSink(engine, mode=mode)
    stage(sink, linear(2.0), names=("weight",))
    sink.abort()
    assert values(engine) == {1.0}
    sink.check()


def test_swap_keeps_parameters_and_exchanges_their_memory_between_two_banks():
    engine = linear(1.0)
    weight, addresses = engine.weight, [engine.weight.data_ptr()]
    sink = ModuleSink(engine, mode="swap")
    for version in (1, 2, 3):
        Refit(ModuleSource(linear(float(version))), sink)(version=version)
        assert engine.weight is weight
        addresses.append(weight.data_ptr())
    assert addresses[0] == addresses[2] != addresses[1] == addresses[3]
    assert weight.requires_grad


def test_swap_keeps_ties():
    engine, policy = (nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)) for _ in range(2))
    for model in (engine, policy):
        model[1].weight = model[0].weight
    Refit(ModuleSource(policy), ModuleSink(engine, mode="swap"))(version=1)
    assert engine[1].weight is engine[0].weight
    assert torch.equal(engine[1].weight, policy[0].weight)


def test_swap_refuses_what_it_would_tear():
    base = torch.zeros(4, 3)
    part, twice = nn.Module(), nn.Module()
    part.register_buffer("part", base[:2])
    twice.register_buffer("one", base)
    twice.register_buffer("other", base.view(4, 3))
    for module, complaint in [
        (part, "'part' is part of a larger tensor"),
        (twice, "'other' shares the memory of 'one'"),
    ]:
        sink = ModuleSink(module, mode="swap")
        with pytest.raises(RefitError, match=complaint):
            sink.prepare(sink.manifest())
    with pytest.raises(ValueError, match="mode='swap' exchanges whole tensors"):
        ModuleSink(linear(1.0), mode="swap", bindings=lambda _: ())


def test_an_unknown_mode_is_refused_by_name():
    with pytest.raises(ValueError, match="mode='copy' is none of staged, swap"):
        ModuleSink(linear(1.0), mode="copy")


def test_memory_that_stays_is_not_copied_before_the_commit_and_is_forgotten_after_it():
    engine, policy = linear(1.0), linear(2.0)
    sink = ModuleSink(engine)
    source = ModuleSource(policy)
    sink.prepare(source.manifest())
    for region, tensor in source.shards(["weight", "bias"]):
        sink.stage(region, tensor, stays=True)
    assert sink._bank == {}
    sink.commit(1)
    nn.init.constant_(policy.weight, 9.0)
    assert values(engine) == {2.0}
    assert sink._bank == {}


def test_a_tensor_of_which_part_stays_is_whole_in_the_commit():
    engine, policy = linear(1.0), linear(2.0)
    sink = ModuleSink(engine)
    source = ModuleSource(policy)
    sink.prepare(source.manifest())
    for region, tensor in source.shards(["weight", "bias"]):
        rows = type(region)(region.name, region.offsets, (1, *region.shape[1:]))
        rest = type(region)(region.name, (1, *region.offsets[1:]), (1, *region.shape[1:]))
        sink.stage(rows, tensor[:1], stays=True)
        sink.stage(rest, tensor[1:].clone())
    whole = ModuleSink(policy).digest()
    assert sink.digest() == whole
    sink.commit(1)
    assert values(engine) == {2.0}


def test_weights_that_are_not_what_was_committed_poison_the_sink_and_the_version_can_be_refitted():
    engine, spoil = linear(1.0), [True]

    def spoil_once(_):
        if spoil.pop():
            nn.init.constant_(engine.bias, 7.0)  # an engine that writes into its weights as it takes them

    spoil.append(True)
    sink = ModuleSink(engine, on_commit=spoil_once)
    refit = Refit(ModuleSource(linear(2.0)), sink)
    with pytest.raises(DigestError, match="not in the engine after the commit as source 0 sent them:\n  bias"):
        refit(version=1)
    with pytest.raises(PoisonedError, match="could not be confirmed after the commit: DigestError"):
        sink.check()
    assert sink.version is None
    spoil[:] = [False]
    refit(version=1)
    sink.check()
    assert values(engine) == {2.0}
