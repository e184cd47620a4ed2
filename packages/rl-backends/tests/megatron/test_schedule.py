"""Claims about Megatron's own schedule: it is Megatron's, its numbers are of steps, and it fits or says why not."""

import types

import pytest

from rl_backends.megatron.config import MegatronOptimizerConfig, MegatronSchedulerConfig

THEIRS = {"lr": 1.0, "min_lr": 0.1, "weight_decay": 0.2}


def make(optimizer, *, num_steps, **scheduler):
    from rl_backends.megatron.optimizer import MegatronSchedule

    groups = [{"wd_mult": 1.0, "max_lr": 1.0, "min_lr": 0.1}, {"wd_mult": 0.0, "max_lr": 1.0, "min_lr": 0.1}]
    inner = types.SimpleNamespace(param_groups=groups)
    config = MegatronOptimizerConfig(**optimizer)
    return inner, MegatronSchedule(inner, config, MegatronSchedulerConfig(**scheduler), num_steps=num_steps)


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        ({}, [1.0, 1.0, 1.0, 1.0, 1.0]),
        ({"lr_decay_style": "linear"}, [1.0, 0.775, 0.55, 0.325, 0.1]),
        ({"lr_decay_style": "linear", "lr_decay_iters": 2}, [1.0, 0.55, 0.1, 0.1, 0.1]),
        ({"lr_decay_style": "cosine"}, [1.0, 0.868198, 0.55, 0.231802, 0.1]),
        ({"lr_decay_style": "inverse-square-root"}, [1.0, 1.0, 0.707107, 0.577350, 0.5]),
        ({"lr_warmup_iters": 2}, [0.0, 0.5, 1.0, 1.0, 1.0]),
        ({"lr_warmup_iters": 2, "lr_warmup_init": 0.2}, [0.2, 0.6, 1.0, 1.0, 1.0]),
    ],
)
def test_learning_rates_are_those_that_megatron_documents(imported, scheduler, expected):
    _, schedule = make(THEIRS, num_steps=4, **scheduler)
    assert [schedule.learning_rate(index) for index in range(5)] == pytest.approx(expected, abs=1e-6)


def test_every_group_gets_its_own_and_what_a_checkpoint_left_there_goes(imported):
    inner, schedule = make(
        THEIRS,
        num_steps=4,
        lr_decay_style="linear",
        start_weight_decay=0.0,
        end_weight_decay=0.4,
        weight_decay_incr_style="linear",
    )
    for group in inner.param_groups:
        group.update(lr=77.0, max_lr=77.0, min_lr=7.0, weight_decay=7.0)
    schedule.apply(2)
    assert [group["lr"] for group in inner.param_groups] == pytest.approx([0.55, 0.55])
    assert [group["weight_decay"] for group in inner.param_groups] == pytest.approx([0.2, 0.0])
    assert "weight decay from 0 to 0.4 (linear) in 4 steps" in schedule.explain()


def test_a_schedule_that_does_not_fit_is_refused_with_all_that_is_wrong(imported):
    with pytest.raises(ValueError, match=r"lr_warmup_iters=4 must be less.*; lr_warmup_init=2\.0 must be at most lr"):
        make(THEIRS, num_steps=4, lr_warmup_iters=4, lr_warmup_init=2.0)
