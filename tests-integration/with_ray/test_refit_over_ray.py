"""Every step of a trainer over Ray reaches real vLLM engines over Ray, verified, and gives the trainer's logp."""

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from typing import ClassVar

import pytest

if find_spec("ray") is None or find_spec("vllm") is None:
    pytest.skip("Ray and vLLM are not installed: nox -s integration-vllm runs these tests", allow_module_level=True)

import ray
import torch
from ray_setup import make_setup

from rl_backends import OptimizerConfig
from rl_generation import Sampling, load_transformers_engine

SAMPLING = Sampling(max_new_tokens=9, seed=3)


@dataclass(frozen=True)
class Rows:
    rows_per_unit: ClassVar[int] = 1
    tokens: torch.Tensor
    lengths: torch.Tensor
    trainable: torch.Tensor


@pytest.fixture(scope="module")
def world(tmp_path_factory, ray_cluster):
    """Two synchronous vLLM engines, each in the process of its actor."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actors do not see the tests
    world = make_setup(tmp_path_factory.mktemp("run"), num_engines=2, backend="vllm")
    yield world
    world.close()


def rows_of(prompts, rollouts):
    """Prompts with their answers, of which the answers are read."""
    whole = [[*prompts[rollout.prompt_index], *rollout.tokens] for rollout in rollouts]
    longest = max(map(len, whole))
    trainable = torch.zeros(len(whole), longest, dtype=torch.bool)
    for row, rollout in enumerate(rollouts):
        first = len(prompts[rollout.prompt_index])
        trainable[row, first : first + len(rollout.tokens)] = True
    return Rows(
        tokens=torch.tensor([[*row, *[0] * (longest - len(row))] for row in whole]),
        lengths=torch.tensor([len(row) for row in whole]),
        trainable=trainable,
    )


def likelier(logp, rows):
    return -(logp * rows.trainable).sum() / 100, {}


def test_every_step_reaches_all_engines_and_their_logp_is_the_trainers(world):
    prompts = [list(prompt.tokens) for prompt in world.tiny.prompts[:24]]
    world.policy.start_training(OptimizerConfig(lr=5e-3), num_steps=3)
    digests = set()
    for version in range(3):
        report = world.weight_sync(version=version)
        assert (report.version, report.verified, report.same_as) == (version, "every byte", None)
        digests.add(report.digest)
        rollouts = world.engine.generate(prompts, SAMPLING)
        assert {rollout.version for rollout in rollouts} == {version}
        rows = rows_of(prompts, rollouts)
        theirs = world.policy.logp(rows)[rows.trainable]
        ours = torch.tensor([logp for rollout in rollouts for logp in rollout.logp])
        assert (ours - theirs).abs().max() <= 1e-4
        world.policy.forward_backward(rows, likelier)
        world.policy.optim_step()
    assert len(digests) == 3


def test_greedy_answers_are_those_of_the_model_that_was_sent(world):
    world.policy.save_pretrained(world.folder / "trained")
    trained, _ = load_transformers_engine(str(world.folder / "trained"), tokenizer=str(world.folder / "model"))
    world.weight_sync(version=world.policy.version)
    prompts, greedy = [prompt.tokens for prompt in world.tiny.prompts[:24]], Sampling(max_new_tokens=9, temperature=0.0)
    ours = world.engine.generate(prompts, greedy)
    theirs = trained.generate(prompts, greedy)
    assert [rollout.tokens for rollout in ours] == [rollout.tokens for rollout in theirs]


def test_an_engine_of_two_stages_starts_them_on_its_node_and_takes_every_step(tmp_path, ray_cluster):
    world = make_setup(tmp_path, num_engines=1, backend="vllm", stages=2)
    try:
        prompts, greedy = (
            [prompt.tokens for prompt in world.tiny.prompts[:8]],
            Sampling(max_new_tokens=9, temperature=0.0),
        )
        for version in range(2):
            world.policy.version = version
            assert world.weight_sync(version=version).verified == "every byte"
            ours = world.engine.generate(prompts, greedy)
            assert {rollout.version for rollout in ours} == {version}
        model, _ = load_transformers_engine(str(tmp_path / "model"), tokenizer=str(tmp_path / "model"))
        assert [rollout.tokens for rollout in ours] == [each.tokens for each in model.generate(prompts, greedy)]
    finally:
        world.close()
