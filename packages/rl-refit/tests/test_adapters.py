"""An adapter alone as a transaction: it is loaded beside the one that serves, and a failed refit changes nothing."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "programs"))
import adapter_engine
from adapter_engine import adapter

from rl_refit import AdapterSink, Refit, Rendezvous, SlotStream, StateDictSource
from rl_refit.errors import CoverageError, DigestError, PoisonedError, RefitError


class Engine:
    """Holds adapters by number, as vLLM does."""

    def __init__(self, *, reads=True):
        self.slots, self.taken, self.refuses = {}, [], None
        self.sink = AdapterSink(adapter(0), load=self.load, unload=self.unload, read=self.read if reads else None)

    def load(self, number, tensors):
        if self.refuses is not None:
            raise self.refuses
        assert number not in self.taken
        self.taken.append(number)
        self.slots[number] = {name: tensor.clone() for name, tensor in tensors.items()}
        return number

    def unload(self, number, loaded):
        assert number == loaded
        del self.slots[number]

    def read(self, loaded):
        return self.slots[loaded]


def same(tensors, others):
    return tensors.keys() == others.keys() and all(torch.equal(tensors[name], others[name]) for name in tensors)


def test_each_refit_has_a_slot_of_its_own_and_the_adapter_before_stays_until_the_next():
    engine = Engine()
    with pytest.raises(RefitError, match="no adapter was committed yet"):
        engine.sink.current  # noqa: B018
    for version in (1, 2, 3):
        report = Refit(StateDictSource(adapter(version)), engine.sink)(version=version)
        assert report.unreadable == ()
        assert same(engine.slots[engine.sink.current], adapter(version))
        assert engine.sink.version == version
    assert sorted(engine.slots) == [2, 3]
    assert same(engine.slots[2], adapter(2))
    engine.sink.close()
    assert engine.slots == {}


def test_an_engine_that_does_not_take_the_adapter_goes_on_with_the_one_before():
    engine = Engine()
    Refit(StateDictSource(adapter(1)), engine.sink)(version=1)
    engine.refuses = ValueError("rank 4 is more than max_lora_rank=2")
    with pytest.raises(RefitError, match=r"did not take the adapter of version 2: ValueError: rank 4 is more than"):
        Refit(StateDictSource(adapter(2)), engine.sink)(version=2)
    assert same(engine.slots[engine.sink.current], adapter(1))
    engine.refuses = None
    Refit(StateDictSource(adapter(2)), engine.sink)(version=2)
    assert same(engine.slots[engine.sink.current], adapter(2))


def test_a_refit_that_is_given_up_after_the_slot_was_filled_frees_it():
    engine = Engine()
    Refit(StateDictSource(adapter(1)), engine.sink)(version=1)
    source = StateDictSource(adapter(2))
    engine.sink.prepare(source.manifest())
    for region, tensor in source.shards(adapter(2)):
        engine.sink.stage(region, tensor)
    engine.sink.ready(2)
    assert len(engine.slots) == 2
    engine.sink.abort()
    assert list(engine.slots) == [engine.sink.current] == [1]
    Refit(source, engine.sink)(version=2)
    assert engine.sink.current == 3


def test_a_slot_that_cannot_be_freed_fails_the_next_refit_and_no_commit():
    engine = Engine()
    for version in (1, 2):
        Refit(StateDictSource(adapter(version)), engine.sink)(version=version)
    unload, engine.sink._unload = engine.sink._unload, lambda *_: 1 / 0
    Refit(StateDictSource(adapter(3)), engine.sink)(version=3)
    with pytest.raises(RefitError, match="did not free the slot 1 of an earlier adapter: ZeroDivisionError"):
        Refit(StateDictSource(adapter(4)), engine.sink)(version=4)
    assert engine.sink.version == 3
    assert same(engine.slots[engine.sink.current], adapter(3))
    engine.sink._unload = unload
    Refit(StateDictSource(adapter(4)), engine.sink)(version=4)
    assert len(engine.slots) == 2
    assert same(engine.slots[engine.sink.current], adapter(4))


def test_an_engine_that_holds_something_else_than_was_sent_is_poisoned():
    engine = Engine()
    engine.sink._read = lambda loaded: {name: tensor + 1 for name, tensor in engine.slots[loaded].items()}
    with pytest.raises(DigestError, match=re.escape("lora_A")):
        Refit(StateDictSource(adapter(1)), engine.sink, verify="full")(version=1)
    with pytest.raises(PoisonedError, match="refit successfully before using the adapter"):
        engine.sink.current  # noqa: B018
    engine.sink._read = engine.read
    Refit(StateDictSource(adapter(1)), engine.sink)(version=1)
    assert same(engine.slots[engine.sink.current], adapter(1))


def test_what_cannot_be_read_back_is_named():
    engine = Engine(reads=False)
    report = Refit(StateDictSource(adapter(1)), engine.sink)(version=1)
    assert set(report.unreadable) == set(adapter(1))


def test_names_that_are_missing_or_too_many_are_refused_before_anything_is_loaded():
    engine, fewer = Engine(), adapter(1)
    del fewer["layers.2.q_proj.lora_B.weight"]
    more = adapter(1) | {"model.embed_tokens.weight": torch.zeros(2)}
    for given in (fewer, more):
        with pytest.raises(CoverageError, match=r"layers\.2\.q_proj\.lora_B\.weight|model\.embed_tokens\.weight"):
            Refit(StateDictSource(given), engine.sink)(version=1)
    assert engine.taken == []


def test_the_bytes_of_the_adapter_alone_go_from_process_to_process(tmp_path):
    address = f"file://{tmp_path / 'store'}"
    engine = subprocess.Popen([sys.executable, adapter_engine.__file__, address])
    tensors = adapter(1)
    meeting = Rendezvous(address, num_sources=1, num_sinks=1, source_rank=0)
    refit = Refit(StateDictSource(tensors), transport=SlotStream(), rendezvous=meeting, deadline_s=120)
    try:
        report = refit(version=1)
        for name, value in adapter(2).items():
            tensors[name].copy_(value)
        refit(version=2)
        assert engine.wait(60) == 0
        refit.close()
    finally:
        engine.kill()
        engine.wait()
    assert report.bytes == sum(tensor.nbytes for tensor in tensors.values())
