"""What stands between a loop and its engine: in which order calls pass it, and which seeds they get."""

from contextlib import contextmanager

import pytest

from rl_algorithms import async_grpo
from rl_algorithms.background_collection import GatedEngine, StoppedError
from rl_generation import Sampling
from rl_generation.seeding import CallSeeds, seed_of_call
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


def test_each_call_gets_the_next_seed_of_the_run():
    engine = RunEngine(EngineDouble([]), seeds=CallSeeds(5, calls=3))
    got = [engine.generate([[1]], SAMPLING)[0] for _ in range(2)]
    assert got == [seed_of_call(5, 3), seed_of_call(5, 4)]
    assert engine.seeds.calls == 5


def test_greedy_calls_and_seeds_of_the_caller_pass_unchanged_and_are_not_counted():
    engine = RunEngine(EngineDouble([]), seeds=CallSeeds(5))
    assert engine.generate([[1]], Sampling(max_new_tokens=4, temperature=0.0)) == [None]
    assert engine.generate([[1]], Sampling(max_new_tokens=4, seed=9)) == [9]
    assert engine.seeds.calls == 0


def test_an_evaluation_with_seeds_of_its_own_leaves_those_of_training():
    entered = []
    engine = RunEngine(EngineDouble([]), seeds=CallSeeds(5), enter_generating=lambda: entered.append(1))
    evaluating = engine.reseeded(5, first_call=100)
    assert evaluating.generate([[1]], SAMPLING) == [seed_of_call(5, 100)]
    assert (engine.seeds.calls, entered) == (0, [1])
