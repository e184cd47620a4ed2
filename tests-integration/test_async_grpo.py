"""Asynchronous GRPO over a real backend, engine and refit learns what the synchronous loop learns."""

from collections.abc import Callable, Iterator, Mapping

import pytest
from tiny_setup import SAMPLING, InFlightEngine, TinySetup
from torch import Tensor

from rl_algorithms import async_grpo, contracts, grpo
from rl_algorithms.async_grpo import AsyncGRPOConfig
from rl_algorithms.data import batches
from rl_backends import OptimizerConfig
from rl_generation import Sampling

STEPS = {"max_num_steps": 40, "steps_per_generation": 2}
AHEAD = 5  # two batches of two steps, and the second step of one's own


@pytest.fixture(scope="module")
def imitated() -> Mapping[str, Tensor]:
    setup = TinySetup.make()
    setup.imitate()
    return setup.state()


@pytest.fixture(scope="module")
def synchronous(imitated: Mapping[str, Tensor]) -> float:
    """Held-out accuracy of the synchronous loop."""
    setup = TinySetup.make(state=imitated)
    assert setup.accuracy() < 0.35
    learn(setup, grpo.train, grpo.GRPOConfig(**STEPS))
    return setup.accuracy()


def learn(
    setup: TinySetup,
    loop: Callable[..., Iterator[dict[str, float]]],
    config: grpo.GRPOConfig,
    *,
    engine: contracts.Engine[Sampling] | None = None,
    weight_sync: contracts.WeightSync | None = None,
) -> list[dict[str, float]]:
    optimizer = OptimizerConfig(lr=5e-4, betas=(0.9, 0.99), warmup_steps=8, final_lr_ratio=0.2)
    setup.policy.start_training(optimizer, num_steps=config.max_num_steps)
    return list(
        loop(
            policy=setup.policy,
            engine=engine or setup.engine,
            weight_sync=weight_sync or setup.weight_sync,
            environment=setup.environment,
            prompts=batches(setup.prompts, size=config.num_prompts, seed=0),
            chat=setup.chat,
            sampling=SAMPLING,
            config=config,
        )
    )


@pytest.mark.slow
def test_it_learns_while_the_engine_takes_weights_between_calls(
    imitated: Mapping[str, Tensor], synchronous: float
) -> None:
    setup = TinySetup.make(state=imitated)
    steps = learn(setup, async_grpo.train, AsyncGRPOConfig(**STEPS, max_staleness=AHEAD, groups_per_call=16))
    check(steps, setup.accuracy(), synchronous)
    assert sum(step["dropped_groups"] for step in steps) == 0  # a single collector overtakes nobody
    assert setup.engine.version == setup.weight_sync.last.version == 40


def test_it_learns_while_the_engine_takes_weights_in_flight(imitated: Mapping[str, Tensor], synchronous: float) -> None:
    setup = TinySetup.make(state=imitated)
    in_flight = InFlightEngine(setup)
    config = AsyncGRPOConfig(**STEPS, max_staleness=AHEAD, weights="in_flight", num_collectors=2, groups_per_call=16)
    steps = learn(setup, async_grpo.train, config, engine=in_flight, weight_sync=in_flight)
    check(steps, setup.accuracy(), synchronous)
    assert in_flight.mixed > 0


def check(steps: list[dict[str, float]], accuracy: float, synchronous: float) -> None:
    assert synchronous > 0.42
    assert accuracy > synchronous - 0.1
    stalest = max(step["staleness_max"] for step in steps)
    assert 2 <= stalest <= AHEAD - 1  # it was asynchronous, and never beyond the bound
