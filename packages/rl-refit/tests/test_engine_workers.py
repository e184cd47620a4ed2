"""An engine whose workers are ranks of the sink: real processes, each with its own rows, driven by a few calls."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "programs"))

from toy_workers import COLUMNS, LAYERS, ROWS, ToyEngine, ToySink, weights

from rl_refit import DeadlineError, PeerError, PoisonedError, Refit, RefitError, Rendezvous, StateDictSource

PROGRAM = Path(__file__).parent / "programs" / "toy_workers.py"
NBYTES = LAYERS * ROWS * COLUMNS * 4


@pytest.fixture(scope="module")
def engine():
    engine = ToyEngine(2)
    yield engine
    engine.close()


@pytest.fixture
def sink(engine):
    engine.log.clear()
    engine.refuses, engine.forgets = False, True
    return ToySink(engine)


def refit_to(sink, version, **options):
    return Refit(StateDictSource(weights(version)), sink, **options)


def test_each_worker_receives_its_own_rows_and_nothing_else(engine, sink):
    refit = refit_to(sink, 1)
    report = refit(version=1)
    assert engine.holds(1)
    assert (report.version, report.bytes, sink.version) == (1, NBYTES, 1)
    assert [refit.plan.bytes_received(rank) for rank in (0, 1)] == [NBYTES // 2, NBYTES // 2]
    assert [refit.plan.lower_bound(rank) for rank in (0, 1)] == [NBYTES // 2, NBYTES // 2]
    assert report.uncompared == 0.0
    refit.close()


def test_the_driver_makes_one_call_while_the_engine_is_paused(engine, sink):
    refit_to(sink, 2)(version=1)
    assert [name for name, paused in engine.log if paused] == ["rl_refit", "renew 1"]
    assert not engine.paused


def test_a_plan_is_made_before_the_first_refit_and_moves_nothing(engine, sink):
    refit_to(sink, 3)(version=1)
    refit = refit_to(sink, 4)
    assert "1 ranks to 2" in refit.explain()
    assert engine.holds(3)
    refit(version=2)
    assert engine.holds(4)


def test_refits_of_two_trainers_alternate(engine, sink):
    refits = [refit_to(sink, seed) for seed in (5, 6)]
    for version in range(6):
        refits[version % 2](version=version)
        assert engine.holds(5 + version % 2)


def test_an_engine_that_cannot_be_paused_keeps_its_weights_and_no_worker_is_poisoned(engine, sink):
    refit_to(sink, 7)(version=1)
    engine.refuses = True
    with pytest.raises(RefitError, match="2 requests are unfinished"):
        refit_to(sink, 8)(version=2)
    sink.check()
    assert engine.holds(7)
    engine.refuses = False
    refit_to(sink, 8)(version=2)
    assert engine.holds(8)


def test_a_worker_that_fails_in_its_commit_poisons_the_engine_until_a_refit_succeeds(engine, sink):
    refit_to(sink, 9)(version=1)
    engine.call("break_next", 1, "raise")
    with pytest.raises(RefitError, match="a fault in the commit"):
        refit_to(sink, 10)(version=2)
    with pytest.raises(PoisonedError, match="worker 1: OSError: a fault in the commit"):
        sink.check()
    assert ("drop", True) in engine.log
    assert not engine.paused
    refit_to(sink, 10)(version=2)
    sink.check()
    assert engine.holds(10)


def test_an_engine_that_does_not_forget_what_was_cached_is_poisoned_and_takes_the_same_version_again(engine, sink):
    engine.forgets = False
    with pytest.raises(RefitError, match="the cache cannot be reset"):
        refit_to(sink, 11)(version=2)
    with pytest.raises(PoisonedError, match="the commit failed with OSError: the cache cannot be reset"):
        sink.check()
    engine.forgets = True
    refit_to(sink, 11)(version=2)
    sink.check()
    assert engine.holds(11)


def test_a_version_that_is_not_newer_is_refused_unless_it_is_repeated(engine, sink):
    refit = refit_to(sink, 11)
    refit(version=3)
    sink.repeat()
    refit(version=3)
    with pytest.raises(RefitError, match="version 3 is not newer than the sink's 3"):
        refit(version=3)
    sink.poison("a peer fell behind")
    with pytest.raises(PoisonedError, match="a peer fell behind"):
        sink.check()
    refit(version=4)
    sink.check()


def test_a_new_sink_takes_the_engine_from_an_old_one(engine, sink):
    old = refit_to(sink, 12)
    old(version=8)
    refit_to(ToySink(engine), 13)(version=1)
    with pytest.raises(RefitError, match="another sink has taken this engine"):
        old(version=9)
    assert engine.holds(13)


def test_what_does_not_fit_is_refused_before_anything_is_called(sink, tmp_path):
    with pytest.raises(ValueError, match="an engine needs a source of this process, or a rendezvous"):
        Refit(sink=sink)
    meeting = Rendezvous(f"file://{tmp_path}/store", num_sources=1, num_sinks=1, sink_rank=0)
    with pytest.raises(ValueError, match="num_sinks counts the workers of all engines"):
        Refit(sink=sink, rendezvous=meeting).receive(timeout_s=5)


def test_without_a_refit_in_time_the_sink_is_as_it_was(engine, sink, tmp_path):
    refit_to(sink, 14)(version=1)
    meeting = Rendezvous(f"file://{tmp_path}/store", num_sources=1, num_sinks=2, sink_rank=0)
    refit = Refit(sink=sink, rendezvous=meeting)
    with pytest.raises(DeadlineError, match="no refit began within timeout_s=1"):
        refit.receive(timeout_s=1)
    sink.check()
    assert engine.holds(14)
    refit.close()


@pytest.mark.parametrize("scheme", [pytest.param("file", marks=pytest.mark.slow), "tcp"])
def test_two_engines_of_two_workers_and_a_trainer_elsewhere(tmp_path, scheme):
    address = f"file://{tmp_path}/store" if scheme == "file" else f"tcp://127.0.0.1:{free_port()}"
    engines = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), address, "1", "2", str(first), "4", "3"], stdout=subprocess.PIPE, text=True
        )
        for first in (0, 2)
    ]
    tensors = weights(1)
    refit = Refit(
        StateDictSource(tensors),
        rendezvous=Rendezvous(address, num_sources=1, num_sinks=4, source_rank=0, timeout_s=120),
        deadline_s=120,
    )
    for version in (1, 2, 3):
        for name, tensor in weights(version).items():
            tensors[name].copy_(tensor)
        assert refit(version=version).version == version
        said = [json.loads(engine.stdout.readline()) for engine in engines]
        assert said == [{"version": version, "holds": True, "bytes": 2 * NBYTES}] * 2
    refit.close()
    assert [engine.wait(120) for engine in engines] == [0, 0]
    for engine in engines:
        engine.stdout.close()


def free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_worker_that_is_killed_between_two_refits_is_named_at_once():
    engine = ToyEngine(2)
    sink = ToySink(engine)
    refit = refit_to(sink, 1)
    refit(version=1)
    engine.call("break_next", 1, "die")  # in its commit: the driver's call of the engine ends with it
    with pytest.raises((RefitError, EOFError, OSError)):
        refit(version=2)
    with pytest.raises(PoisonedError, match="the commit failed with"):
        sink.check()
    engine.close()


def test_a_worker_that_dies_while_it_waits_is_named(tmp_path):
    engine = ToyEngine(2)
    meeting = Rendezvous(f"file://{tmp_path}/store", num_sources=1, num_sinks=2, sink_rank=0)
    sink = ToySink(engine)
    refit = Refit(sink=sink, rendezvous=meeting)
    pid = engine.call("break_next", -1, "")[1]["pid"]
    import threading

    threading.Timer(2.0, lambda: os.kill(pid, signal.SIGKILL)).start()
    with pytest.raises(PeerError, match="sink 1 is dead"):
        refit.receive(timeout_s=120)
    assert not sink.poisoned
    engine.close()
