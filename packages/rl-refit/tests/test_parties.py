"""How a launcher makes the parties of a refit."""

import pickle

import pytest
import torch

from rl_refit import ModuleSink, ModuleSource, RefitConfig
from rl_refit.parties import Parties


def parties_of(**changes):
    options = {
        "address": "tcp://127.0.0.1:29555",
        "name": "refit-1",
        "num_sources": 2,
        "engine_ranks": (1, 1, 1),
        "one_node": True,
        "config": RefitConfig(),
    }
    return Parties(**options | changes)


def test_a_parties_crosses_processes_and_says_its_way():
    parties = parties_of()
    assert pickle.loads(pickle.dumps(parties)) == parties
    assert parties.explain() == "from 2 ranks to 3 engines, through memory that the processes of a host share"
    assert "to 2 engines of 4 workers together, through" in parties_of(engine_ranks=(2, 2)).explain()
    over_nodes = parties_of(one_node=False, num_sources=1, engine_ranks=(1,)).explain()
    assert over_nodes.startswith("from 1 rank to 1 engine")
    assert over_nodes.endswith("share, and by messages between hosts")


@pytest.mark.parametrize("one_node", [True, False])
def test_parties_are_made_without_connecting(one_node):
    parties = parties_of(one_node=one_node)
    source = parties.source_refit(ModuleSource(torch.nn.Linear(2, 2)), rank=1, host=None)
    sink = parties.sink_refit(ModuleSink(torch.nn.Linear(2, 2)), engine=2, host=None)
    source.close()
    sink.close()
