"""How a refit's parties meet, and which way the weights take between them."""

import pickle

import pytest
import torch

from rl_refit import ModuleSink, ModuleSource, Refit, RefitConfig
from rl_refit.parties import HostSource, Parties, choose_transport


def parties_of(**changes):
    options = {
        "address": "tcp://127.0.0.1:29555",
        "name": "refit-1",
        "num_sources": 2,
        "num_sinks": 3,
        "transport": "shared_memory",
        "through_host": False,
        "one_node": True,
        "config": RefitConfig(),
    }
    return Parties(**options | changes)


@pytest.mark.parametrize(
    ("one_node", "source", "sink", "way"),
    [
        (True, "cpu", "cpu", "shared_memory"),
        (True, "cuda", "cpu", "shared_memory"),
        (True, "cuda", "cuda", "cuda_ipc"),
        (False, "cuda", "cuda", "point_to_point"),
        (False, "cpu", "cpu", "point_to_point"),
    ],
)
def test_the_way_is_the_memory_that_both_sides_have_in_common(one_node, source, sink, way):
    assert choose_transport(one_node=one_node, source_device=source, sink_device=sink) == way


def test_a_parties_crosses_processes_and_says_its_way():
    parties = parties_of()
    assert pickle.loads(pickle.dumps(parties)) == parties
    assert parties.explain() == "from 2 ranks to 3 engines, through rings in the host's shared memory"
    over_nodes = parties_of(transport="point_to_point", through_host=True, one_node=False, num_sources=1, num_sinks=1)
    assert over_nodes.explain() == "from 1 rank to 1 engine, point to point over gloo, from copies in host memory"


@pytest.mark.parametrize("way", ["shared_memory", "point_to_point"])
def test_parties_are_made_without_connecting(way):
    parties = parties_of(transport=way)
    source = parties.source_refit(ModuleSource(torch.nn.Linear(2, 2)), rank=1, host=None)
    sink = parties.sink_refit(ModuleSink(torch.nn.Linear(2, 2)), rank=2, host=None)
    source.close()
    sink.close()


def test_a_source_through_the_host_sends_the_same_bytes():
    policy, engine = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    report = Refit(HostSource(ModuleSource(policy)), ModuleSink(engine))(version=1)
    assert report.verified == "every byte"
    assert torch.equal(policy.weight, engine.weight)
    assert {tensor.device.type for _, tensor in HostSource(ModuleSource(policy)).shards(["weight"])} == {"cpu"}
