"""A module whose parameters live in the arena of a `SlotStream`."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from rl_refit import ModuleSink, ModuleSource, RefitError, plan_refit
from rl_refit.schedule import make_schedule
from rl_refit.transports.base import Channel, Inbox, Outbox, Watch
from rl_refit.transports.stream import SlotStream


def policy():
    torch.manual_seed(0)
    module = nn.ModuleDict(
        {"embed": nn.Embedding(11, 8), "head": nn.Linear(8, 11, bias=False), "norm": nn.Linear(8, 3)}
    )
    module["head"].weight = module["embed"].weight
    module.register_buffer("scale", torch.arange(5, dtype=torch.bfloat16))
    return module


class OneProcess:
    """A refit in one process, by hand."""

    def __init__(self, module, transport):
        self.source, self.sink = ModuleSource(module), ModuleSink(copy.deepcopy(module))
        self.transport, self.refits = transport, 0
        plan = plan_refit(self.source.manifest(), self.sink.manifest())
        self.schedule = make_schedule(plan, bucket_bytes=None)
        self.channel = Channel(
            schedule=self.schedule, source_rank=0, sink_rank=0, slots=2, device=torch.device("cpu"), store=None
        )
        transport.open(self.channel, Watch(deadline_s=60.0))

    def refit(self):
        self.refits += 1
        watch = Watch(deadline_s=60.0)
        self.sink.prepare(self.source.manifest())
        outbox = Outbox(self.source, self.schedule, watch, self.refits)
        inbox = Inbox(self.sink, self.schedule, watch, self.refits)
        self.transport.transfer(outbox, inbox, watch)
        self.sink.commit(self.refits)
        self.transport.finish()

    def engine(self):
        return self.sink._reader._module


@pytest.fixture
def transport():
    transport = SlotStream(arena=True)
    yield transport
    transport.close()


def assert_equal(module, other):
    for (name, tensor), value in zip(module.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(tensor, value), name


def test_adopted_parameters_keep_values_identity_and_ties(transport):
    module = policy()
    before, objects = copy.deepcopy(module), [id(tensor) for tensor in module.parameters()]
    OneProcess(module, transport)
    moved = transport.adopt(module)
    assert moved == sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    assert_equal(module, before)
    assert [id(tensor) for tensor in module.parameters()] == objects
    assert module["head"].weight is module["embed"].weight
    with torch.no_grad():
        module["head"].weight[3, 4] = 7
    assert module["embed"].weight[3, 4] == 7


def test_an_adopted_policy_is_refitted_without_a_copy_of_its_own(transport):
    module = policy()
    refit = OneProcess(module, transport)
    transport.adopt(module)
    places = {region.name: place for region, place in transport._open.places().items()}
    assert places["norm.weight"].data_ptr() == module["norm"].weight.data_ptr()
    for _ in range(3):
        module["norm"](module["embed"](torch.arange(11))).square().sum().backward()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(parameter.grad, alpha=-0.1)
        module.zero_grad()
        module.scale.add_(1)
        assert torch.equal(places["norm.weight"], module["norm"].weight)  # it is there before the transfer
        refit.refit()
        assert_equal(refit.engine(), module)
    assert transport.extra_bytes < 5 * 512  # only what lies between the tensors


def test_the_memory_cost_without_adopting_is_one_copy(transport):
    module = policy()
    OneProcess(module, transport)
    sent = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    assert sent <= transport.extra_bytes < sent + 5 * 512


def test_holding_is_adopting_at_open():
    module = policy()
    transport = SlotStream(hold=module)
    refit = OneProcess(module, transport)
    assert transport.extra_bytes < 5 * 512
    refit.refit()
    assert_equal(refit.engine(), module)
    transport.close()


def test_parameters_outlive_the_transport_and_can_move_again():
    module = policy()
    before = copy.deepcopy(module)
    transport = SlotStream(hold=module)
    refit = OneProcess(module, transport)
    transport.close()
    assert transport.extra_bytes == 0
    assert_equal(module, before)
    transport.open(refit.channel, Watch(deadline_s=60.0))
    assert transport.extra_bytes < 5 * 512
    refit.refit()
    assert_equal(refit.engine(), before)
    transport.close()


def test_saving_an_adopted_parameter_saves_just_its_bytes(transport):
    module = policy()
    OneProcess(module, transport)
    transport.adopt(module)
    assert module.scale.untyped_storage().nbytes() == module.scale.nbytes
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    module.scale.zero_()
    assert torch.equal(torch.load(file)["scale"], torch.arange(5, dtype=torch.bfloat16))


def test_what_cannot_live_in_the_arena_is_refused_by_name_and_nothing_moves(transport):
    module = policy()
    module.register_buffer("transposed", torch.zeros(3, 2).t())
    module.register_buffer("part", torch.zeros(8)[2:4])
    OneProcess(module, transport)
    addresses = [tensor.data_ptr() for tensor in module.parameters()]
    with pytest.raises(RefitError, match=r"transposed \(not contiguous, strides \(1, 2\)\), part \(a view into larger"):
        transport.adopt(module)
    assert [tensor.data_ptr() for tensor in module.parameters()] == addresses


def test_a_module_that_lacks_what_is_sent_is_refused_by_name(transport):
    OneProcess(policy(), transport)
    with pytest.raises(RefitError, match=r"norm\.weight \(the module has no such tensor\)"):
        transport.adopt(policy()["norm"])


def test_names_may_be_changed_on_the_way(transport):
    module = policy()
    OneProcess(module, transport)
    wrapped = nn.ModuleDict({"wrapped": module})
    assert transport.adopt(wrapped, rename=lambda name: name.removeprefix("wrapped.")) > 0


def test_a_closed_transport_has_no_arena():
    with pytest.raises(RefitError, match="this process has no arena"):
        SlotStream(arena=True).adopt(policy())
