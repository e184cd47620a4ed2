"""What a source does once for all replicas; they and their trainer are threads here."""

import sys
import threading
from functools import partial
from pathlib import Path

import torch

from rl_refit import ModuleSink, ModuleSource, RefitError, Replica, Replicas
from rl_refit.transaction import shared

sys.path.insert(0, str(Path(__file__).parent / "programs"))
from replicas_world import free_address
from transaction_world import HANG_S, all_well, model, same_weights, together


class CountedSource(ModuleSource):
    """Counts how often its tensors are read through."""

    reads = 0

    def shards(self, names):
        self.reads += 1
        return super().shards(names)


def test_what_is_sent_to_several_replicas_is_planned_and_digested_once(monkeypatch):
    plans, plan = [], shared.plan_refit
    monkeypatch.setattr(shared, "plan_refit", lambda *given: plans.append(given) or plan(*given))
    address, policy = free_address(), model(1)
    source = CountedSource(policy)
    replicas = Replicas(source, address=address, at_least=3, verify="full")
    engines = [model(number) for number in (2, 3, 4)]
    ends = [Replica(ModuleSink(each), name=f"engine {n}", trainer=address) for n, each in enumerate(engines)]
    for version in (1, 2):
        source.reads = 0
        with torch.no_grad():
            policy[0].weight.add_(1)
        receivers = [partial(end.receive, timeout_s=HANG_S) for end in ends]
        report, *_ = all_well(together(partial(replicas, version), *receivers))
        assert report.versions == {f"engine {number}": version for number in range(3)}
        assert all(same_weights(policy, engine) for engine in engines)
        assert source.reads == 3 + 1  # sent to each, digested for all
    assert len(plans) == 1
    together(replicas.close, *(end.close for end in ends))


def test_a_replica_that_is_closed_ends_its_receive_and_one_thread_at_a_time_is_in_it():
    replica = Replica(ModuleSink(model(1)), name="engine", trainer=free_address())
    waiting = threading.Event()

    def wait():
        waiting.set()
        while "another thread" in str(error := outcome(replica.receive, timeout_s=HANG_S)):
            pass
        raise error

    def close():
        waiting.wait()
        while "another thread is in receive() of this Replica" not in str(outcome(replica.receive, timeout_s=0.0)):
            pass
        replica.close()

    ended, _ = together(wait, close)
    assert "this Replica is closed; make a new one" in str(ended)
    replica.close()
    assert "this Replica is closed; make a new one" in str(outcome(replica.receive))


def outcome(call, **options):
    try:
        return call(**options)
    except RefitError as error:
        return error
