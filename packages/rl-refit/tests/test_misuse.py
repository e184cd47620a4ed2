"""What people write by mistake, and what they are told."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from rl_refit import ModuleSink, ModuleSource, Refit, RefitError, Rendezvous, SlotStream, StateDictSource


def meeting(address=None, **more):
    return Rendezvous(address or HashStore(), num_sources=1, num_sinks=1, **more)


def test_things_of_another_kind_are_named_with_what_to_write():
    policy, engine = nn.Linear(2, 2), nn.Linear(2, 2)
    source, sink = ModuleSource(policy), ModuleSink(engine)
    with pytest.raises(TypeError, match=r"transport is the class SlotStream; write SlotStream\(…\)"):
        Refit(source, transport=SlotStream, rendezvous=meeting(source_rank=0))
    with pytest.raises(TypeError, match="transport is a str, which has not the methods of Transport"):
        Refit(source, transport="shm", rendezvous=meeting(source_rank=0))
    half = SimpleNamespace(manifest=source.manifest, shards=source.shards)
    with pytest.raises(TypeError, match=r"has not the methods of WeightSource \(device\)"):
        Refit(half, sink)
    with pytest.raises(TypeError, match=r"source is a Linear, .* a module goes into ModuleSource or ModuleSink"):
        Refit(policy, sink)
    with pytest.raises(TypeError, match="rendezvous is a str; write Rendezvous"):
        Refit(source, transport=SlotStream(), rendezvous="tcp://127.0.0.1:1")
    for wrong in (ModuleSource, ModuleSink):
        with pytest.raises(
            TypeError, match=r"expected an nn\.Module, got OrderedDict; a mapping of tensors is a StateDictSource"
        ):
            wrong(policy.state_dict())


class HandsOn:
    """All that it does is what another does; no method of its own is there for a check of the class to find."""

    def __init__(self, other):
        self.other = other

    def __getattr__(self, name):
        return getattr(self.other, name)


def test_what_hands_on_the_methods_of_a_source_or_sink_is_one():
    policy, engine = nn.Linear(2, 2), nn.Linear(2, 2)
    Refit(HandsOn(ModuleSource(policy)), HandsOn(ModuleSink(engine)))(version=1)
    torch.testing.assert_close(engine.weight, policy.weight, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("address", "complaint"),
    [
        ("127.0.0.1:29555", "is neither tcp://host:port nor file:///path, nor a store"),
        ("tcp://127.0.0.1", "needs a host and a port, as in tcp://127.0.0.1:29555"),
        ("file://runs/store", "needs three slashes, file:///absolute/path; 'runs' is a host"),
        ("file:///no/such/directory/store", "/no/such/directory is no directory; create it first"),
    ],
)
def test_an_address_that_leads_nowhere_is_refused_at_once(address, complaint):
    with pytest.raises(ValueError, match=complaint):
        meeting(address, sink_rank=0)


def test_a_pattern_may_be_a_single_string():
    policy, engine = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), nn.Sequential(nn.Linear(2, 2))
    Refit(ModuleSource(policy, exclude="1.*"), ModuleSink(engine))(version=1)
    assert torch.equal(engine[0].weight, policy[0].weight)


def test_one_thread_at_a_time():
    inside, go_on = threading.Event(), threading.Event()

    sink = ModuleSink(nn.Linear(2, 2), on_commit=lambda _: (inside.set(), go_on.wait(60)))
    refit = Refit(ModuleSource(nn.Linear(2, 2)), sink)
    thread = threading.Thread(target=refit, kwargs={"version": 1})
    thread.start()
    try:
        assert inside.wait(60)
        with pytest.raises(RefitError, match="another thread is in this Refit"):
            refit(version=2)
    finally:
        go_on.set()
        thread.join(60)
    assert sink.version == 1


def test_close_ends_a_receive_that_waits():
    refit = Refit(sink=ModuleSink(nn.Linear(2, 2)), transport=SlotStream(), rendezvous=meeting(sink_rank=0))
    raised = []

    def receive():
        try:
            refit.receive()
        except RefitError as error:
            raised.append(str(error))

    thread = threading.Thread(target=receive)
    thread.start()
    refit.close()
    thread.join(60)
    assert not thread.is_alive()
    assert raised == ["this Refit is closed; make a new one"]


def test_a_snapshot_that_nobody_updates_is_seen_in_the_report():
    policy, engine = nn.Linear(2, 2), nn.Linear(2, 2)
    snapshot = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    refit = Refit(StateDictSource(snapshot), ModuleSink(engine))
    assert refit(version=1).same_as is None
    nn.init.zeros_(policy.weight)
    report = refit(version=2)
    assert report.same_as == 1
    assert "the same bytes as version 1" in report.explain()
    snapshot["weight"].zero_()
    assert refit(version=3).same_as is None


def test_a_tensor_that_is_declared_constant_and_trained_all_the_same_is_in_the_report():
    policy, engine = nn.Linear(2, 2), nn.Linear(2, 2)
    report = Refit(ModuleSource(policy), ModuleSink(engine, constant="bias"))(version=1)
    assert report.kept == ("bias",)
    assert report.explain().endswith("1 tensors kept as they are")


def test_a_dtype_alone_casts_parameters_and_no_buffers():
    policy, engine = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    engine.weight.data, engine.bias.data = engine.weight.data.bfloat16(), engine.bias.data.bfloat16()
    nn.init.uniform_(policy.running_var)
    Refit(ModuleSource(policy, cast=torch.bfloat16), ModuleSink(engine))(version=1)
    assert torch.equal(engine.running_var, policy.running_var)
    assert torch.equal(engine.weight, policy.weight.bfloat16())
