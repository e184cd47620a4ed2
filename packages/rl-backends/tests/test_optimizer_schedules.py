"""Claims about learning rates: each schedule is its closed form, starts, ends and bends where it says."""

import doctest
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_backends.optimizers import optimizers as schedules
from rl_backends.optimizers.config import OptimizerConfig
from rl_backends.optimizers.optimizers import learning_rate_factor

FALLING = ("linear", "cosine", "wsd")


def factors(config, num_steps):
    return [learning_rate_factor(index, config, num_steps=num_steps) for index in range(num_steps)]


@st.composite
def stages(draw, schedules=FALLING):
    schedule = draw(st.sampled_from(schedules))
    warmup = draw(st.integers(0, 30))
    decay = draw(st.integers(1, 30)) if schedule == "wsd" else None
    # A linear or cosine decay needs two steps to go from one end to the other.
    num_steps = warmup + (decay or 2) + draw(st.integers(0, 50))
    final = draw(st.floats(0.0, 0.99)) if schedule != "constant" else 1.0
    return {
        "schedule": schedule,
        "warmup_steps": warmup,
        "decay_steps": decay,
        "final_lr_ratio": final,
    }, num_steps


@settings(deadline=None)
@given(stages())
def test_a_schedule_rises_to_its_peak_never_turns_back_and_ends_where_it_says(stage):
    config, num_steps = OptimizerConfig(lr=1.0, **stage[0]), stage[1]
    found = factors(config, num_steps)
    before, after = found[: config.warmup_steps], found[config.warmup_steps :]
    assert before == [(index + 1) / config.warmup_steps for index in range(config.warmup_steps)]
    assert all(later <= earlier for earlier, later in itertools.pairwise(after))
    assert all(config.final_lr_ratio - 1e-9 <= factor <= 1.0 for factor in after)
    assert after[-1] == pytest.approx(config.final_lr_ratio)
    assert learning_rate_factor(num_steps + 5, config, num_steps=num_steps) == pytest.approx(config.final_lr_ratio)


@settings(deadline=None)
@given(stages(schedules=("wsd",)))
def test_a_stable_phase_is_stable_until_its_decay_which_is_a_straight_line(stage):
    config, num_steps = OptimizerConfig(lr=1.0, **stage[0]), stage[1]
    found, decay = factors(config, num_steps), config.decay_steps
    assert set(found[config.warmup_steps : num_steps - decay]) <= {1.0}
    drop = (1.0 - config.final_lr_ratio) / decay
    assert found[num_steps - decay :] == pytest.approx([1.0 - drop * (k + 1) for k in range(decay)], abs=1e-9)


@settings(deadline=None)
@given(stages(schedules=("constant",)))
def test_a_constant_rate_is_constant_after_its_warm_up(stage):
    config, num_steps = OptimizerConfig(lr=1.0, **stage[0]), stage[1]
    assert set(factors(config, num_steps)[config.warmup_steps :]) == {1.0}


@settings(deadline=None)
@given(stages(schedules=("linear",)))
def test_a_linear_schedule_is_that_of_torch(stage):
    config, num_steps = OptimizerConfig(lr=1.0, **stage[0]), stage[1]
    decaying = num_steps - config.warmup_steps
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    torchs = torch.optim.lr_scheduler.LinearLR(
        optimizer, start_factor=1.0, end_factor=config.final_lr_ratio or 1e-12, total_iters=decaying - 1
    )
    expected = [torchs._get_closed_form_lr()[0] for torchs.last_epoch in range(decaying)]
    assert factors(config, num_steps)[config.warmup_steps :] == pytest.approx(expected, abs=1e-9)


@settings(deadline=None)
@given(stages(schedules=("cosine",)))
def test_a_cosine_is_half_a_cosine(stage):
    config, num_steps = OptimizerConfig(lr=1.0, **stage[0]), stage[1]
    final, last = config.final_lr_ratio, num_steps - config.warmup_steps - 1
    expected = [final + (1 - final) * math.cos(math.pi * index / last / 2) ** 2 for index in range(last + 1)]
    assert factors(config, num_steps)[config.warmup_steps :] == pytest.approx(expected, abs=1e-9)


def test_one_step_uses_the_whole_learning_rate():
    assert factors(OptimizerConfig(lr=1.0, final_lr_ratio=0.1), 1) == [1.0]


def test_the_examples_in_the_docstrings_hold():
    assert doctest.testmod(schedules).failed == 0
    assert doctest.testmod(schedules).attempted == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.0}, r"lr=0\.0 must be > 0"),
        ({"max_grad_norm": 0.0}, r"max_grad_norm=0\.0 must be > 0, or None"),
        ({"betas": (0.9, 1.0)}, r"betas=\(0\.9, 1\.0\)"),
        ({"weight_decay": -0.1}, r"weight_decay=-0\.1"),
        ({"schedule": "constant", "final_lr_ratio": 0.5}, "no meaning for schedule='constant'"),
        ({"schedule": "cosine"}, r"schedule='cosine' with final_lr_ratio=1\.0 would never go down"),
        ({"schedule": "wsd", "final_lr_ratio": 0.1}, "decay_steps=None must be >= 1 for schedule='wsd'"),
        ({"decay_steps": 3}, "decay_steps=3 belongs to schedule='wsd'"),
        ({"name": "adamw_8bit", "implementation": "foreach"}, "name='adamw_8bit' is torchao's"),
    ],
)
def test_choices_that_contradict_one_another_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**{"lr": 1e-3, **options})
