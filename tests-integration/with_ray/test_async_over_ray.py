"""Asynchronous GRPO with a real asynchronous vLLM engine on Ray: weights arrive while responses are generated."""

from importlib.util import find_spec

import pytest

if find_spec("ray") is None or find_spec("vllm") is None:
    pytest.skip("Ray and vLLM are not installed: nox -s integration-vllm runs these tests", allow_module_level=True)

from ray_setup import in_thread, kill, make_setup, wait_until

from rl_algorithms import async_grpo
from rl_algorithms.async_grpo import AsyncGRPOConfig
from rl_algorithms.data import batches
from rl_algorithms.environments import RewardFunctionEnvironment
from rl_backends import OptimizerConfig
from rl_generation import Sampling

LONG = Sampling(max_new_tokens=100, seed=0, ignore_eos=True)
MANY = 128  # prompts, of which the engine takes 16 at a time: it is not done with all before a test has looked
MAX_STALENESS = 2


@pytest.fixture(scope="module")
def world(tmp_path_factory, ray_cluster):
    """One asynchronous vLLM engine, in processes of its own beside its actor."""
    world = make_setup(tmp_path_factory.mktemp("run"), num_engines=1, backend="vllm", asynchronous=True)
    world.weight_sync(version=0)
    yield world
    world.close()


def begun(world):
    """Tokens that the engine has generated so far."""
    (engine,) = world.engine.engines.all()
    return engine.process().call("metrics", timeout_s=60)["generated_tokens"]


def variety(completions, **_):
    """Something in which random answers differ."""
    return [float(len(set(completion))) for completion in completions]


def test_steps_are_taken_while_the_engine_samples_and_staleness_is_bounded(world):
    config = AsyncGRPOConfig(
        max_num_steps=6,
        num_prompts=8,
        num_generations_per_prompt=4,
        steps_per_generation=1,
        max_staleness=MAX_STALENESS,
        weights="in_flight",
        num_collectors=2,
        groups_per_call=4,
    )
    world.policy.start_training(OptimizerConfig(lr=1e-3), num_steps=config.max_num_steps)
    steps = list(
        async_grpo.train(
            policy=world.policy,
            engine=world.engine,
            weight_sync=world.weight_sync,
            environment=RewardFunctionEnvironment(reward=variety),
            prompts=batches(world.tiny.prompts, size=config.num_prompts, seed=0),
            chat=world.tiny.chat,
            sampling=Sampling(max_new_tokens=40, ignore_eos=True),  # longer than a step: some answers meet a refit
            config=config,
            version=world.policy.version,
        )
    )
    assert [step["steps_taken"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert 1 <= max(step["staleness_max"] for step in steps) <= MAX_STALENESS  # sampled while the policy trained
    assert world.policy.version == world.weight_sync.last.version == 6
    assert world.weight_sync.last.verified == "every byte"


def test_answers_that_are_under_way_go_on_with_the_new_weights_and_say_so(world):
    prompts = [prompt.tokens[:8] for prompt in world.tiny.prompts[:MANY]]
    before = begun(world)
    answers = in_thread(lambda: world.engine.generate(prompts, LONG))
    wait_until(lambda: begun(world) > before + 16)
    old, new = world.weight_sync.last.version, world.train()
    world.weight_sync(version=new)
    mixed = [rollout for rollout in answers() if len(rollout.versions) == 2]
    assert mixed
    for rollout in mixed:
        assert [span.version for span in rollout.versions] == [old, new]
        assert rollout.versions[1].end == len(rollout.tokens) == 100


@pytest.mark.slow
def test_the_death_of_the_engines_own_process_costs_a_restart_and_no_answer(world):
    prompts = [prompt.tokens[:8] for prompt in world.tiny.prompts[:MANY]]
    (engine,) = world.engine.engines.all()
    process = engine.info().processes[0]
    before = begun(world)
    answers = in_thread(lambda: world.engine.generate(prompts, LONG))
    wait_until(lambda: begun(world) > before + 16)
    kill(process.pid)
    rollouts = answers()
    assert [len(rollout.tokens) for rollout in rollouts] == [100] * MANY
    assert {rollout.version for rollout in rollouts} == {world.weight_sync.last.version}
    assert world.engine.metrics()["engine_restarts"] == 1
