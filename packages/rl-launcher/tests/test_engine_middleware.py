"""What stands between a loop and its engine: in which order calls pass it, and which seeds they get."""

from contextlib import contextmanager

import pytest

from rl_algorithms import async_grpo
from rl_algorithms.background_collection import GatedEngine, StoppedError
from rl_generation import Sampling
from rl_generation.seeding import CallSeeds
from rl_launcher.build.parts import RunEngine

SAMPLING = Sampling(max_new_tokens=4)


class EngineDouble:
    def __init__(self, seen):
        self.seen = seen

    def generate(self, prompts, sampling):
        self.seen.append(("engine", sampling.seed))
        return [sampling.seed]


class Spans:
    def __init__(self, seen):
        self.seen = seen

    def timed(self, name, function):
        def call(*arguments):
            self.seen.append(("timed", name))
            return function(*arguments)

        return call


class Seeds(CallSeeds):
    def __init__(self, seen):
        super().__init__(0)
        self.seen = seen

    def take(self):
        self.seen.append(("seeded", self.calls))
        return super().take()


def test_calls_of_collectors_pass_gate_timer_seed_and_colocation_in_this_order(monkeypatch):
    seen = []
    buffer = async_grpo.make_buffer(async_grpo.AsyncGRPOConfig(max_num_steps=1, max_staleness=1))
    engine = RunEngine(EngineDouble(seen), seeds=Seeds(seen), enter_generating=lambda: seen.append(("colocated",)))
    collecting = engine.collecting(buffer, Spans(seen))
    assert isinstance(collecting, GatedEngine)
    shared = collecting._gate.shared

    @contextmanager
    def watched():
        seen.append(("gated",))
        with shared():
            yield

    monkeypatch.setattr(collecting._gate, "shared", watched)
    collecting.generate([[1]], SAMPLING)
    assert [name for name, *_ in seen] == ["gated", "timed", "seeded", "colocated", "engine"]
    buffer.close()
    with pytest.raises(StoppedError):
        collecting.generate([[1]], SAMPLING)
