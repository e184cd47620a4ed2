"""Colocation over Ray: trainer and engines share devices, and the one that waits has freed its memory."""

from importlib.util import find_spec

import pytest

if find_spec("ray") is None:
    pytest.skip("Ray is not installed: nox -s integration-vllm runs these tests", allow_module_level=True)

import torch
from ray_setup import make_setup

from rl_backends import OptimizerConfig
from rl_generation import Sampling

SAMPLING = Sampling(max_new_tokens=9, seed=3)


@pytest.mark.slow
def test_on_a_cpu_they_work_alternately_and_nothing_is_moved(tmp_path, ray_cluster):
    world = make_setup(tmp_path, num_engines=1, colocated=True)
    try:
        policy = world.started.policy
        assert "nothing is moved" in policy.explain()
        policy.start_training(OptimizerConfig(lr=1e-3), num_steps=2)
        for version in range(2):
            assert world.weight_sync(version=version).verified == "every byte"
            (rollout,) = world.engine.generate([[1, 5, 7]], SAMPLING)
            assert rollout.version == version
            policy.version = version + 1
            assert policy.version == version + 1
    finally:
        world.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU has memory to free; there is none here")
def test_on_a_gpu_an_engine_that_sleeps_has_freed_its_memory(tmp_path):
    world = make_setup(tmp_path, num_engines=1, backend="vllm", colocated=True, device="cuda")
    try:
        policy = world.started.policy
        policy.start_training(OptimizerConfig(lr=1e-3), num_steps=1)
        world.weight_sync(version=0)
        before = world.engine.generate([[1, 5, 7]], SAMPLING)
        awake, _ = torch.cuda.mem_get_info()
        policy._colocation.enter("training")
        asleep, _ = torch.cuda.mem_get_info()
        assert asleep - awake > 16 << 20  # half of the key/value cache, at the least
        after = world.engine.generate([[1, 5, 7]], SAMPLING)
        assert [rollout.tokens for rollout in after] == [rollout.tokens for rollout in before]
    finally:
        world.close()
