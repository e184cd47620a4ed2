"""The quickstart's tiny model learns under each algorithm, with the real backend, the real engine and real refits."""

import copy
from collections.abc import Mapping

import pytest
import torch
from tiny_setup import SAMPLING, TinySetup
from torch import Tensor
from transformers import Qwen3ForSequenceClassification

from rl_algorithms import grpo, ppo
from rl_algorithms.data import batches
from rl_algorithms.objective import Objective
from rl_backends import DTensorBackend, DTensorConfig, OptimizerConfig

NUM_BATCHES = 40


@pytest.fixture(scope="module")
def imitated() -> tuple[Mapping[str, Tensor], float]:
    """The weights that SFT leaves, and how often they answer right."""
    setup = TinySetup.make()
    setup.imitate()
    return setup.state(), setup.accuracy()


def train(setup: TinySetup, objective: Objective, *, steps_per_generation: int, lr: float) -> list[dict[str, float]]:
    steps = NUM_BATCHES * steps_per_generation
    setup.policy.start_training(OptimizerConfig(lr=lr, betas=(0.9, 0.99), warmup_steps=10), num_steps=steps)
    needs_reference = objective.kl.weight > 0
    return list(
        grpo.train(
            policy=setup.policy,
            engine=setup.engine,
            weight_sync=setup.weight_sync,
            environment=setup.environment,
            prompts=batches(setup.prompts, size=32, seed=0),
            chat=setup.chat,
            sampling=SAMPLING,
            config=grpo.GRPOConfig(max_num_steps=steps, steps_per_generation=steps_per_generation, objective=objective),
            reference=setup.policy.freeze_reference() if needs_reference else None,
        )
    )


@pytest.mark.parametrize(
    ("objective", "steps_per_generation", "lr"),
    [
        pytest.param(grpo.deepseek_grpo(kl_weight=0.001), 4, 5e-4, id="grpo", marks=pytest.mark.slow),
        pytest.param(grpo.dapo(max_length=12, overlong_buffer=3, max_generation_batches=2), 4, 5e-4, id="dapo"),
        pytest.param(grpo.gspo(clip_low=3e-2, clip_high=4e-2), 4, 5e-4, id="gspo", marks=pytest.mark.slow),
        pytest.param(grpo.rloo(kl_weight=0.001), 1, 3e-4, id="rloo", marks=pytest.mark.slow),
    ],
)
def test_the_tiny_model_learns(
    imitated: tuple[Mapping[str, Tensor], float], objective: Objective, steps_per_generation: int, lr: float
) -> None:
    weights, before = imitated
    setup = TinySetup.make(state=weights)
    log = train(setup, objective, steps_per_generation=steps_per_generation, lr=lr)
    after = setup.accuracy()
    print(f"sampled accuracy {before:.3f} -> {after:.3f}, reward {log[0]['reward']:.3f} -> {log[-1]['reward']:.3f}")
    assert after > before + 0.2
    assert max(line["token_mult_prob_error"] for line in log) <= 1.0001


def critic(setup: TinySetup) -> DTensorBackend:
    """The policy's trunk with a head of one number that starts at 0."""
    config = copy.deepcopy(setup.policy.model.config)
    config.num_labels = 1
    model = Qwen3ForSequenceClassification(config)
    trunk = {f"model.{name}": tensor for name, tensor in setup.policy.model.model.state_dict().items()}
    model.load_state_dict(trunk, strict=False)
    torch.nn.init.zeros_(model.score.weight)
    return DTensorBackend(model, DTensorConfig())


def test_the_tiny_model_learns_by_ppo(imitated: tuple[Mapping[str, Tensor], float]) -> None:
    weights, before = imitated
    setup = TinySetup.make(state=weights)
    value_model = critic(setup)
    config = ppo.PPOConfig(max_num_steps=NUM_BATCHES * 4, num_prompts=128, steps_per_generation=4)
    for backend, lr in ((setup.policy, 5e-4), (value_model, 1e-3)):
        backend.start_training(
            OptimizerConfig(lr=lr, betas=(0.9, 0.99), warmup_steps=10), num_steps=config.max_num_steps
        )
    log = list(
        ppo.train(
            policy=setup.policy,
            value_model=value_model,
            engine=setup.engine,
            weight_sync=setup.weight_sync,
            environment=setup.environment,
            prompts=batches(setup.prompts, size=128, seed=0),
            chat=setup.chat,
            sampling=SAMPLING,
            config=config,
        )
    )
    after = setup.accuracy()
    print(f"sampled accuracy {before:.3f} -> {after:.3f}, reward {log[0]['reward']:.3f} -> {log[-1]['reward']:.3f}")
    assert after > before + 0.2
