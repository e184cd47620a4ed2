"""Two engines over Ray return what one returns, from any caller, and also when one of them dies."""

from dataclasses import replace
from importlib.util import find_spec

import pytest

if find_spec("ray") is None:
    pytest.skip("Ray is not installed: nox -s integration-vllm runs these tests", allow_module_level=True)

from ray_setup import in_thread, kill, make_setup, wait_until

from rl_generation import PromptError, Sampling
from rl_launcher.errors import Refusal
from rl_launcher.ray.engine_pool import EngineDiedError

SAMPLING = Sampling(max_new_tokens=9, seed=3)
LONG = Sampling(max_new_tokens=80, seed=4, ignore_eos=True)


@pytest.fixture(scope="module")
def world(tmp_path_factory, ray_cluster):
    """Two engines of transformers' and a policy of one rank, all actors."""
    world = make_setup(tmp_path_factory.mktemp("run"), num_engines=2)
    with pytest.raises(Refusal, match="no refit has been committed"):
        world.engine.generate([[1, 5, 7]], SAMPLING)
    world.weight_sync(version=0)
    world.tiny.weight_sync(version=0)
    yield world
    world.close()


def prompts_of(world, count):
    return [prompt.tokens for prompt in world.tiny.prompts[:count]]


def same(ours, theirs):
    """Token for token; logp up to the rounding of matrix products of another shape."""
    assert [rollout.tokens for rollout in ours] == [rollout.tokens for rollout in theirs]
    assert [(r.prompt_index, r.sample_index) for r in ours] == [(r.prompt_index, r.sample_index) for r in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.logp == pytest.approx(other.logp, abs=1e-5)


def test_two_engines_answer_as_one_in_this_process_does(world):
    prompts = prompts_of(world, 48)
    same(world.engine.generate(prompts, SAMPLING), world.tiny.engine.generate(prompts, SAMPLING))


def test_several_answers_to_a_prompt_come_in_order(world):
    prompts, several = prompts_of(world, 5), replace(SAMPLING, n=3)
    same(world.engine.generate(prompts, several), world.tiny.engine.generate(prompts, several))


def test_callers_in_several_threads_get_what_each_gets_alone(world):
    calls = [(prompts_of(world, 12 + number), replace(SAMPLING, seed=number)) for number in range(4)]
    results = [in_thread(lambda call=call: world.engine.generate(*call)) for call in calls]
    for result, call in zip(results, calls, strict=True):
        same(result(), world.tiny.engine.generate(*call))


def test_a_bad_prompt_is_refused_by_the_number_that_its_caller_knows(world):
    with pytest.raises(PromptError, match="prompt 30"):
        world.engine.generate([*prompts_of(world, 30), [10_000]], SAMPLING)


def test_an_engine_killed_while_it_answers_loses_nothing_and_serves_again(world):
    prompts = prompts_of(world, 600)
    expected = in_thread(lambda: world.tiny.engine.generate(prompts, LONG))()
    restarts = world.engine.metrics()["engine_restarts"]
    victim = world.pids()[0]
    answers = in_thread(lambda: world.engine.generate(prompts, LONG))
    wait_until(lambda: any(engine.process().call("busy", timeout_s=60) for engine in world.engine.engines.all()))
    kill(victim)
    rollouts = answers()
    same(rollouts, expected)
    assert {rollout.version for rollout in rollouts} == {0}
    metrics = world.engine.metrics()
    assert metrics["engine_restarts"] == restarts + 1
    assert metrics["retried_prompts"] > 0
    wait_until(lambda: any(name == "engine_healed" for name, _, _ in world.events))
    died = next(event for event in world.events if event[0] == "engine_restarted")
    assert f"pid {victim}" in died[1]
    assert "sent again" in died[2]
    assert victim not in world.pids()
    assert len(world.engine.engines.serving()) == 2
    same(world.engine.generate(prompts[:8], SAMPLING), world.tiny.engine.generate(prompts[:8], SAMPLING))


def test_an_engine_that_died_unseen_is_replaced_by_the_next_refit(world):
    kill(world.pids()[1])
    report = world.weight_sync(version=1)
    assert report.verified == "every byte"
    assert [engine.process().call("version", timeout_s=60) for engine in world.engine.engines.all()] == [1, 1]


def test_a_refit_in_which_an_engine_dies_is_done_again_by_all(world):
    refit, victims = world.policy.refit, [world.pids()[0]]

    def kill_and_refit(version):
        while victims:
            kill(victims.pop())  # the engines are receiving by now
        return refit(version)

    world.engine.engines.max_restarts = 10
    world.policy.refit = kill_and_refit
    report = world.weight_sync(version=2)
    world.policy.refit = refit
    assert (report.version, report.verified) == (2, "every byte")
    assert world.weight_sync.metrics()["refits_repeated"] == 1
    assert [engine.process().call("version", timeout_s=60) for engine in world.engine.engines.all()] == [2, 2]
    assert {rollout.version for rollout in world.engine.generate(prompts_of(world, 8), SAMPLING)} == {2}


def test_more_deaths_than_the_recipe_allows_end_the_run_and_say_so(world):
    engines = world.engine.engines
    engines.max_restarts = engines.restarts
    answers = in_thread(lambda: world.engine.generate(prompts_of(world, 600), LONG))
    wait_until(lambda: any(engine.process().call("busy", timeout_s=60) for engine in engines.all()))
    kill(world.pids()[0])
    with pytest.raises(EngineDiedError, match=r"policy\.generation\.max_restarts") as raised:
        answers()
    assert "engine 0" in str(raised.value)
    assert (world.events[-1][0], world.events[-1][2]) == ("engine_died", "the run ends")
