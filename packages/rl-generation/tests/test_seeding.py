"""Seeds of a run's sampling calls: each its own, and the same again after a resume."""

import threading
from concurrent.futures import ThreadPoolExecutor

from rl_generation import Sampling
from rl_generation.seeding import CallSeeds, SeededEngine

SAMPLING = Sampling(max_new_tokens=4)


class EngineDouble:
    def generate(self, prompts, sampling):
        return [sampling.seed] if isinstance(sampling, Sampling) else [each.seed for each in sampling]


def test_a_resumed_run_takes_the_seeds_that_an_uninterrupted_one_would():
    whole, first = CallSeeds(5), CallSeeds(5)
    seeds = [whole.take() for _ in range(6)]
    begun = [first.take() for _ in range(2)]
    resumed = CallSeeds(5, calls=first.calls)
    assert begun + [resumed.take() for _ in range(4)] == seeds


def test_seeds_differ_between_calls_and_between_runs():
    seeds = {CallSeeds(run, call).take() for run in range(20) for call in range(20)}
    assert len(seeds) == 400
    assert all(0 <= seed < 2**62 for seed in seeds)


def test_the_seeds_are_those_of_earlier_releases():
    assert CallSeeds(0, 0).take() == 788424145663840916


def test_threads_never_share_a_seed():
    seeds, start = CallSeeds(0), threading.Barrier(4)

    def take(_):
        start.wait(60)
        return [seeds.take() for _ in range(100)]

    with ThreadPoolExecutor(4) as pool:
        taken = [seed for part in pool.map(take, range(4)) for seed in part]
    assert len(set(taken)) == 400 == seeds.calls


def test_each_call_gets_the_next_seed_of_the_run():
    engine = SeededEngine(EngineDouble(), seeds=CallSeeds(5, calls=3))
    got = [engine.generate([[1]], SAMPLING)[0] for _ in range(2)]
    assert got == [CallSeeds(5, 3).take(), CallSeeds(5, 4).take()]
    assert engine.seeds.calls == 5


def test_greedy_calls_and_seeds_of_the_caller_pass_unchanged_and_are_not_counted():
    engine = SeededEngine(EngineDouble(), seeds=CallSeeds(5))
    assert engine.generate([[1]], Sampling(max_new_tokens=4, temperature=0.0)) == [None]
    assert engine.generate([[1]], Sampling(max_new_tokens=4, seed=9)) == [9]
    assert engine.seeds.calls == 0


def test_an_evaluation_with_seeds_of_its_own_leaves_those_of_training():
    entered = []
    engine = SeededEngine(EngineDouble(), seeds=CallSeeds(5), enter_generating=lambda: entered.append(1))
    evaluating = engine.reseeded(5, first_call=100)
    assert evaluating.generate([[1]], SAMPLING) == [CallSeeds(5, 100).take()]
    assert (engine.seeds.calls, entered) == (0, [1])


def test_a_batch_of_requests_has_a_seed_for_each_and_is_no_call_of_the_run():
    entered = []
    engine = SeededEngine(EngineDouble(), seeds=CallSeeds(5), enter_generating=lambda: entered.append(1))
    assert engine.generate_seeded([[1], [1]], SAMPLING, seeds=[7, 8]) == [7, 8]
    assert (engine.seeds.calls, entered) == (0, [1])
