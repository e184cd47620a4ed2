"""An engine of worker processes as a replica: its driver joins, and its workers are refitted."""

import sys
import threading
from pathlib import Path

import pytest

from rl_refit import Replica, Replicas, StateDictSource

sys.path.insert(0, str(Path(__file__).parent / "programs"))
from replicas_world import free_address
from toy_workers import ToyEngine, ToySink, weights


@pytest.fixture(scope="module")
def engine():
    made = ToyEngine(2)
    yield made
    made.close()


def test_the_driver_of_an_engine_joins_for_all_its_workers_and_goes_back_with_the_trainer(engine):
    address, served, stop = free_address(), [], threading.Event()
    sink = ToySink(engine)
    turns = []

    def in_turn(refit):
        turns.append(threading.get_ident())
        return refit()

    replica = Replica(sink, name="engine", trainer=address, in_turn=in_turn)

    def serve():
        while not stop.is_set():
            try:
                served.append(replica.receive(timeout_s=0.5).version)
            except Exception as error:  # noqa: BLE001 - the test looks at it
                served.append(str(error))

    tensors = weights(0)
    replicas = Replicas(StateDictSource(tensors), address=address)
    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        for version, rollback in ((1, False), (5, False), (3, True), (4, False)):
            for name, tensor in weights(version).items():
                tensors[name].copy_(tensor)
            report = replicas(version=version, rollback=rollback)
            assert report.versions == {"engine": version}
            assert report.rewound == ({"engine": 5} if rollback else {})
            assert (report.tensors, report.bytes) == (len(tensors), report.refits["engine"].bytes)
            assert (report.verified, report.digest) == ("every byte", report.refits["engine"].digest)
            assert report.seconds == report.refits["engine"].seconds
            assert engine.holds(version)
    finally:
        stop.set()
        thread.join()
        replica.close()
        replicas.close()
    assert sink.version == 4
    assert turns == [thread.ident] * 4
    assert [each for each in served if "no refit began" not in str(each)] == [1, 5, 3, 4]
